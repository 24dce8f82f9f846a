"""Read tables: columns of Parquet and Arrow that hold texts or token ids, and rows of CSV and TSV."""

from __future__ import annotations

import codecs
import csv
import posixpath
import struct
from collections.abc import Collection, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from springtide.corpus.file_kinds import not_text
from springtide.corpus.token_files import is_ids
from springtide.errors import CorpusError, explain
from springtide.storage import Folder

SAMPLE = 200
"""Number of characters of a broken record that are kept, to show in a report."""
_BINARY = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, *_BINARY)
_MOST_NAMES = 20


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts, or bytes that may be texts."""
    return any(is_kind(_plain(kind)) for is_kind in _STRINGS)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def path_of(field: str, schema: pa.Schema) -> list[str]:
    """Return the path to ``field``, a list of names: a column, then fields of structs. ``a.b`` gives ["a", "b"], the field b of
    the struct column a. Return [] if there is no such field."""
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
    """Return the type of the column or field at ``path``, which ``path_of`` returned."""
    kind = schema.field(path[0]).type
    for name in path[1:]:
        kind = kind.field(name).type
    return kind


def names_of(schema: pa.Schema) -> list[str]:
    """Return up to 20 names that are valid for ``corpus.field``: columns, and fields of structs (``a.b``)."""
    found = []
    for column in schema:
        inner = [column.type.field(number).name for number in range(column.type.num_fields)]
        found += [f"{column.name}.{name}" for name in inner] if pa.types.is_struct(column.type) else [column.name]
    return found[:_MOST_NAMES]


def values_of(column: pa.Array) -> Iterator[bytes | str | np.ndarray]:
    """Yield each value of a column: bytes for a text, an array for a list of whole numbers. For any other value, such as null
    or bytes that are not text, yield a str, the beginning of its repr. Texts stay bytes, because pyarrow cannot decode a
    column to strings if one text is not UTF-8."""
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
        if is_shared and index is not None and not 0 <= index < len(texts):  # pyarrow does not check indices
            raise pa.ArrowInvalid(f"a row refers to entry {index} of a dictionary of {len(texts)}")
        text = None if index is None else texts[index].as_py()
        if text is None or (is_binary and not_text(text, "")):
            yield repr(text and text[:SAMPLE])[:SAMPLE]
        else:
            yield text


# Read record batches of an Arrow stream or file, as the datasets library's ``save_to_disk`` writes them, in bounded memory.
#
# pyarrow does not check the offsets in a batch. With wrong offsets, a hostile file could make it read other memory of the
# process. ``checked`` checks them.

_MAGIC = b"ARROW1\0\0"
"""First bytes of an Arrow file. An Arrow stream and an index follow; the index is not needed here."""
_READ_BYTES = 2**20
MOST_BATCH_BYTES = 512 * 2**20
"""Maximum size of a record batch [bytes]. A batch is held in memory as a whole."""
_AS_BINARY = ((pa.string(), pa.binary()), (pa.large_string(), pa.large_binary()), (pa.string_view(), pa.binary_view()))


def read_batches(file: IO[bytes]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema of an Arrow stream or file, and an iterator over its batches. The caller must pass each column to
    ``checked``, because its values are not checked here.

    Raises:
        pa.ArrowException, OSError: the file is damaged, or it has a batch of more than 512 MiB, a column with a dictionary, or
            compressed buffers.
    """
    source: Any = _Parts(file)
    messages = pa.ipc.MessageReader.open_stream(source)
    first = next(messages, None)
    if first is None or first.type != "schema":  # pyarrow would crash if it read another message as a schema
        raise pa.ArrowInvalid("does not begin with a schema")
    schema = pa.ipc.read_schema(first)
    return schema, (_batch(message, schema) for message in messages)


