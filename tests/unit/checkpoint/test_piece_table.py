"""Pieces in columns are the same pieces, and a rank finds all that it needs among them."""

from __future__ import annotations

import random

import pytest

from springtide.checkpoint.format import BLOCK_BYTES, Piece
from springtide.checkpoint.piece_table import PieceTable, share
from springtide.checkpoint.tensors import Box

SHAPES = {"a": (12, 4), "b": (7,), "scale": (), "large": (3 * BLOCK_BYTES,), "wide": (2, 6)}


def pieces_of(rank: int, ranks: int) -> list[Piece]:
    """What ``rank`` has written: rows of each tensor, and rank 0 the one value."""
    found = []
    for name, shape in SHAPES.items():
        if not shape:
            box = Box((), ()) if rank == 0 else None
        else:
            first, end = (shape[0] * at // ranks for at in (rank, rank + 1))
            box = Box((first, *(0 for _ in shape[1:])), (end - first, *shape[1:])) if end > first else None
        if box is not None:
            size = box.num_elements
            digests = tuple(f"{rank:016x}{block:016x}" for block in range(max(1, -(-size // BLOCK_BYTES))))
            file = f"step-0000000001/a0001-r{rank:04d}.safetensors"
            found.append(Piece(name, "U8", shape, *box, file, 8 * rank, size, digests))
    return found


def overlap(piece: Piece, box: Box) -> bool:
    """Whether they share elements."""
    sides = zip(piece.offsets, piece.sizes, box.offsets, box.sizes, strict=True)
    return all(begin < start + length and start < begin + size for begin, size, start, length in sides)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_table_holds_the_pieces_that_it_was_made_of(ranks: int) -> None:
    each = [pieces_of(rank, ranks) for rank in range(ranks)]
    tables = [PieceTable.of(one) for one in each]
    assert [table.pieces() for table in tables] == each
    assert PieceTable.joined([*tables, PieceTable.of([])]).pieces() == [piece for one in each for piece in one]


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_gets_every_piece_of_its_boxes_and_one_of_each_tensor(seed: int) -> None:
    draw, ranks = random.Random(seed), 5
    table = PieceTable.joined([PieceTable.of(pieces_of(rank, ranks)) for rank in range(ranks)])
    wanted = {"scale": Box((), ()), "of another model": Box((0,), (1,))}
    for name in ("a", "b", "large"):
        begin, end = sorted(draw.randint(0, SHAPES[name][0]) for _ in range(2))
        wanted[name] = Box((begin, *(0 for _ in SHAPES[name][1:])), (end - begin, *SHAPES[name][1:]))
    wanted["wide"] = Box((0, 2), (2, 2))  # some columns
    found = table.overlapping(wanted)
    needed = [piece for piece in table.pieces() if piece.tensor in wanted and overlap(piece, wanted[piece.tensor])]
    assert [piece for piece in found if piece in needed] == needed
    assert {piece.tensor for piece in found} == set(SHAPES)
    assert len(found) <= len(needed) + len(SHAPES)


def test_a_tensor_of_another_shape_than_is_wanted_is_found_whole() -> None:
    table = PieceTable.joined([PieceTable.of(pieces_of(rank, 2)) for rank in range(2)])
    assert [piece.file[-16:-12] for piece in table.overlapping({"a": Box((0,), (1,))}) if piece.tensor == "a"] == [
        *("0000", "0001"),
    ]


def test_each_index_is_read_by_one_rank() -> None:
    names = [f"r{rank}" for rank in range(10)]
    for size in (1, 3, 10, 16):
        assert sorted(name for rank in range(size) for name in share(names, rank, size)) == names
