"""Second readers for bytes that one rank found bad. A node with broken memory, network card or mount sees damage where
there is none, so a checkpoint is quarantined only if two readers agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from springtide.checkpoint.format import COMMITTED, checkpoints, read_index, read_manifest
from springtide.checkpoint.inspect import check_piece
from springtide.errors import CheckpointError
from springtide.store import Folder


class BadFileReport(NamedTuple):
    """Result of loading one rank's part of a checkpoint."""

    node: str
    problem: str = ""
    """Empty if the part is good."""
    file: str = ""
    """Path of the bad file below ``checkpoints/``; empty for a problem that does not depend on the reader."""


def second_readers(reports: Sequence[BadFileReport]) -> dict[str, int]:
    """Return for each file that is reported bad the rank that reads it again: a rank without a problem on another node,
    else any on another node, else another rank, else the one that reported it. ``reports`` are by rank."""
    accusers: dict[str, list[int]] = {}
    for rank, one in enumerate(reports):
        if one.file:
            accusers.setdefault(one.file, []).append(rank)
    found = {}
    for number, (file, ranks) in enumerate(sorted(accusers.items())):
        nodes = {reports[rank].node for rank in ranks}

        def unfitness(rank: int, ranks: list[int] = ranks, nodes: set[str] = nodes) -> tuple[bool, bool, bool]:
            return reports[rank].node in nodes, rank in ranks, bool(reports[rank].problem)

        best = min(map(unfitness, range(len(reports))))
        equals = [rank for rank in range(len(reports)) if unfitness(rank) == best]
        found[file] = equals[number % len(equals)]  # spread many files over the ranks
    return found


def still_bad(run: Folder, name: str, file: str) -> str:
    """Return what is wrong with ``file``, which checkpoint ``name`` needs, as this process reads it; empty if it is good."""
    try:
        manifest = read_manifest(run, name)
        folder = checkpoints(run)
        if file.endswith(f"/{COMMITTED}"):
            return ""
        if file.endswith(".json"):
            read_index(folder / name, file.rpartition("/")[2], manifest.files[file.rpartition("/")[2]]["digest"])
            return ""
        for index in manifest.indexes:
            for piece in read_index(folder / name, index, manifest.files[index]["digest"])[1]:
                if piece.file == file:
                    check_piece(folder, piece)
        return ""
    except (CheckpointError, FileNotFoundError) as error:
        return str(error)
