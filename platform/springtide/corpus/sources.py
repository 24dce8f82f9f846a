"""Read documents from Python's own library, text files, JSON lines, Parquet or files of token ids; from a file, a folder, a
glob, the URL of a store.

A source is cut into *units*: a few small files, or a range of a large one. Units are the same on every machine and are read
independently, so any number of processes can share the work.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from springtide.corpus import chats, token_files
from springtide.corpus.chats import BadChat, chats_of, has_chat
from springtide.corpus.content import SAMPLE_BYTES, lfs_pointer, not_text, other_format
from springtide.corpus.documents import Broken, Document, Tokens, broken_if_lines, from_tokens
from springtide.corpus.file_kinds import compression_of, kind_of, split_off
from springtide.corpus.files import Look, find_files, library_files, look_of
from springtide.corpus.hub import pinned
from springtide.corpus.json_lines import BadLine, parse_line
from springtide.corpus.parquet_column import SAMPLE, is_text, values_of
from springtide.corpus.separators import split
from springtide.corpus.token_files import field_of, ids_of
from springtide.corpus.tokenizer import Tokenizer
from springtide.errors import CorpusError, explain, redacted
from springtide.store import Folder

_UNIT_BYTES = 4 * 2**20
_UNIT_FILES = 256
_MOST_BYTES = 64 * 2**20
"""Most bytes of a document: a small compressed file may hold more than memory does, and every process that prepares holds a
document several times, as bytes, as text and as JSON."""
_READ_BYTES = 2**20
_POINTER_BYTES = 1024
"""A Git LFS pointer is shorter. Read as an array, it would be token ids."""
_ROWS_AT_ONCE = 256
_FOOTERS_AT_ONCE = 16
_SURROGATE = re.compile("[\ud800-\udfff]")


class Unit(NamedTuple):
    """The part of a source that one process reads at a time."""

    names: tuple[str, ...]
    begin: int = 0
    end: int = -1
    """Bytes [begin, end) of JSON lines, separated text and arrays of token ids, row groups [begin, end) of Parquet, or
    documents [begin, end) of an indexed dataset; -1 is the end of the file."""
    num_bytes: int = 0
    """Bytes that it takes in its files; of Parquet, before compression."""
    layout: str = ""
    """Layout of a litdata chunk."""


@dataclasses.dataclass(frozen=True)
class CorpusReader:
    """A folder and its files that contain documents."""

    folder: Folder
    names: tuple[str, ...]
    field: str = "text"
    """Field that holds the text, or the token ids, in JSON lines, Parquet records and MDS samples."""
    separator: str = ""
    """Text between the documents of a text file, ``blank_line`` for empty lines; empty: a file is a document."""
    beside: tuple[str, ...] = ()
    """Files that are read with those: indexes, and the data of indexed datasets."""
    is_chat: bool = False
    """Whether records are chats, not texts."""
    seen: Mapping[str, Look | None] = dataclasses.field(default_factory=dict, compare=False)
    """How files looked when they were found, in one listing; the store is asked for each of the others."""
    left_out: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Files that are not read, because they are no data."""
    state: str = ""
    """Fingerprint of all files, of a reader without their names."""

    def fingerprint(self) -> str:
        """Return a hash that changes when a file is added, removed or rewritten; does not read file contents."""
        state = hashlib.blake2b(digest_size=16)
        for name, look in self.looks().items():
            line = f"{redacted(name)}\0{look.replace(' ', chr(0), 1)}\n"
            state.update(line.encode("utf-8", "surrogatepass"))  # names are bytes, and need not be UTF-8
        return state.hexdigest()

    def looks(self) -> dict[str, str]:
        """Return the size and the last change of each file, by name."""
        found = {}
        for name in (*self.names, *self.beside):
            look = self._look(name)
            found[name] = f"{look.size} {look.change}"
        return found

    def _look(self, name: str) -> Look:
        info = self.folder.fs.info(self.folder.where(name)) if self.seen.get(name) is None else {}
        return self.seen.get(name) or look_of(info) or Look(info["size"], "")

    def num_bytes(self) -> int:
        """Return the size of all files, which a store is asked for only where its listing did not tell it."""
        return sum(self._look(name).size for name in (*self.names, *self.beside))

    def bare(self) -> CorpusReader:
        """Return the reader without the names of its files: what each of many tasks needs to read its unit."""
        return dataclasses.replace(self, names=(), beside=(), seen={}, left_out=(), state=self.fingerprint())

    def units(self) -> list[Unit]:
        """Return the source as units of about four megabytes, in the order of names."""
        units: list[Unit] = []
        small: list[str] = []
        size = 0
        chunks = token_files.litdata_layouts(self.folder, self.beside)
        footers = self._footers([name for name in self.names if kind_of(name) == "parquet"])
        for name in self.names:
            total = 0 if kind_of(name) == "parquet" else self._look(name).size
            is_whole = kind_of(name) == "text" and (not self.separator or total <= _UNIT_BYTES)
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
            elif kind_of(name) == "parquet":
                units += [Unit((name,), group, group + 1, size) for group, size in enumerate(next(footers))]
            else:
                bounds = [*range(0, total, _UNIT_BYTES), total]
                units += [Unit((name,), begin, end, end - begin) for begin, end in itertools.pairwise(bounds)]
        return [*units, Unit(tuple(small), num_bytes=size)] if small else units

    def _footers(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Yield the bytes of each row group of each of these Parquet files; several are read at a time."""

        def sizes(name: str) -> list[int]:
            with self._blamed(name), self.folder.open(name) as file:
                footer = pq.ParquetFile(file).metadata
                return [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]

        if names:
            with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
                yield from threads.map(sizes, names)

    def read(self, unit: Unit, vocabulary: Tokenizer | None = None) -> Iterator[Document | Broken]:
        """Yield the documents of ``unit`` in the order of its files. Bytes that are not UTF-8, and halves of surrogate pairs,
        become U+FFFD.

        Args:
            vocabulary: the tokenizer that made the token ids of the source; without one they are skipped.

        Raises:
            CorpusError: a file with damaged compression, Parquet or indexes, an id that the tokenizer does not have, or a bad
                chat.
        """
        for name in unit.names:
            with self._blamed(name):
                yield from from_tokens(self._records(name, unit, vocabulary), self.folder.where(name), vocabulary)

    def _records(self, name: str, unit: Unit, vocabulary: Tokenizer | None) -> Iterator[Document | Broken | Tokens]:
        if self.is_chat and kind_of(name) == "text":
            limit, remedy = "is not JSON lines or Parquet, where chats are", "point corpus.source at those files only"
            raise CorpusError(explain("corpus.source", self.folder.where(name), limit, remedy))
        if token_files.is_tokens(name) or unit.layout:
            if unit.num_bytes < _POINTER_BYTES:
                with self.folder.open(name) as file:
                    self._refuse(name, lfs_pointer(file.read(SAMPLE_BYTES)))
            span = (unit.begin, unit.end)
            yield from token_files.read(self.folder, name, span, unit.layout, self.field, vocabulary)
        elif kind_of(name) == "text" and self.separator:
            yield from self._separated(name, unit)
        elif kind_of(name) == "text":
            with self._open(name, must_be_text=True) as file:
                data = _without_mark(file.read(_MOST_BYTES + 1))
            yield broken_if_lines(name, data) or _document(name, data)
        elif kind_of(name) == "lines":
            yield from self._lines(name, unit)
        else:
            yield from self._rows(name, unit)

    def documents(self) -> Iterator[Document]:
        """Yield every readable document, unit by unit."""
        for unit in self.units():
            yield from (found for found in self.read(unit) if isinstance(found, Document))

    @contextlib.contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Turn an error about the bytes of file ``name`` into a CorpusError that names it."""
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError, IndexError, OSError) as error:
            # UnicodeDecodeError: of a name that is not UTF-8, too; IndexError: of an index into a dictionary of Parquet
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
                raise  # an error of the disk or network; pyarrow raises a plain OSError for bytes it cannot decode
            self._check_format(name)
            where, remedy = self.folder.where(name), "restore the file, or exclude it"
            raise CorpusError(explain("corpus.source", where, f"cannot be read ({error})", remedy)) from error

    def _check_format(self, name: str) -> None:
        """Raise CorpusError if file ``name`` begins as one of another format."""
        with self.folder.open(name) as file:
            self._refuse(name, other_format(file.read(SAMPLE_BYTES), name))

    def _refuse(self, name: str, found: tuple[str, str] | None) -> None:
        if found:
            raise CorpusError(explain("corpus.source", self.folder.where(name), *found))

    def _open(self, name: str, must_be_text: bool = False) -> io.BufferedReader:
        """Open a file, and decompress it. ``must_be_text``: raise CorpusError if its first bytes are no text."""
        data: Any = self.folder.open(name)
        if compression := compression_of(name):  # pyarrow can read zstd, Python's own library cannot yet
            file = io.BufferedReader(pa.CompressedInputStream(data, compression))
        else:  # a remote file of fsspec's takes no limit for a line
            file = data if isinstance(data, io.BufferedReader) else io.BufferedReader(data, _READ_BYTES)
        if must_be_text and (found := not_text(file.peek(SAMPLE_BYTES), name)):
            file.close()
            self._refuse(name, found)
        return file

    def _lines(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        """Yield the documents of ``unit``: a line belongs to the range that contains its first byte."""
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
                elif (record := line if place else _without_mark(line)).strip():
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
        if (ids := ids_of(found)) is not None:
            return Tokens(name, ids)
        if not isinstance(found, str):
            if isinstance(record, dict):
                self._check_is_text(name, record)
            return Broken(name, f"no text in {self.field!r}", sample)
        return Document(name, _SURROGATE.sub("\ufffd", found))  # JSON can encode half a surrogate pair

    def _chat(self, name: str, record: Any, sample: str) -> Document | Broken:
        """Return a chat, or why it is dropped. CorpusError if its roles or contents are wrong."""
        try:
            found = chats_of(record, self.field)
        except BadChat as error:
            raise self.blamed(name, error) from None
        if isinstance(found, str):
            return Broken(name, found, sample)
        turns, rejected = found
        text = "\n\n".join(turn.content for turn in (*turns, *rejected[-1:]))
        return Document(name, text, turns=turns, rejected=rejected)

    def blamed(self, name: str, error: BadChat) -> CorpusError:
        """Return the error for a bad chat, with its file and line, or its row group and row."""
        return CorpusError(explain("corpus.source", self._line(name), error.problem, error.remedy))

    def _line(self, name: str) -> str:
        file, _, place = name.rpartition("@")
        where = redacted(self.folder.where(file))
        if "/" in place:
            return "{}, row group {}, row {}".format(where, *place.split("/"))
        left, line = int(place), 1
        with self._open(file) as data:
            while left > 0 and (part := data.read(min(left, _READ_BYTES))):
                left, line = left - len(part), line + part.count(b"\n")
        return f"{where}, line {line}"

    def _check_is_text(self, name: str, names: Collection[str]) -> None:
        """Raise CorpusError if a record without text holds a chat, and no template says how it is laid out."""
        if self.field == "text" and "text" not in names and has_chat(names):
            limit = f"is empty, and {self._line(name)} holds a chat"
            raise CorpusError(
                explain("corpus.chat_template", "", limit, "set it to chatml, llama3, plain, or a Jinja file")
            )

    def _chat_rows(self, name: str, unit: Unit, parquet: pq.ParquetFile) -> Iterator[Document | Broken]:
        columns = [one for one in parquet.schema_arrow.names if one in (self.field, *chats.COLUMNS)]
        last = parquet.metadata.num_row_groups if unit.end < 0 else unit.end
        for group in range(unit.begin, last):
            batches = parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns)
            for row, record in enumerate(record for batch in batches for record in batch.to_pylist()):
                yield self._chat(f"{name}@{group}/{row}", record, repr(record)[:SAMPLE])

    def _rows(self, name: str, unit: Unit) -> Iterator[Document | Broken | Tokens]:
        with self.folder.open(name) as file:
            footer = _footer(self.folder, name, self.state or str(self._look(name)))
            parquet = pq.ParquetFile(file, metadata=footer)
            if self.is_chat:
                yield from self._chat_rows(name, unit, parquet)
                return
            names = parquet.schema_arrow.names
            field = field_of(self.field, names)
            self._check_is_text(f"{name}@{unit.begin}/0", names)
            if (count := names.count(field)) != 1:
                problem = f"is the name of {count} columns of" if count else "is not a column of"
                remedy = "rename one of them" if count else f"choose one of {', '.join(names)}"
                raise CorpusError(explain("corpus.field", field, f"{problem} {self.folder.where(name)}", remedy))
            if is_text(parquet.schema_arrow.field(field).type):
                # a value that many rows share is in memory once: expanded, a small file may be larger than memory
                parquet = pq.ParquetFile(file, metadata=footer, read_dictionary=[field])
            last = parquet.metadata.num_row_groups if unit.end < 0 else unit.end
            for group in range(unit.begin, last):
                batches = parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[field])
                values = (value for batch in batches for value in values_of(batch.column(0)))
                for row, value in enumerate(values):
                    where = f"{name}@{group}/{row}"
                    if isinstance(value, np.ndarray):
                        yield Tokens(where, value)
                    else:
                        yield _document(where, value) if isinstance(value, bytes) else Broken(where, "no text", value)


