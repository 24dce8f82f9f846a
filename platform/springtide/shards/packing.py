"""Best-fit-decreasing packing of documents into rows (Ding et al., "Fewer truncations improve language modeling", 2024)."""

from __future__ import annotations

import numpy as np

from springtide.storage.digest import mix


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack documents into rows. Returns int32 (pieces, 4): row, document, begin and end of each piece of a document, ordered by
    row.

    ``lengths``: number of tokens of each document, (documents,); ``capacity``: number of tokens in a row, sequence length + 1.
    A document that fits into a row is not cut. A longer document is cut every capacity - 1 tokens, and the next piece repeats
    the last token of the previous piece. So every token but the document's first is predicted once. Pieces are placed longest
    first, each in the row where it leaves the least space.
    """
    pieces = [
        (document, begin, min(begin + capacity, length))
        for document, length in enumerate(lengths.tolist())
        for begin in range(0, max(length - 1, 1), capacity - 1)
    ]
    pieces.sort(key=lambda piece: (piece[1] - piece[2], piece))
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    has_room = np.zeros(capacity + 1, dtype=bool)
    placed: list[tuple[int, int, int, int]] = []
    rows = 0
    for document, begin, end in pieces:
        size = end - begin
        room = size + int(np.argmax(has_room[size:]))
        if has_room[room]:
            row = with_room[room].pop()
            has_room[room] = bool(with_room[room])
        else:
            row, room = rows, capacity
            rows += 1
        with_room[room - size].append(row)
        has_room[room - size] = True
        placed.append((row, document, begin, end))
    found = np.array(placed, dtype=np.int32).reshape(-1, 4)
    return found[np.argsort(found[:, 0], kind="stable")]


def shuffle_rows(pieces: np.ndarray, seed: int, shard: int) -> np.ndarray:
    """Return the pieces of ``best_fit`` with the rows in a random order that depends only on ``seed`` and ``shard``.

    ``best_fit`` places the longest documents first, so its neighboring rows contain documents of similar lengths. Without the
    shuffle, losses and token counts would differ between steps that read different row groups.
    """
    rows = int(pieces[-1, 0]) + 1
    key = mix(mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(shard))
    order = np.argsort(mix(mix(np.arange(rows, dtype=np.uint64)) ^ key), kind="stable")
    found = pieces.copy()
    found[:, 0] = order[pieces[:, 0]]
    return found[np.argsort(found[:, 0], kind="stable")]
