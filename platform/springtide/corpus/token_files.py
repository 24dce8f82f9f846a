"""Recognise files that hold token ids instead of text, by their names and the indexes beside them.

X.idx, X.bin                      Megatron-LM's indexed dataset          megatron.py
*.mds, also compressed            mosaicml-streaming (MDS)               sample_chunks.py
index.json with "chunks", *.bin   litdata's tokens                       sample_chunks.py
*.npy, any other *.bin            ids end to end                         token_arrays.py
a list of whole numbers           the field of a JSON or Parquet record  sources.py
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
from collections.abc import Collection, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa

from springtide.corpus import megatron, sample_chunks, token_arrays
from springtide.corpus.documents import Broken, Document, Tokens, unreadable
from springtide.corpus.tokenizer import Tokenizer
from springtide.storage import Folder
from springtide.storage.local_files import stays_inside

_KINDS = {".idx": "megatron", ".mds": "mds", ".npy": "array", ".bin": "array"}
_PACKED = {".zstd": "zstd", ".zst": "zstd", ".gz": "gzip", ".bz2": "bz2"}
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_LITDATA = re.compile(r"/?chunk-\d+-\d+(\.[a-z0-9:]+)?\.bin")
"""Name of a litdata chunk in its folder. Read as an array, its offsets would be token ids."""
_IDS, _TEXT = "input_ids", "text"


def is_tokens(name: str) -> bool:
    """Return whether a file's name says that it holds token ids."""
    return bool(_kind(name))


def _kind(name: str) -> str:
    plain, suffix = posixpath.splitext(name)
    return _KINDS.get(posixpath.splitext(plain)[1].lower() if suffix.lower() in _PACKED else suffix.lower(), "")


def field_of(field: str, names: Collection[str]) -> str:
    """Return the field of a record that holds its document: ``field``, or ``input_ids`` if that is the default and missing."""
    return _IDS if field == _TEXT and _TEXT not in names and _IDS in names else field


def ids_of(value: Any) -> np.ndarray | None:
    """Return a list of whole numbers, of JSON, as an array; None for any other value."""
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        return None
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        return None


