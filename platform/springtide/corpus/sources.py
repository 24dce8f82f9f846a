"""Read documents from a file, a folder, a glob or the URL of a store: text, JSON lines, Parquet, token ids and other formats.

A source is cut into *units*. A unit is a few small files, or a range of a large file. Every machine cuts a source into the same
units, and each unit can be read alone, so any number of processes can share the work.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.config.data import BLANK_LINE
from springtide.corpus import chats, token_files
from springtide.corpus.chats import BadChat, chats_of, has_chat, without_nulls
from springtide.corpus.documents import Broken, Document, Tokens, from_tokens
from springtide.corpus.file_kinds import (
    NEW_KINDS,
    SAMPLE_BYTES,
    XzFile,
    compression_of,
    delimiter_of,
    kind_of,
    lfs_pointer,
    not_text,
    other_format,
    sort_out,
)
from springtide.corpus.files import Found, Look, find_files, library_files, look_of
from springtide.corpus.hub import pinned
from springtide.corpus.json_records import BadLine, parse_line, split_values
from springtide.corpus.tables import (
    SAMPLE,
    BadTable,
    checked,
    is_text,
    names_of,
    no_data_of,
    part_of,
    path_of,
    read_batches,
    read_rows,
    type_of,
    values_of,
)
from springtide.corpus.tar_samples import read_samples
from springtide.corpus.token_files import field_of, ids_of
from springtide.corpus.tokenizer import Tokenizer
from springtide.errors import CorpusError, explain, redacted
from springtide.storage import Folder

# Split a text file with several documents at the separators between them.


def split(
    lines: Iterable[tuple[int, bytes]], separator: str, begin: int, end: int, most_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (place, text) of each document in a range of a file. The text has no line breaks around it.

    Every document but the first follows a line with a separator. The place of a document is the position of this line's first
    byte; the first document has place 0. A document belongs to the range of bytes that contains its place.

    Args:
        lines: (position, bytes) of each line, from the first line that begins in the range. A very long line comes in pieces,
            which all have the position of the line's first byte.
        separator: text that separates documents, or ``blank_line``.
        begin: position of the range's first byte.
        end: position after the range's last byte; -1 is the end of the file.
        most_bytes: a longer document is cut after ``most_bytes`` + 1 bytes, so that the caller sees that it is too long.
    """
    mark = separator.encode()
    found, place, is_here, rest = bytearray(), 0, begin == 0, b""
    line_at = -1
    for at, line in lines:
        is_blank = at != line_at and line.endswith(b"\n") and not line.strip()
        line_at = at
        if separator == BLANK_LINE:
            parts = [b"", b""] if is_blank else [line]
        else:
            *parts, last = (rest + line).split(mark)
            cut = len(last) if line.endswith(b"\n") else max(0, len(last) - len(mark) + 1)
            rest = last[cut:]  # a separator may begin here and end in the next piece of a long line
            parts.append(last[:cut])
        for number, part in enumerate(parts):
            if number:
                if is_here and (text := bytes(found).strip(b"\r\n")):
                    yield place, text
                if 0 <= end <= at:
                    return
                found, place, is_here = bytearray(), at, True
            if is_here:
                found += part[: max(0, most_bytes + 1 - len(found))]
    if is_here and (text := bytes(found + rest).strip(b"\r\n")):
        yield place, text


