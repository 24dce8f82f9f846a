"""Restore a run from the newest checkpoint that is not damaged; all ranks load it together.

    newest checkpoint that counts -> every rank loads its part -> all good: resume
                                                               -> bad bytes -> a second rank reads the file again
        the second rank finds it good -> the first rank's node is unfit
        the second rank finds it bad  -> quarantine the checkpoint, try the checkpoint before it

A checkpoint counts if it is committed and neither abandoned nor quarantined. The last checkpoint that counts is never
quarantined. A run that has committed a checkpoint begins at step 0 only with --from-scratch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from springtide.checkpoint import branch, leases
from springtide.checkpoint.adapters import has_adapter
from springtide.checkpoint.agreed import good_until
from springtide.checkpoint.format import (
    COMMITTED,
    Identity,
    Manifest,
    Meta,
    OtherFormat,
    checkpoints,
    committed,
    quarantine,
    read_manifest,
)
from springtide.checkpoint.fresh_start import check_fresh_start, of_another_order
from springtide.checkpoint.load import Convert, Mismatch, load, read_pieces
from springtide.checkpoint.piece_table import PieceTable, share
from springtide.checkpoint.retention import note_reader
from springtide.checkpoint.second_reader import BadFileReport, ReadElsewhere, read_again, second_readers
from springtide.config import code_fingerprint
from springtide.config.schema import TrainConfig
from springtide.config.steps import StepsDone
from springtide.distributed import gathered, on_first, rank_here
from springtide.errors import CheckpointError, UnfitNode
from springtide.storage import Folder

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Restored:
    """The state that a run resumes from."""

    meta: Meta
    name: str
    rejected: tuple[tuple[str, str], ...] = ()
    """Newer checkpoints that this restore found bad and quarantined: (name, problem)."""
    agreed_step: StepsDone | None = None
    """Last step, at most the step of this state, at which a comparison of the devices found equal results; None if devices were
    never compared."""
    new_adapter: bool = False
    """True if the checkpoint has no low-rank adapter, so the model's adapter is not initialized yet."""

    @property
    def remark(self) -> str:
        """A remark for the user if another version of this package's code saved the state; empty otherwise."""
        saved_by, here = self.meta.code_fingerprint, code_fingerprint()
        return "" if saved_by in ("", here) else f"saved by springtide's code {saved_by}, this is {here}"


def restore(
    run: Folder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    node: str = "",
    term: int = 0,
    elsewhere: ReadElsewhere | None = None,
) -> Restored | None:
    """Load the newest good checkpoint into ``model`` and ``optimizer``; all ranks call it together. Returns None if the
    run has never committed a checkpoint.

    If a rank reads bad bytes, a second rank reads the file again, on another node if the group has one. Otherwise
    ``elsewhere``, if given, reads it on a node outside of the group. If the second reader finds the file bad too, the
    checkpoint is quarantined (no restore uses it again), and the checkpoint before it is tried. The last usable checkpoint is
    never quarantined. ``node``: node of this rank. ``term``: number of the lease under which this run is written.

    Raises:
        CheckpointError: all committed checkpoints are quarantined, abandoned or removed; the newest is of another data order
            or model; or the bytes of the only usable checkpoint are bad.
        UnfitNode: the second reader found the bytes good, so the node of the first reader is faulty.
        OSError: the store cannot be reached.
        RuntimeError: a rank failed for another reason, such as too little memory. Raised on every rank.
    """
    rejected: list[tuple[str, str]] = []
    names, gone_back = on_first(lambda: (committed(run), leases.gone_back(run)))  # only rank 0 lists the store
    while names:
        name = names[-1]
        manifest, problem = _try_load(run, name, model, optimizer, identity, node, elsewhere)
        if manifest is not None:
            return Restored(manifest.meta, name, tuple(rejected), good_until(manifest.meta, manifest.term, gone_back))
        rejected.append((name, problem))
        if len(names) == 1:
            problems = "; ".join(f"{name}: {problem}" for name, problem in rejected)
            raise CheckpointError(
                f"none of the checkpoints of {run.url} can be used: {problems}. {name} is the last usable one, "
                "and stays unchanged: repair its storage and --resume, or pass --from-scratch to begin again at "
                "step 0"
            )
        if rank_here() == 0:
            _log.warning("checkpoint %s is put in quarantine: %s", name, problem)
            quarantine(run, name, problem, term)
        names = on_first(lambda: committed(run))
    on_first(lambda: check_fresh_start(run))
    return None


def begin(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    adapted: bool = False,
    convert: Convert | None = None,
) -> Restored | None:
    """Load a checkpoint of another run, which ``config.start_from`` names; all ranks call it together. Returns None if
    ``start_from`` is empty.

    ``adapted``: the model has a low-rank adapter. If only weights are loaded and the checkpoint has no adapter, the adapter
    starts untrained. ``convert``: as for ``load``; used if only weights are loaded. Raises the errors of ``restore``, and
    CheckpointError if bytes are bad: no older checkpoint is tried, because the user named this one.
    """
    if not config.start_from:
        return None
    run, name = branch.split(config.start_from)
    takes_optimizer, same_order = config.start_with != "weights", config.start_with == "state"
    here = optimizer if takes_optimizer else None
    may_begin_adapter = adapted and not takes_optimizer
    order = identity if same_order else None
    wider = None if takes_optimizer else convert
    blocks = () if takes_optimizer else config.new_blocks
    loaded = _try_load(
        *(run, name, model, here, order), may_begin_adapter=may_begin_adapter, convert=wider, new_blocks=blocks
    )
    manifest, problem = loaded
    if manifest is None:
        raise CheckpointError(f"{config.start_from}, which {branch.FIELD} names: {problem}")
    if not takes_optimizer:
        optimizer.state.clear()  # remove state that a failed attempt to load a snapshot left
    new_adapter = may_begin_adapter and not has_adapter(manifest)
    return Restored(branch.meta_of_start(config, manifest), config.start_from, new_adapter=new_adapter)


