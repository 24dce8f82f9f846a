"""The values of a Parquet column that holds texts or token ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from springtide.corpus.token_files import is_ids

SAMPLE = 200
"""Characters of a broken record that are shown."""
_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_kind(plain) for is_kind in _STRINGS)


def values_of(column: pa.Array) -> Iterator[bytes | str | np.ndarray]:
    """Yield the bytes of each text of a column, because pyarrow refuses a column if one is not UTF-8; of a list of whole
    numbers, the numbers. For a value of another type yield the beginning of its representation."""
    if is_ids(column.type):
        for value in column:
            ids = value.values
            yield "None" if ids is None or ids.null_count else ids.to_numpy(zero_copy_only=False)
        return
    if not is_text(column.type):
        yield from (repr(value)[:SAMPLE] for value in column.to_pylist())
        return
    is_shared = pa.types.is_dictionary(column.type)
    texts = (column.dictionary if is_shared else column).cast("large_binary")
    for index in column.indices.to_pylist() if is_shared else range(len(texts)):
        if is_shared and index is not None and not 0 <= index < len(texts):  # pyarrow does not look
            raise pa.ArrowInvalid(f"a row refers to entry {index} of a dictionary of {len(texts)}")
        text = None if index is None else texts[index].as_py()
        yield "None" if text is None else text
