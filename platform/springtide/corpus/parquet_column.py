"""The values of a column of Parquet or Arrow that holds texts or token ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from springtide.corpus.content import not_text
from springtide.corpus.token_files import is_ids

SAMPLE = 200
"""Characters of a broken record that are shown."""
_BINARY = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *_BINARY)
_MOST_NAMES = 20


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts, or bytes that may be texts."""
    return any(is_kind(_plain(kind)) for is_kind in _STRINGS)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def path_of(field: str, schema: pa.Schema) -> list[str]:
    """Return the name of a column, or the names that lead to a field of a struct: ``a.b`` is b of the struct a. Empty if there
    is none."""
    if field in schema.names:
        return [field]
    first, *path = field.split(".")
    kind = schema.field(first).type if schema.names.count(first) == 1 else pa.null()
    for name in path:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return []
        kind = kind.field(name).type
    return [first, *path] if path and not pa.types.is_null(kind) else []


def type_of(path: list[str], schema: pa.Schema) -> pa.DataType:
    """Return the type of what ``path_of`` found."""
    kind = schema.field(path[0]).type
    for name in path[1:]:
        kind = kind.field(name).type
    return kind


def names_of(schema: pa.Schema) -> list[str]:
    """Return the first few names that ``corpus.field`` could have: columns, and fields of structs."""
    found = []
    for column in schema:
        inner = [column.type.field(number).name for number in range(column.type.num_fields)]
        found += [f"{column.name}.{name}" for name in inner] if pa.types.is_struct(column.type) else [column.name]
    return found[:_MOST_NAMES]


def values_of(column: pa.Array) -> Iterator[bytes | str | np.ndarray]:
    """Yield the bytes of each text of a column, because pyarrow refuses a column if one is not UTF-8; of a list of whole
    numbers, the numbers. For a value of another type, or bytes that are no text, yield the beginning of its representation."""
    if is_ids(column.type):
        for value in column:
            ids = value.values
            yield "None" if ids is None or ids.null_count else ids.to_numpy(zero_copy_only=False)
        return
    if not is_text(column.type):
        yield from (repr(value)[:SAMPLE] for value in column.to_pylist())
        return
    is_binary = any(is_kind(_plain(column.type)) for is_kind in _BINARY)
    is_shared = pa.types.is_dictionary(column.type)
    texts = (column.dictionary if is_shared else column).cast("large_binary")
    for index in column.indices.to_pylist() if is_shared else range(len(texts)):
        if is_shared and index is not None and not 0 <= index < len(texts):  # pyarrow does not look
            raise pa.ArrowInvalid(f"a row refers to entry {index} of a dictionary of {len(texts)}")
        text = None if index is None else texts[index].as_py()
        if text is None or (is_binary and not_text(text, "")):
            yield repr(text and text[:SAMPLE])[:SAMPLE]
        else:
            yield text