@functools.lru_cache(maxsize=1)
def _footer(folder: Folder, name: str, state: str) -> pq.FileMetaData:
    """Return the footer of a Parquet file. That of 8,000 row groups takes 8 ms to read, and each group is a unit of its own.
    ``state``: changes when the file does."""
    with folder.open(name) as file:
        return pq.read_metadata(file)


def _without_mark(beginning: bytes) -> bytes:
    """Return the beginning of a file without the byte order mark that Windows programs put there."""
    return beginning.removeprefix(codecs.BOM_UTF8)


def _document(name: str, data: bytes) -> Document | Broken:
    return Document(name, data.decode("utf-8", "replace")) if len(data) <= _MOST_BYTES else _too_long(name, data)


def _too_long(name: str, data: bytes) -> Broken:
    return Broken(name, f"longer than {_MOST_BYTES:,} bytes", data[:SAMPLE].decode("utf-8", "replace"))


def _skip_line(file: IO[bytes], begin: int, end: int) -> int:
    """Read from byte ``begin`` to the end of the line, or past ``end`` if that comes first and is not -1; returns the bytes
    read."""
    read = 0
    while (end < 0 or begin + read <= end) and (part := file.readline(_READ_BYTES)):
        read += len(part)
        if part.endswith(b"\n"):
            break
    return read


def _pieces(file: IO[bytes], place: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines from ``place`` on with their places, a long one in pieces."""
    at = place
    while piece := file.readline(_READ_BYTES):
        yield at, piece if place else _without_mark(piece)
        place += len(piece)
        if piece.endswith(b"\n"):
            at = place


def open_source(
    source: str, max_files: int = 0, field: str = "text", separator: str = "", is_chat: bool = False
) -> CorpusReader:
    """Find the files of ``corpus.source``; CorpusError if it is missing, cannot be reached or has no files."""
    if source == "stdlib":
        folder, names = library_files()
        found, has_all, hidden = dict.fromkeys(names), False, ()
    else:
        source = pinned(source)
        folder, found, hidden = find_files(source)
        has_all = folder.url == Folder(source, is_source=True).url
    if not found:
        raise CorpusError(
            explain("corpus.source", source, "holds no files", "point it at text files, a folder or a glob")
        )
    names, beside = token_files.with_indexes(folder, tuple(found), has_all)
    names, no_data = split_off(names)
    names = names[: max_files or None]
    return CorpusReader(folder, names, field, separator, beside, is_chat, found, (*no_data, *hidden))
