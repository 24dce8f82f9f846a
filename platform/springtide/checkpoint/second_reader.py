"""If one rank finds a file of a checkpoint bad, let a second rank read it again. A node with broken memory, network card or
mount can see damage in good files, so a checkpoint is quarantined only if two readers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from springtide.checkpoint.format import COMMITTED, checkpoints, read_index, read_manifest
from springtide.checkpoint.verified_reads import check_pieces
from springtide.errors import CheckpointError
from springtide.storage import Folder

ReadElsewhere = Callable[[Folder, str, str, Collection[str]], str | None]
"""Function that reads a file on a node outside of ``nodes``: (run, checkpoint, file, nodes) -> description of the problem,
empty if the file is good. None if no such node can read the run's storage. Raises OSError if such nodes exist, but none
responds."""


class BadFileReport(NamedTuple):
    """One rank's report on its part of a checkpoint: the file that it found bad, and why. Both are empty if the part is
    good."""

    node: str
    problem: str = ""
    """Description of the problem; empty if the part is good."""
    file: str = ""
    """Path of the bad file below ``checkpoints/``; empty for a problem that every reader finds, such as overlapping pieces."""


def second_readers(reports: Sequence[BadFileReport]) -> dict[str, int]:
    """For each file that was reported as bad, choose the rank that reads it again. Returns file -> rank. ``reports``: the
    report of each rank, in the order of ranks.

    Order of preference: (1) a rank on another node that reported no problem; (2) any rank on another node; (3) another rank on
    the same node; (4) the rank that reported the file.
    """
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
        found[file] = equals[number % len(equals)]  # spread the files over equally good ranks
    return found


def read_again(
    run: Folder, name: str, file: str, reports: Sequence[BadFileReport], rank: int, elsewhere: ReadElsewhere | None
) -> str:
    """Read ``file`` again, as the second reader. Returns a description of the problem; empty if the file is good. Called on
    ``rank``, which ``second_readers`` has chosen.

    This rank may run on a node that has already reported the file. If it finds the file bad too, ``elsewhere`` (if given) reads
    the file on another node. Otherwise a single faulty node could make a good checkpoint count as bad.
    """
    problem = still_bad(run, name, file)
    nodes = {one.node for one in reports if one.file == file}
    if problem and elsewhere is not None and reports[rank].node in nodes:
        answer = elsewhere(run, name, file, nodes)
        return problem if answer is None else answer
    return problem


def still_bad(run: Folder, name: str, file: str) -> str:
    """Read ``file``, which checkpoint ``name`` needs, in this process. Returns a description of the problem; empty if the file
    is good."""
    try:
        manifest = read_manifest(run, name)
        folder = checkpoints(run)
        if file.endswith(f"/{COMMITTED}"):
            return ""
        if file.endswith(".json"):
            read_index(folder / name, file.rpartition("/")[2], manifest.files[file.rpartition("/")[2]]["digest"])
            return ""
        for index in manifest.indexes:
            pieces = read_index(folder / name, index, manifest.files[index]["digest"])[1]
            check_pieces(folder, [piece for piece in pieces if piece.file == file])
        return ""
    except (CheckpointError, FileNotFoundError, IsADirectoryError) as error:
        return str(error)
