"""Read the data files of checkpoints and verify each byte in the same pass. Used by restores, by second readers (ranks that
read a damaged file again), by saves that verify old blocks, and by ``springtide inspect --verify``. This module does not import
torch.

    pieces -> blocks of 4 MiB -> reads of contiguous blocks of one file -> each part is hashed and copied in the CPU cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from springtide.checkpoint.format import BLOCK_BYTES, BadFile, Piece
from springtide.storage import digest

_READ_BYTES = 16 * 2**20
Take = Callable[[memoryview, int], None]
"""Function: (bytes of a piece, their offset in the piece) -> None. Receives bytes that were read, for example to copy them to a
tensor. A piece is a stored tensor part."""


class PieceSource(Protocol):
    """Reads the files that hold pieces (stored parts of tensors)."""

    def stream(self, name: str, begin: int, end: int) -> Iterable[memoryview]: ...

    def size(self, name: str) -> int: ...


class Block(NamedTuple):
    """A block of a piece: its place in the file, its number in the piece, and the function that receives its bytes."""

    file: str
    begin: int
    end: int
    """End of the block, an offset in the file like ``begin`` [bytes]."""
    number: int
    piece: Piece
    take: Take

    @property
    def what(self) -> str:
        """Description for error messages."""
        return f"{self.file}: bytes {self.begin} to {self.end} of {self.piece.tensor}"


def _drop(data: memoryview, begin: int) -> None:
    """Receive bytes that are only verified, and do nothing with them."""


def blocks_of(piece: Piece, begin: int = 0, end: int | None = None, take: Take = _drop) -> Iterator[Block]:
    """Yield the blocks of a piece (stored tensor part) that contain its bytes from ``begin`` to ``end``; ``end`` None stands
    for the end of the piece."""
    for number in range(begin // BLOCK_BYTES, -(-(piece.size_bytes if end is None else end) // BLOCK_BYTES)):
        first = number * BLOCK_BYTES
        last = min(first + BLOCK_BYTES, piece.size_bytes)
        yield Block(piece.file, piece.begin + first, piece.begin + last, number, piece, take)


def contiguous(blocks: Iterable[Block]) -> list[list[Block]]:
    """Return ``blocks`` grouped into reads. A read is a list of contiguous blocks of one file, at most about _READ_BYTES."""
    reads: list[list[Block]] = []
    for block in sorted(blocks, key=lambda block: block[:3]):
        read = reads[-1] if reads else []
        follows = read and (read[-1].file, read[-1].end) == (block.file, block.begin)
        if follows and block.begin - read[0].begin < _READ_BYTES:
            read.append(block)
        else:
            reads.append([block])
    return reads


def read_blocks(source: PieceSource, blocks: Sequence[Block], verify: bool = True) -> None:
    """Read contiguous blocks of one file. Raises BadFile if the file is missing or too short, or if bytes have changed since
    the commit; OSError if the store cannot be read."""
    file, place, end = blocks[0].file, blocks[0].begin, blocks[-1].end
    running, left = digest.Running(), iter(blocks)
    block = next(left)
    try:
        for data in source.stream(file, place, end):
            while data.nbytes:
                part, data = data[: block.end - place], data[block.end - place :]
                block.take(part, block.number * BLOCK_BYTES + place - block.begin)
                place += part.nbytes
                if verify:
                    running.add(part)
                    if place == block.end and (found := running.end()) != block.piece.digests[block.number]:
                        expected = block.piece.digests[block.number]
                        raise BadFile(f"{block.what}: digest expected {expected}, found {found}", file)
                block = next(left, block) if place == block.end else block
    except FileNotFoundError:
        raise BadFile(f"{file} is missing", file) from None
    except IsADirectoryError:
        raise BadFile(f"{file} is a folder", file) from None
    except OSError:
        if source.size(file) >= end:
            raise  # the file has all bytes, so this is a network error: a retry may help
    if place != end:
        raise BadFile(f"{file} ends after {source.size(file)} bytes, {end} were committed", file)


def read_all(source: PieceSource, blocks: Iterable[Block], readers: int = 1, verify: bool = True) -> None:
    """Read all ``blocks`` in ``readers`` threads; a single read runs in the calling thread. Raises the errors of
    ``read_blocks``, at the first bad file."""
    reads = contiguous(blocks)
    if readers == 1 or len(reads) == 1:
        for read in reads:
            read_blocks(source, read, verify)
        return
    with ThreadPoolExecutor(readers, "springtide-read") as threads:
        for _ in threads.map(lambda read: read_blocks(source, read, verify), reads):
            pass


def check_pieces(source: PieceSource, pieces: Iterable[Piece], readers: int = 1) -> None:
    """Read and verify all bytes of ``pieces`` (stored tensor parts). Arguments and errors are those of ``read_all``."""
    read_all(source, (block for piece in pieces for block in blocks_of(piece)), readers)