_UNIT_BYTES = 4 * 2**20
_UNIT_FILES = 256
_MOST_BYTES = 64 * 2**20
"""Maximum size of a document [bytes]. Without a limit, a small compressed file could expand beyond memory. A process that reads
documents holds each document several times: as bytes, as text and as JSON."""
_READ_BYTES = 2**20
_LINES_COUNTED_BYTES = 16 * 2**20
"""Position in a file up to which messages give a line number [bytes]. Beyond it, counting lines takes too long, and messages
give the byte instead."""
_POINTER_BYTES = 1024
"""Files shorter than this are checked [bytes]: a Git LFS pointer would be misread as an array of token ids."""
_ROWS_AT_ONCE = 256
_FOOTERS_AT_ONCE = 16
_NAMES_SHOWN = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unit(NamedTuple):
    """The part of a source that one process reads at a time: a few small files, or a range of a large file."""

    names: tuple[str, ...]
    begin: int = 0
    end: int = -1
    """The unit is the range [begin, end) of a file; -1 is the end of the file. The range counts row groups of a Parquet file,
    documents of a Megatron-LM dataset, and bytes of JSON lines, separated text and arrays of token ids."""
    num_bytes: int = 0
    """Size of the unit in its files; for Parquet, the size before compression [bytes]."""
    layout: str = ""
    """If the file is a chunk of a litdata dataset: how to read it, ``LOADER:TYPE:COMPRESSION``. Empty for any other file."""