def _batch(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    if message.type != "record batch":
        raise pa.ArrowInvalid(f"has a message of type {message.type}: write its columns without dictionaries")
    if _is_compressed(message.metadata):  # a compressed batch may be a thousand times larger in memory
        raise pa.ArrowInvalid("is compressed inside: write it without compression, or as Parquet")
    return pa.ipc.read_record_batch(message, schema)


def checked(column: pa.Array, is_text: bool = True) -> pa.Array:
    """Check the offsets and indices of a column, and return the column. Raises ArrowInvalid if one is out of bounds.
    ``is_text``: return texts as bytes, because they may not be UTF-8."""
    for text, binary in _AS_BINARY if is_text else ():
        if column.type == text:
            column = column.view(binary)
    column.validate(full=True)
    return column


def part_of(batch: pa.RecordBatch, path: list[str]) -> pa.Array:
    """Return the column of a batch at ``path``, a column name, then fields of structs: ``["a", "b"]`` is field b of the struct
    column a."""
    column = batch.column(path[0])
    for name in path[1:]:
        column.validate()
        column = pc.struct_field(column, name)
    return column


class _Parts:
    """A file that reads long ranges 1 MiB at a time. If a hostile file claims a length of gigabytes, no more memory is
    allocated than the file has bytes."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        beginning = file.read(len(_MAGIC))
        self._before = b"" if beginning == _MAGIC else beginning

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end of the file."""
        if size > MOST_BATCH_BYTES:
            raise pa.ArrowInvalid(
                f"has a part of {size:,} bytes, more than {MOST_BATCH_BYTES:,}: write smaller batches"
            )
        parts, self._before = [self._before[:size]], self._before[size:]
        left = size - len(parts[0])
        while left > 0 and (part := self._file.read(min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return whether the buffers of a record batch are compressed. pyarrow does not expose this. So read from ``metadata``, a
    FlatBuffers table, whether it has the field ``compression``."""
    data = metadata.to_pybytes()
    message = struct.unpack_from("<I", data)[0]
    header = _field(data, message, 2)
    batch = header + struct.unpack_from("<I", data, header)[0] if header else 0
    return not batch or _field(data, batch, 3) != 0


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position in ``data`` at which field ``number`` of a FlatBuffers table begins; 0 if the table lacks the
    field."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, fields)[0]
    place = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + place if place else 0


# Find the data files in folders that the datasets library's ``save_to_disk`` wrote.
#
# state.json            names the files of the dataset; calls of ``map`` may add cache-*.arrow files, which are not part of it
# dataset_dict.json     names the splits, such as train and test; each split is a dataset in a subfolder of its name

STATE, SPLITS = "state.json", "dataset_dict.json"
_TRAIN = "train"
_MOST_BYTES = 4 * 2**20
"""Maximum size of a state.json or dataset_dict.json [bytes]."""


def no_data_of(folder: Folder, names: Collection[str]) -> set[str]:
    """Return the files in ``names`` to skip: Arrow files that the state.json in their folder does not list, and files of splits
    other than ``train``.

    Raises:
        CorpusError: a state.json or dataset_dict.json is damaged, lists a missing file, or lists splits without ``train``.
    """
    left_out: set[str] = set()
    for name in (one for one in names if posixpath.basename(one) == SPLITS):
        root = posixpath.join(posixpath.dirname(name), "")
        splits = _read(folder, name).get("splits")
        if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
            raise _damaged(folder, name)
        if _TRAIN not in splits:
            problem = f"lists the splits {', '.join(splits)[:200]}, and no {_TRAIN}"
            raise CorpusError(
                explain("corpus.source", folder.where(name), problem, "point corpus.source at one of them")
            )
        others = tuple(f"{root}{split}/" for split in splits if split != _TRAIN)
        left_out.update(one for one in names if one.startswith(others))
    for name in (one for one in names if posixpath.basename(one) == STATE and one not in left_out):
        root = posixpath.dirname(name)
        arrows = {one for one in names if one.endswith(".arrow") and posixpath.dirname(one) == root}
        if not arrows:
            continue
        state = _read(folder, name)
        listed = state.get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise _damaged(folder, name)
        if state.get("_indices_files") or state.get("_indices_data_files"):
            problem = "chooses rows by an index, which is not read"
            remedy = "save it again with a newer version of datasets"
            raise CorpusError(explain("corpus.source", folder.where(name), problem, remedy))
        wanted = {str(one.get("filename")) for one in listed}
        if missing := sorted(wanted - {posixpath.basename(one) for one in arrows}):
            problem = f"lists {missing[0][:200]}, which is not in the source"
            raise CorpusError(explain("corpus.source", folder.where(name), problem, "copy the whole folder"))
        left_out |= {one for one in arrows if posixpath.basename(one) not in wanted}
    return left_out


def _read(folder: Folder, name: str) -> dict[str, Any]:
    if folder.size(name) > _MOST_BYTES:
        raise _damaged(folder, name)
    found = folder.read_json(name)
    if not isinstance(found, dict):
        raise _damaged(folder, name)
    return found


def _damaged(folder: Folder, name: str) -> CorpusError:
    problem = "is not what save_to_disk of the datasets library writes"
    return CorpusError(explain("corpus.source", folder.where(name), problem, "restore the file, or exclude it"))


# Read the rows of a CSV or TSV file in bounded memory. A file is always read from its start, because a quoted cell may hold
# line breaks, so a line break in the middle of the file may not begin a row.

_MOST_CELLS = 2**16
"""Maximum number of cells in a row. An empty cell takes one byte of the file, but eight bytes of memory."""


class BadTable(Exception):
    """A CSV or TSV file cannot be read further. Arguments: the problem, and the remedy."""


def read_rows(file: IO[bytes], delimiter: str, most_bytes: int) -> Iterator[tuple[int, list[str] | str]]:
    """Yield (position, cells) of each row; the position is its first byte in the file. For a row that is not CSV, yield
    (position, problem). Bytes that are not UTF-8 become U+FFFD.

    Raises:
        BadTable: a row has more than 65,536 cells, or more than ``most_bytes`` bytes, for example because a quote is never
            closed.
    """
    csv.field_size_limit(max(csv.field_size_limit(), most_bytes))  # global setting, 128 KiB by default
    lines = _Lines(file, delimiter.encode(), most_bytes)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        place = lines.begin_row()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield place, f"not CSV ({error})"
            continue
        if row:
            yield place, row


class _Lines:
    """Iterator over the lines of a file, as str. Raises BadTable if the lines of one row exceed ``most_bytes``."""

    def __init__(self, file: IO[bytes], delimiter: bytes, most_bytes: int) -> None:
        self._file, self._delimiter, self._most_bytes = file, delimiter, most_bytes
        self._place = self._begin = 0

    def begin_row(self) -> int:
        """Begin a new row at the next line. Return the position in the file at which the row begins [bytes]."""
        self._begin = self._place
        return self._begin

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        left = self._most_bytes - (self._place - self._begin)
        line = self._file.readline(left + 1)
        if not line:
            raise StopIteration
        if len(line) > left:
            problem = f"the row at byte {self._begin:,} is longer than {self._most_bytes:,} bytes"
            raise BadTable(problem, "close its quotes, or write JSON lines or Parquet")
        if b'"' not in line and line.count(self._delimiter) >= _MOST_CELLS:
            raise BadTable(
                f"the row at byte {self._begin:,} has more than {_MOST_CELLS:,} cells", "check its delimiter"
            )
        self._place += len(line)
        return (line if self._place > len(line) else line.removeprefix(codecs.BOM_UTF8)).decode("utf-8", "replace")