def _try_load(
    run: Folder,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    identity: Identity | None,
    node: str = "",
    elsewhere: ReadElsewhere | None = None,
    may_begin_adapter: bool = False,
    convert: Convert | None = None,
    new_blocks: Sequence[int] = (),
) -> tuple[Manifest | None, str]:
    """Return (manifest, "") if every rank loaded its part, else (None, what is wrong with the bytes). All ranks call it
    together.

    Without ``optimizer`` only weights are loaded. Without ``identity`` the data order is not checked. Raises UnfitNode if the
    second reader does not confirm that the bytes are bad.
    """

    def read() -> tuple[Manifest, PieceTable]:
        manifest = read_manifest(run, name)
        if identity is not None and (mismatch := of_another_order(run, manifest.meta, identity)):
            raise Mismatch(mismatch)
        mine = share(manifest.indexes, rank_here(), size)
        return manifest, PieceTable.of(read_pieces(run, name, manifest, mine))

    def fill(manifest: Manifest, tables: Sequence[PieceTable]) -> None:
        new_adapter = may_begin_adapter and not has_adapter(manifest)
        load(
            *(run, name, model, optimizer, manifest),
            new_adapter=new_adapter,
            convert=convert,
            new_blocks=new_blocks,
            table=PieceTable.joined(tables),
        )

    with contextlib.ExitStack() as noted:
        if rank_here() == 0:  # one note for all ranks protects the files from deletion until all have read them
            noted.enter_context(_noted(run, name))
        size = len(gathered(None))
        found, report, fatal = _attempt(read, run, name, node)
        manifest, mine = found or (None, None)
        told = _unless_fatal((report, mine), fatal)
        reports = [one for one, _ in told]
        if manifest is not None and not any(one.problem for one in reports):
            good, tables = manifest, [table for _, table in told]
            _, report, fatal = _attempt(lambda: fill(good, tables), run, name, node)
            reports = _unless_fatal(report, fatal)
        problems = [f"{one.problem} (rank {rank})" for rank, one in enumerate(reports) if one.problem]
        if not problems:
            return manifest, ""
        is_bad = _confirmed(run, name, reports, elsewhere)
    if not is_bad:
        rank, bad = next((rank, one) for rank, one in enumerate(reports) if one.problem)
        raise UnfitNode(
            f"rank {rank} on node {bad.node} finds {bad.file} bad, but a second reader finds it good: "
            f"{bad.problem}. The checkpoint stays; check the memory, network and storage of that node",
            bad.node if node else "",
        )
    return None, problems[0]


@contextlib.contextmanager
def _noted(run: Folder, name: str) -> Iterator[None]:
    """Protect the checkpoint's files from deletion during the ``with`` block, with a reader note (``note_reader``). If this
    node does not find the checkpoint, no note is written: the run's storage may not be mounted here, and the note would create
    a new folder."""
    is_there = False
    with contextlib.suppress(OSError):  # ignored here: the read that follows raises the error
        is_there = (checkpoints(run) / name).exists(COMMITTED)
    with note_reader(run, name) if is_there else contextlib.nullcontext():
        yield


def _attempt(
    function: Callable[[], _T], run: Folder, name: str, node: str
) -> tuple[_T | None, BadFileReport, Exception | None]:
    """Call ``function`` and return (result, report, error). The report names the file if the function found a bad one. The
    error must end all ranks. The result is None after a problem; the error is None without one."""
    found: _T | None = None
    report = BadFileReport(node=node or socket.gethostname())
    fatal: Exception | None = None
    try:
        found = function()
    except (Mismatch, OtherFormat, PermissionError) as error:
        fatal = CheckpointError(f"{name} of {run.url}: {error}")
    except CheckpointError as error:
        report = report._replace(problem=str(error), file=getattr(error, "file", ""))
    except OSError as error:  # the store cannot be reached: the checkpoint may be good
        fatal = OSError(str(error))
    except Exception as error:  # out of memory, or a bug: the checkpoint may be good, and other ranks wait for this one
        _log.exception("rank %d cannot load %s", rank_here(), name)
        fatal = RuntimeError(f"rank {rank_here()} cannot load {name} of {run.url}: {type(error).__name__}: {error}")
    return found, report, fatal


def _confirmed(
    run: Folder, name: str, reports: Sequence[BadFileReport], elsewhere: ReadElsewhere | None = None
) -> bool:
    """Return True if the checkpoint is really bad: a second reader also finds a reported file bad, or a reported problem does
    not depend on the reader (such as stored tensor parts that overlap)."""
    mine = False
    fatal: Exception | None = None
    try:
        for file, rank in second_readers(reports).items():
            if rank == rank_here():
                mine = mine or bool(read_again(run, name, file, reports, rank, elsewhere))
    except OSError as error:
        fatal = OSError(str(error))
    except Exception as error:
        _log.exception("rank %d cannot read %s again", rank_here(), name)
        fatal = RuntimeError(
            f"rank {rank_here()} cannot read {name} of {run.url} again: {type(error).__name__}: {error}"
        )
    return any(_unless_fatal(mine, fatal)) or any(one.problem and not one.file for one in reports)


def _unless_fatal(value: Any, fatal: Exception | None) -> list[Any]:
    """Exchange ``value`` between all ranks. Returns the values, by rank. ``fatal``: error of this rank that must end all ranks,
    or None. If any rank passes an error, every rank raises the first one."""
    everyone = gathered((value, fatal))
    for _, error in everyone:
        if error is not None:
            raise error
    return [said for said, _ in everyone]