@dataclasses.dataclass(frozen=True)
class CorpusReader:
    """Reads the documents of one source: some files in a folder."""

    folder: Folder
    names: tuple[str, ...]
    field: str = "text"
    """Name of the field or column that holds the text, the token ids or the messages of a record."""
    separator: str = ""
    """Text that separates the documents of a text file. ``blank_line``: blank lines separate documents. Empty: each file is one
    document."""
    beside: tuple[str, ...] = ()
    """Files that are not read as documents, but are needed to read ``names``: each ``index.json``, and the ``.bin`` of each
    Megatron-LM ``.idx``."""
    is_chat: bool = False
    """Whether the records of the source are chats, not texts."""
    seen: Mapping[str, Look | None] = dataclasses.field(default_factory=dict, compare=False)
    """File name -> size and last change, from the listing that found the files. For a file that is missing here, one request to
    the store gets its size and last change."""
    is_code: bool = False
    """Whether .json, .csv and .tsv files are read as plain text, as in a folder of source code."""
    left_out: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Files that are not read: documentation, licences, marker files, hidden files, and splits other than ``train`` of a saved
    dataset."""
    state: str = ""
    """Fingerprint of all files of the source. Set only in a copy that ``bare`` returned: the copy has no file names, so it
    cannot compute the fingerprint."""

    def fingerprint(self) -> str:
        """Return a hash that changes when a file is added, removed or rewritten; does not read file contents."""
        state, read = hashlib.blake2b(digest_size=16), {*self.names}
        for name, look in self.looks().items():
            line = f"{redacted(name)}\0{look.replace(' ', chr(0), 1)}\n"
            if name in read and ((kind := self._kind(name)) in NEW_KINDS or compression_of(name) == "xz"):
                # an earlier version of springtide read such a file as text: its fingerprint must now differ, so that the file
                # is prepared again
                line = f"{kind}\0{line}"
            state.update(line.encode("utf-8", "surrogatepass"))  # a file name may be any bytes
        return state.hexdigest()

    def looks(self) -> dict[str, str]:
        """Return file name -> text with the size [bytes] and the last change of the file, separated by a space."""
        found = {}
        for name in (*self.names, *self.beside):
            look = self._look(name)
            found[name] = f"{look.size} {look.change}"
        return found

    def _kind(self, name: str) -> str:
        kind = kind_of(name)
        return "text" if self.is_code and kind in ("json", "csv") else kind

    def _look(self, name: str) -> Look:
        info = self.folder.fs.info(self.folder.where(name)) if self.seen.get(name) is None else {}
        return self.seen.get(name) or look_of(info) or Look(info["size"], "")

    def num_bytes(self) -> int:
        """Return the total size of all files [bytes]. If the file listing lacks a size, request it from the store."""
        return sum(self._look(name).size for name in (*self.names, *self.beside))

    def bare(self) -> CorpusReader:
        """Return a copy without the list of file names, so that sending it to a task is cheap. A task needs no list, because
        each unit that the task reads has the names of its files."""
        return dataclasses.replace(self, names=(), beside=(), seen={}, left_out=(), state=self.fingerprint())

    def units(self) -> list[Unit]:
        """Cut the source into units of about 4 MiB, in the order of file names. A unit is a few small files, or a range of a
        large file."""
        units: list[Unit] = []
        small: list[str] = []
        size = 0
        chunks = token_files.litdata_layouts(self.folder, self.beside)
        footers = self._footers([name for name in self.names if self._kind(name) == "parquet"])
        for name in self.names:
            total = 0 if self._kind(name) == "parquet" else self._look(name).size
            kind = self._kind(name)
            is_whole = kind in NEW_KINDS or (kind == "text" and (not self.separator or total <= _UNIT_BYTES))
            if name in chunks:
                units.append(Unit((name,), num_bytes=total, layout=chunks[name]))
            elif token_files.is_tokens(name):
                parts = list(token_files.ranges(self.folder, name, _UNIT_BYTES))
                units += [Unit((name,), begin, end, total // len(parts)) for begin, end in parts]
            elif is_whole or compression_of(name):
                small.append(name)
                size += total
                if size >= _UNIT_BYTES or len(small) >= _UNIT_FILES:
                    units.append(Unit(tuple(small), num_bytes=size))
                    small, size = [], 0
            elif self._kind(name) == "parquet":
                units += [Unit((name,), group, group + 1, size) for group, size in enumerate(next(footers))]
            else:
                bounds = [*range(0, total, _UNIT_BYTES), total]
                units += [Unit((name,), begin, end, end - begin) for begin, end in itertools.pairwise(bounds)]
        return [*units, Unit(tuple(small), num_bytes=size)] if small else units

    def _footers(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Yield for each Parquet file in ``names`` the sizes of its row groups [bytes]. Reads up to 16 files concurrently."""

        def sizes(name: str) -> list[int]:
            with self._blamed(name), self.folder.open(name) as file:
                footer = pq.ParquetFile(file).metadata
                return [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]

        if names:
            with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
                yield from threads.map(sizes, names)

    def read(self, unit: Unit, vocabulary: Tokenizer | None = None) -> Iterator[Document | Broken]:
        """Yield the documents of ``unit`` in the order of its files, and a ``Broken`` for each record that cannot be used.
        Bytes that are not UTF-8, and halves of surrogate pairs, become U+FFFD.

        Args:
            vocabulary: the tokenizer that made the token ids of the source. If it is None, token ids are skipped.

        Raises:
            CorpusError: a file is damaged or in another format than its name says, the tokenizer lacks a token id, or the
                records hold chats but ``corpus.chat_template`` is not set.
        """
        for name in unit.names:
            with self._blamed(name):
                yield from from_tokens(self._records(name, unit, vocabulary), self.folder.where(name), vocabulary)

    def _records(self, name: str, unit: Unit, vocabulary: Tokenizer | None) -> Iterator[Document | Broken | Tokens]:
        kind = self._kind(name)
        if self.is_chat and kind == "text":
            limit = "is text, and chats are records, in JSON lines, JSON, CSV, Parquet, Arrow or tar"
            remedy = "point corpus.source at those files only"
            raise CorpusError(explain("corpus.source", self.folder.where(name), limit, remedy))
        if token_files.is_tokens(name) or unit.layout:
            if unit.num_bytes < _POINTER_BYTES:
                with self.folder.open(name) as file:
                    self._refuse(name, lfs_pointer(file.read(SAMPLE_BYTES)))
            span = (unit.begin, unit.end)
            yield from token_files.read(self.folder, name, span, unit.layout, self.field, vocabulary)
        elif kind == "text" and self.separator:
            yield from self._separated(name, unit)
        elif kind == "text":
            with self._open(name, must_be_text=True) as file:
                data = _without_mark(file.read(_MOST_BYTES + 1))
            yield _document(name, data)
        else:
            readers = {"lines": self._lines, "json": self._values, "csv": self._table, "tar": self._samples}
            readers |= {"parquet": self._rows, "arrow": self._batches}
            yield from readers[kind](name, unit)

    def documents(self) -> Iterator[Document]:
        """Yield every readable document of the source, unit by unit."""
        for unit in self.units():
            yield from (found for found in self.read(unit) if isinstance(found, Document))

    @contextlib.contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Turn an error about the content of file ``name`` into a CorpusError that names the file."""
        try:
            yield
        except BadTable as error:
            raise CorpusError(explain("corpus.source", self.folder.where(name), *error.args)) from None
        except (pa.ArrowException, UnicodeDecodeError, IndexError, OSError) as error:
            # UnicodeDecodeError: a column name is not UTF-8; IndexError: a row has a wrong index into a Parquet dictionary
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
                raise  # an error of disk or network: if pyarrow cannot decode bytes, its OSError has no errno
            self._check_format(name)
            where, remedy = self.folder.where(name), "restore the file, or exclude it"
            raise CorpusError(explain("corpus.source", where, f"cannot be read ({error})", remedy)) from error

    def _check_format(self, name: str) -> None:
        """Raise CorpusError if the first bytes of file ``name`` are of a format that its suffix does not name, such as gzip."""
        with self.folder.open(name) as file:
            self._refuse(name, other_format(file.read(SAMPLE_BYTES), name))

    def _refuse(self, name: str, found: tuple[str, str] | None) -> None:
        if found:
            raise CorpusError(explain("corpus.source", self.folder.where(name), *found))

    def _open(self, name: str, must_be_text: bool = False) -> IO[bytes]:
        """Open a file, decompressed if its suffix names a compression. ``must_be_text``: raise CorpusError if its first bytes
        are not text."""
        data: Any = self.folder.open(name)
        file: Any
        if (compression := compression_of(name)) == "xz":
            file = io.BufferedReader(XzFile(data), _READ_BYTES)
        elif compression:  # pyarrow decompresses, because Python's own library lacks zstd
            file = io.BufferedReader(pa.CompressedInputStream(data, compression))
        else:  # wrap remote files: ``readline`` of fsspec has no size limit, so a huge line would fill memory
            file = data if isinstance(data, io.BufferedReader) else io.BufferedReader(data, _READ_BYTES)
        if must_be_text and (found := not_text(file.peek(SAMPLE_BYTES), name)):
            file.close()
            self._refuse(name, found)
        return file

    def _lines(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        """Yield the documents of a unit of JSON lines. A line belongs to the unit whose range contains the first byte of the
        line."""
        with self._open(name, must_be_text=not unit.begin) as file:
            place = unit.begin
            if unit.begin:
                file.seek(unit.begin - 1)
                place += _skip_line(file, place - 1, unit.end) - 1
            while unit.end < 0 or place < unit.end:
                line = file.readline(_MOST_BYTES + 1)
                if not line:
                    return
                if len(line) > _MOST_BYTES:
                    yield _too_long(f"{name}@{place}", line)
                    place += 0 if line.endswith(b"\n") else _skip_line(file, place + len(line), unit.end)
                elif (record := _without_mark(line)).strip():  # ``cat`` leaves byte order marks inside a file
                    yield self._record(f"{name}@{place}", record)
                place += len(line)

    def _separated(self, name: str, unit: Unit) -> Iterator[Document | Broken]:
        with self._open(name, must_be_text=not unit.begin) as file:
            place = unit.begin
            if unit.begin:
                file.seek(unit.begin - 1)
                place += _skip_line(file, place - 1, unit.end) - 1
            for at, text in split(_pieces(file, place), self.separator, unit.begin, unit.end, _MOST_BYTES):
                yield _document(f"{name}@{at}", text)

    def _record(self, name: str, line: bytes) -> Document | Broken | Tokens:
        sample = line[: 8 * SAMPLE].decode("utf-8", errors="replace").strip()[:SAMPLE]
        try:
            record = parse_line(line)
        except BadLine as error:
            return Broken(name, str(error), sample)
        if self.is_chat:
            return self._chat(name, record, sample)
        found = record.get(field_of(self.field, record)) if isinstance(record, dict) else None
        if found is None and "." in self.field:
            found = _inner(record, self.field.split("."))
        if (ids := ids_of(found)) is not None:
            return Tokens(name, ids)
        if not isinstance(found, str):
            if isinstance(record, dict):
                self._check_is_text(name, record)
            fields = (
                [str(one)[:SAMPLE] for one in itertools.islice(record, _NAMES_SHOWN)]
                if isinstance(record, dict)
                else []
            )
            return Broken(name, f"no text in {self.field!r}", sample, tuple(fields))
        return Document(name, _SURROGATE.sub("\ufffd", found))  # JSON can encode half a surrogate pair

    def _chat(self, name: str, record: Any, sample: str) -> Document | Broken:
        """Return the chat of a record, or a ``Broken`` with the reason to drop the record."""
        try:
            found = chats_of(record, self.field)
        except BadChat as error:
            return Broken(name, error.reason, f"{error.problem}; {error.remedy}"[:SAMPLE])
        if isinstance(found, str):
            return Broken(name, found, sample)
        turns, rejected = found
        text = "\n\n".join(turn.content or turn.more for turn in (*turns, *rejected[-1:]))
        return Document(name, text, turns=turns, rejected=rejected)

    def line_of(self, name: str) -> str:
        """Return where a record is, for messages: its file and line, or row group and row. More than 16 MiB into a file, and in
        a tar, it is the byte instead of the line. ``name``: name of the document."""
        file, _, place = name.rpartition("@")
        where = redacted(self.folder.where(file))
        if "/" in place:
            return "{}, {} {}, row {}".format(
                where, "batch" if kind_of(file) == "arrow" else "row group", *place.split("/")
            )
        if kind_of(file) == "tar" or int(place) > _LINES_COUNTED_BYTES:
            return f"{where}, byte {place}"
        left, line = int(place), 1
        with self._open(file) as data:
            while left > 0 and (part := data.read(min(left, _READ_BYTES))):
                left, line = left - len(part), line + part.count(b"\n")
        return f"{where}, line {line}"

    def _check_is_text(self, name: str, names: Collection[str]) -> None:
        """Raise CorpusError if a record with the fields ``names`` holds a chat: ``corpus.chat_template`` must then be set.
        ``name``: name of the record, for the error."""
        if self.field == "text" and "text" not in names and has_chat(names):
            limit = f"is empty, and {self.line_of(name)} holds a chat"
            raise CorpusError(
                explain("corpus.chat_template", "", limit, "set it to chatml, llama3, plain, or a Jinja file")
            )

    def _columns(self, name: str, first: str, schema: pa.Schema) -> tuple[list[str], list[str]]:
        """Return the columns to read from a Parquet or Arrow file, and the path (column, then struct fields) to the text.

        The path is empty for chats. ``first``: name of the file's first record, for errors. Raises CorpusError if the column
        ``self.field`` is missing, occurs twice or is a struct of several fields."""
        if self.is_chat:
            return [one for one in schema.names if one in (self.field, *chats.COLUMNS)], []
        self._check_is_text(first, schema.names)
        field = field_of(self.field, schema.names)
        if schema.names.count(field) > 1 or not (path := path_of(field, schema)):
            raise self._no_column(name, field, schema.names.count(field), names_of(schema))
        if pa.types.is_struct(kind := type_of(path, schema)):
            names = [f"{field}.{kind.field(number).name}" for number in range(kind.num_fields)]
            limit = f"is a struct of several fields in {self.folder.where(name)}"
            raise CorpusError(explain("corpus.field", field, limit, f"choose one of {_listed(names)}"))
        return [".".join(path)], path

    def _no_column(self, name: str, field: str, count: int, names: Sequence[str]) -> CorpusError:
        problem = f"is the name of {count} columns of" if count else "is not a column of"
        remedy = "rename one of them" if count else f"choose one of {_listed(names)}"
        return CorpusError(explain("corpus.field", field, f"{problem} {self.folder.where(name)}", remedy))

    def _rows(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        with self.folder.open(name) as file:
            footer = _footer(self.folder, name, self.state or str(self._look(name)))
            parquet = pq.ParquetFile(file, metadata=footer)
            columns, path = self._columns(name, f"{name}@{unit.begin}/0", parquet.schema_arrow)
            if len(path) == 1 and is_text(type_of(path, parquet.schema_arrow)):
                # read values as a dictionary: with a copy per row, a small file of one repeated text could exceed memory
                parquet = pq.ParquetFile(file, metadata=footer, read_dictionary=path)
            last = parquet.metadata.num_row_groups if unit.end < 0 else unit.end
            for group in range(unit.begin, last):
                batches = parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns)
                yield from self._of_batches(f"{name}@{group}", batches, path)

    def _batches(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        with self._open(name) as file:
            schema, batches = read_batches(file)
            columns, path = self._columns(name, f"{name}@0/0", schema)
            for number, batch in enumerate(batches):
                checks = [checked(part_of(batch, path))] if path else [checked(batch[one], False) for one in columns]
                found = pa.RecordBatch.from_arrays(checks, path[-1:] or columns)
                parts = (found.slice(begin, _ROWS_AT_ONCE) for begin in range(0, found.num_rows, _ROWS_AT_ONCE))
                yield from self._of_batches(f"{name}@{number}", parts, path[-1:])

    def _of_batches(
        self, where: str, batches: Iterable[pa.RecordBatch], path: list[str]
    ) -> Iterator[Document | Broken | Tokens]:
        """Yield the documents in record batches of a file. ``where``: file and row group, for names of documents; ``path``:
        column, then struct fields, that lead to the text; empty for chats."""
        if self.is_chat:
            for row, record in enumerate(record for batch in batches for record in batch.to_pylist()):
                # Parquet gives each row the struct keys of all rows, such as arguments of other tools: drop keys that are null
                yield self._chat(f"{where}/{row}", without_nulls(record), repr(record)[:SAMPLE])
            return
        for row, value in enumerate(value for batch in batches for value in values_of(part_of(batch, path))):
            if isinstance(value, np.ndarray):
                yield Tokens(f"{where}/{row}", value)
            elif isinstance(value, bytes):
                yield _document(f"{where}/{row}", value)
            else:
                yield Broken(f"{where}/{row}", "no text", value)

    def _values(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        with self._open(name, must_be_text=True) as file:
            for place, value in split_values(file, _MOST_BYTES):
                where = f"{name}@{place}"
                yield _too_long(where, value) if len(value) > _MOST_BYTES else self._record(where, value)

    def _table(self, name: str, unit: Unit) -> Iterator[Document | Broken]:
        names: list[str] = []
        column = 0
        with self._open(name, must_be_text=True) as file:
            for place, row in read_rows(file, delimiter_of(name), _MOST_BYTES):
                where = f"{name}@{place}"
                if not names:
                    names = [row] if isinstance(row, str) else row
                    if not self.is_chat:
                        self._check_is_text(where, names)
                        if names.count(self.field) != 1:
                            raise self._no_column(name, self.field, names.count(self.field), names)
                        column = names.index(self.field)
                elif isinstance(row, str):
                    yield Broken(where, row, "")
                elif len(row) != len(names):
                    yield Broken(
                        where, "a row with another number of cells than the first", ", ".join(row[:SAMPLE])[:SAMPLE]
                    )
                elif self.is_chat:
                    yield self._chat(where, dict(zip(names, row, strict=True)), ", ".join(row[:SAMPLE])[:SAMPLE])
                else:
                    yield Document(where, row[column])

    def _samples(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        suffixes = ("json",) if self.is_chat else tuple(dict.fromkeys((self.field.lower(), "txt", "json")))
        with self._open(name) as file:
            for sample in read_samples(file, suffixes, _MOST_BYTES):
                where = f"{name}@{sample.place}"
                if not sample.suffix:
                    shown = sample.name[:SAMPLE].encode("utf-8", "replace").decode()
                    yield Broken(where, f"a sample without a .{' or .'.join(suffixes)}", shown)
                elif sample.suffix == "json" and len(sample.data) <= _MOST_BYTES:
                    yield self._record(where, sample.data)
                elif not_text(sample.data, ""):
                    yield Broken(where, "no text", repr(sample.data[:SAMPLE])[:SAMPLE])
                else:
                    yield _document(where, _without_mark(sample.data))


@functools.lru_cache(maxsize=1)
def _footer(folder: Folder, name: str, state: str) -> pq.FileMetaData:
    """Return the footer of a Parquet file. Cached, because each row group is a unit and needs the footer, and reading the
    footer of 8,000 row groups takes 8 ms. ``state``: any text that changes when the file changes, so that the cache is not
    stale."""
    with folder.open(name) as file:
        return pq.read_metadata(file)


def _inner(record: Any, path: Sequence[str]) -> Any:
    """Follow ``path``, a sequence of keys, through nested JSON objects, and return the value; None if a key is missing."""
    for name in path:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _listed(names: Sequence[str]) -> str:
    """Return the names of columns for an error message, shortened, because a file may have very many or very long names."""
    return ", ".join(name[:SAMPLE] for name in names[:_NAMES_SHOWN]) or "none: it has no columns"


def _without_mark(beginning: bytes) -> bytes:
    """Remove from the beginning of a file the UTF-8 byte order mark that Windows programs write."""
    return beginning.removeprefix(codecs.BOM_UTF8)


def _document(name: str, data: bytes) -> Document | Broken:
    return Document(name, data.decode("utf-8", "replace")) if len(data) <= _MOST_BYTES else _too_long(name, data)


def _too_long(name: str, data: bytes) -> Broken:
    return Broken(name, f"longer than {_MOST_BYTES:,} bytes", data[:SAMPLE].decode("utf-8", "replace"))


def _skip_line(file: IO[bytes], begin: int, end: int) -> int:
    """Read the rest of a line from byte ``begin``, and return the number of bytes read. Stop early after byte ``end``. If
    ``end`` is -1, never stop early."""
    read = 0
    while (end < 0 or begin + read <= end) and (part := file.readline(_READ_BYTES)):
        read += len(part)
        if part.endswith(b"\n"):
            break
    return read


def _pieces(file: IO[bytes], place: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position in the file, bytes) of each line from byte ``place`` on. A line of more than 1 MiB comes in pieces, which
    all have the position of the line."""
    at = place
    while piece := file.readline(_READ_BYTES):
        yield at, piece if place else _without_mark(piece)
        place += len(piece)
        if piece.endswith(b"\n"):
            at = place


def open_source(
    source: str, max_files: int = 0, field: str = "text", separator: str = "", is_chat: bool = False
) -> CorpusReader:
    """Find the files of ``corpus.source``. Raises CorpusError if the source does not exist, cannot be reached or has no
    files."""
    if source == "stdlib":
        folder, names = library_files()
        folder, found, hidden = Found(folder, dict.fromkeys(names), ())
        has_all = False
    else:
        source = pinned(source)
        folder, found, hidden = find_files(source)
        has_all = folder.url == Folder(source, is_source=True).url
    if not found:
        raise CorpusError(
            explain("corpus.source", source, "holds no files", "point it at text files, a folder or a glob")
        )
    names, beside = token_files.with_indexes(folder, tuple(found), has_all)
    unlisted = no_data_of(folder, names)
    names, no_data, is_code = sort_out([name for name in names if name not in unlisted])
    left_out = (*no_data, *sorted(unlisted), *hidden)
    return CorpusReader(folder, names[: max_files or None], field, separator, beside, is_chat, found, is_code, left_out)
