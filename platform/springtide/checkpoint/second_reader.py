"""Second readers for bytes that one rank found bad. A node with broken memory, network card or mount sees damage where
there is none, so a checkpoint is quarantined only if two readers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from springtide.checkpoint.format import COMMITTED, checkpoints, read_index, read_manifest
from springtide.checkpoint.inspect import check_piece
from springtide.errors import CheckpointError
from springtide.storage import Folder

ReadElsewhere = Callable[[Folder, str, str, Collection[str]], str | None]
"""Run, checkpoint, file, nodes -> what ``still_bad`` returns in a process on none of these nodes; None if there is no other
node that sees the run. Raises OSError if there are some and none of them answers."""


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


def read_again(
    run: Folder, name: str, file: str, reports: Sequence[BadFileReport], rank: int, elsewhere: ReadElsewhere | None
) -> str:
    """As ``still_bad``, in the process of ``rank``, which ``second_readers`` has chosen. If its node is one of those that
    found the file bad, it asks ``elsewhere``: the word of one node does not count while there are others."""
    problem = still_bad(run, name, file)
    nodes = {one.node for one in reports if one.file == file}
    if problem and elsewhere is not None and reports[rank].node in nodes:
        answer = elsewhere(run, name, file, nodes)
        return problem if answer is None else answer
    return problem


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
    except (CheckpointError, FileNotFoundError, IsADirectoryError) as error:
        return str(error)