def is_ids(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of whole numbers."""
    return any(is_kind(kind) for is_kind in _LISTS) and pa.types.is_integer(kind.value_type)


def with_indexes(folder: Folder, names: tuple[str, ...], has_all: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files to read of ``names``, and those that are read with them: indexes, and the data of indexed datasets.

    Args:
        has_all: whether ``names`` are all files of the folder; else indexes beside them are looked for.

    Raises:
        CorpusError: an index cannot be read, or names a file that is not there.
    """
    listed = set(names)

    def is_there(name: str, beside: str) -> bool:
        return name in listed or (not has_all and folder.exists(name) and _is_beside(folder, name, beside))

    found, beside = set(names), set[str]()
    for name in names:
        stem, suffix = posixpath.splitext(name)
        if suffix == ".idx":
            beside.add(data := megatron.data_name(name))
            if not is_there(data, name):
                raise unreadable(folder.where(name), f"{data}, which holds its tokens, is not in the source")
        elif suffix == ".bin" and is_there(f"{stem}.idx", name):
            beside.add(name)
            found.add(f"{stem}.idx")
    found -= beside
    folders = {posixpath.dirname(name): name for name in sorted(found) if _kind(name) == "mds" or name.endswith(".bin")}
    for name, member in sorted((posixpath.join(one, sample_chunks.INDEX), name) for one, name in folders.items()):
        index = sample_chunks.read_index(folder, name) if is_there(name, member) else {}
        if index:
            _apply(folder, name, index, found, listed)
            beside.add(name)
        elif chunk := next(
            (one for one in sorted(found) if _LITDATA.fullmatch(one, len(posixpath.dirname(name)))), None
        ):
            raise unreadable(
                folder.where(chunk), f"a chunk of litdata's without the {sample_chunks.INDEX} that lists it"
            )
    return tuple(sorted(found - beside)), tuple(sorted(beside))


def _is_beside(folder: Folder, name: str, beside: str) -> bool:
    """Return whether a file that a source does not name lies in its folder, or where the file that it belongs to really is:
    what others made may link to any file of ours."""
    if not folder.is_local:
        return True
    path, real = folder.where(name), posixpath.dirname(os.path.realpath(folder.where(beside)))
    return stays_inside(path, folder.path) or posixpath.dirname(os.path.realpath(path)) == real


def _apply(folder: Folder, name: str, index: dict[str, Any], found: set[str], listed: set[str]) -> None:
    """Take away from ``found`` what an index does not list. Of a shard that lies there twice the raw file is read."""
    if "shards" in index:
        entries = sample_chunks.mds_shards(folder, name, index)
    else:
        entries = [(chunk,) for chunk in sample_chunks.litdata_chunks(folder, name, index)[1]]
    wanted: set[str] = set()
    for number, names in enumerate(entries):
        there = [one for one in names if one in listed]
        if not there and name in listed:
            field = f"{'shards' if 'shards' in index else 'chunks'}[{number}]"
            raise unreadable(
                folder.where(name), f"{field}: {' or '.join(names)[:200] or 'no file'} is not in the source"
            )
        wanted.update(there[:1])
    mine = {one for one in found if posixpath.dirname(one) == posixpath.dirname(name)}
    found -= {one for one in mine if (_kind(one) == "mds" or one.endswith(".bin")) and one not in wanted}


def litdata_layouts(folder: Folder, beside: tuple[str, ...]) -> dict[str, str]:
    """Return the layout of each chunk that a litdata index among ``beside`` lists."""
    layouts: dict[str, str] = {}
    for name in beside:
        if posixpath.basename(name) == sample_chunks.INDEX and "chunks" in (
            index := sample_chunks.read_index(folder, name)
        ):
            layout, chunks = sample_chunks.litdata_chunks(folder, name, index)
            layouts |= dict.fromkeys(chunks, layout)
    return layouts


def ranges(folder: Folder, name: str, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file of token ids that are read independently, of about ``unit_bytes``: bytes of an array,
    documents of an indexed dataset, the whole file of all others."""
    kind = _kind(name)
    if kind == "megatron":
        total = megatron.num_documents(folder, name)
        step = max(1, total * unit_bytes // max(1, folder.size(megatron.data_name(name))))
    elif kind == "array":
        total, step = folder.size(name), unit_bytes
    else:
        yield 0, -1
        return
    for begin in range(0, total, step):
        yield begin, min(begin + step, total)


def read(
    folder: Folder, name: str, span: tuple[int, int], layout: str, field: str, vocabulary: Tokenizer | None
) -> Iterator[Document | Broken | Tokens]:
    """Yield the records of a range of a file. Without a tokenizer token ids may be skipped.

    Args:
        layout: of a litdata chunk.
        field: the column of MDS samples, which may be text.
    """
    where, packed = folder.where(name), _PACKED.get(posixpath.splitext(name)[1].lower(), "")
    if layout:
        with _opened(folder, name, layout.rpartition(":")[2]) as file:
            yield from sample_chunks.read_litdata(file, where, name, layout)
    elif _kind(name) == "mds":
        with _opened(folder, name, packed) as file:
            yield from sample_chunks.read_mds(file, where, name, field)
    elif vocabulary is None:
        return
    elif packed:
        raise unreadable(where, "token ids of this kind are not read compressed: unpack it")
    elif _kind(name) == "megatron":
        yield from megatron.read_documents(folder, name, *span)
    else:
        yield from token_arrays.read_array(folder, name, *span, vocabulary)


@contextlib.contextmanager
def _opened(folder: Folder, name: str, packed: str) -> Iterator[IO[bytes]]:
    with folder.open(name) as file:
        yield io.BufferedReader(pa.CompressedInputStream(file, packed)) if packed else file
