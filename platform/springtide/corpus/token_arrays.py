"""Read token ids that lie end to end in one array: ``.npy``, raw ``.bin`` (nanoGPT), ``.bin`` with llm.c's header.

A document ends at an end-of-text id. The array is read in ranges: a document belongs to the range that holds its first token.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from springtide.corpus.documents import MOST_TOKENS, Broken, Tokens, too_long, unreadable
from springtide.corpus.tokenizer import Tokenizer
from springtide.storage import Folder

_HEAD_BYTES = 2**17
_READ_TOKENS = 2**19
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic number and version -> type of a token. Source: karpathy/llm.c, ``dev/data/data_common.py``."""
_LLM_C_HEADER = 1024


class _Array(NamedTuple):
    folder: Folder
    name: str
    begin: int
    """Where the tokens begin [bytes]."""
    kind: np.dtype
    tokens: int

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return tokens [begin, end); fewer at the end of the array."""
        places = (self.begin + self.kind.itemsize * min(place, self.tokens) for place in (begin, end))
        found = np.frombuffer(self.folder.read_range(self.name, *places), dtype=self.kind)
        if len(found) < min(end, self.tokens) - begin:
            raise unreadable(
                self.folder.where(self.name), f"it ends after {begin + len(found)} of {self.tokens} tokens"
            )
        return found


def read_array(folder: Folder, name: str, begin: int, end: int, vocabulary: Tokenizer) -> Iterator[Tokens | Broken]:
    """Yield the documents whose first token lies in bytes [begin, end) of the file; -1 is its end. CorpusError if its
    header cannot be read."""
    array = _open(folder, name, vocabulary)
    first, last = (
        array.tokens if place < 0 else min(max(0, -(-(place - array.begin) // array.kind.itemsize)), array.tokens)
        for place in (begin, end)
    )
    place = _next(array, first - 1, last, vocabulary.end_of_text) if first else 0
    while place < last:
        document, length = _document(array, place, vocabulary.end_of_text)
        if length > MOST_TOKENS:
            yield too_long(f"{name}@{place}", document)
            place = _next(array, place + length, last, vocabulary.end_of_text)
        else:
            if length:
                yield Tokens(f"{name}@{place}", document)
            place += length + 1


def _next(array: _Array, begin: int, end: int, end_of_text: int) -> int:
    """Return the place after the first end-of-text id in [begin, end), or ``end``."""
    for place in range(begin, end, _READ_TOKENS):
        found = np.flatnonzero(array.read(place, min(place + _READ_TOKENS, end)) == end_of_text)
        if len(found):
            return place + int(found[0]) + 1
    return end


def _document(array: _Array, begin: int, end_of_text: int) -> tuple[np.ndarray, int]:
    """Return the ids from ``begin`` to the next end-of-text id, and their number; of a document that is too long, the first
    ids and a number above the limit."""
    found: list[np.ndarray] = []
    length, step = 0, 4096
    while length <= MOST_TOKENS and begin + length < array.tokens:
        part = array.read(begin + length, begin + length + step)
        ends = np.flatnonzero(part == end_of_text)
        part = part[: int(ends[0])] if len(ends) else part
        found.append(part)
        length += len(part)
        if len(ends):
            break
        step = _READ_TOKENS
    return np.concatenate(found) if found else np.empty(0, array.kind), length


def _open(folder: Folder, name: str, vocabulary: Tokenizer) -> _Array:
    size = folder.size(name)
    head = bytes(folder.read_range(name, 0, min(size, _HEAD_BYTES)))
    begin, kind, tokens = _numpy(folder.where(name), head) if name.lower().endswith(".npy") else _raw(head, vocabulary)
    held = (size - begin) // kind.itemsize
    if (size - begin) % kind.itemsize and tokens < 0:
        raise unreadable(folder.where(name), f"its {size} bytes are not whole ids of {kind.itemsize} bytes")
    if tokens > held:
        raise unreadable(folder.where(name), f"its header says {tokens} ids, the file holds {held}")
    return _Array(folder, name, begin, kind, held if tokens < 0 else tokens)


def _raw(head: bytes, vocabulary: Tokenizer) -> tuple[int, np.dtype, int]:
    """Return where the ids begin, their type, and their number, -1 for all that follow. Ids without a header are uint16 if
    all ids of the tokenizer fit, unless the upper half of each first uint32 is zero."""
    if len(head) >= _LLM_C_HEADER:
        magic, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
        if kind := _LLM_C.get((magic, version)):
            return _LLM_C_HEADER, np.dtype(kind), max(0, tokens)
    halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    is_wide = vocabulary.size > 2**16 or (len(halves) > 1 and not halves[:, 1].any() and bool(halves[:, 0].any()))
    return 0, np.dtype("<u4" if is_wide else "<u2"), -1


def _numpy(where: str, head: bytes) -> tuple[int, np.dtype, int]:
    """Return where the ids of a ``.npy`` file begin, their type and their number."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, is_fortran, kind = read(file)
    except Exception as error:  # numpy parses it as Python, and raises what its tokenizer raises
        raise unreadable(where, f"header: {str(error)[:200]}") from None
    if kind.kind not in "iu" or is_fortran or any(not isinstance(length, int) or length < 0 for length in shape):
        raise unreadable(where, f"header: it holds {kind} in shape {str(shape)[:100]}, not whole numbers row by row")
    tokens = 1
    for length in shape:
        tokens *= length
    return file.tell(), kind, tokens
