"""Checked sums over ranks, exchange of Python values, and the abort of a process group that hangs because a rank was lost.

NCCL releases a rank that waits in a collective only when its communicator is aborted. An aborted collective returns without an
error, with garbage in its buffer. ``sum_over_ranks`` detects the garbage and raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from springtide.errors import SpringtideError

if TYPE_CHECKING:
    from springtide.distributed.world import World


_T = TypeVar("_T")


class CollectiveError(RuntimeError):
    """A collective returned garbage, because a rank or its connection is lost. The result must not be used."""


class CutOff(CollectiveError):
    """Raised in a collective because this process was cut off from its group (``World.aborted``), such as after the loss of a
    rank."""


def sum_over_ranks(values_N: Tensor, world: World) -> list[float]:
    """Return the sums of ``values_N`` (N,), floating point, over all ranks of the group, in one all-reduce.

    A canary of 1.0 is summed next to each value, because an aborted all-reduce may have finished for only some elements.

    Raises:
        CutOff: ``world.aborted`` is set when the sums have arrived on the host.
        CollectiveError: a canary does not sum to the world size, or NCCL reports a broken communicator. All communicators
            are checked, because gradients use other communicators than this all-reduce.
    """
    message = torch.stack([values_N, torch.ones_like(values_N)], dim=1)
    dist.all_reduce(message)
    sums = message.tolist()
    # check this flag after the sums have arrived: it is set before an abort, so the result of an aborted collective is never
    # returned
    if world.aborted.is_set():
        raise CutOff(
            f"rank {world.rank} of {world.size} was cut off from its group in a collective; its result is not used"
        )
    bad = [canary for _, canary in sums if canary != world.size]  # a NaN canary also differs from the world size
    if bad:
        raise CollectiveError(
            f"an all-reduce of {world.size} ranks returned garbage on rank {world.rank}: {len(bad)} of {len(sums)} canaries "
            f"are not {world.size}, the first is {bad[0]!r}; its result is not used"
        )
    if errors := _nccl_errors():
        raise CollectiveError(f"NCCL's communicators of rank {world.rank} are broken: {', '.join(sorted(errors))}")
    return [value for value, _ in sums]


def by_rank(values: Sequence[float], world: World) -> list[list[float]]:
    """Return the ``values`` of every rank, a list in rank order. Every rank passes the same number of values. Raises the errors
    of ``sum_over_ranks``."""
    table = torch.zeros(world.size, len(values), dtype=torch.float64)
    table[world.rank] = torch.tensor(values, dtype=torch.float64)
    sums = sum_over_ranks(table.flatten().to(world.device), world)
    return [sums[rank * len(values) :][: len(values)] for rank in range(world.size)]


def shifted(rows_NL: Tensor, shift: int, lengths: Sequence[int], world: World) -> Tensor:
    """Return the ``rows_NL`` (N, L, ...) of rank (this rank + ``shift``) mod world size; all ranks call it together.

    ``lengths``: N of each rank. Pairs of ranks that exchange no rows send nothing, also with NCCL. An aborted exchange
    returns garbage: before you use the rows, compare their checksum with the sender's.
    """
    if shift % world.size == 0:
        return rows_NL
    to, source = (world.rank - shift) % world.size, (world.rank + shift) % world.size
    found = rows_NL.new_empty(lengths[source], *rows_NL.shape[1:])
    sent = [len(rows_NL) * (rank == to) for rank in range(world.size)]
    received = [len(found) * (rank == source) for rank in range(world.size)]
    dist.all_to_all_single(found, rows_NL.contiguous(), received, sent)
    return found


def abort() -> bool:
    """Abort this process's NCCL communicators: a collective that waits then returns garbage. Callable from any thread.

    Set ``World.aborted`` first. Returns True if the communicators were aborted. Returns False if there are none (for gloo see
    ``Connections``) or this version of torch cannot abort them.
    """
    if not dist.is_initialized() or not _uses_nccl():
        return False
    # this function is experimental: a later torch may not have it
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort_all is None:
        return False
    abort_all()
    return True


def end_group(clean: bool) -> None:
    """Leave the process group, if there is one. ``clean``: True if no collective is in progress. If False, NCCL's communicators
    are aborted first, because destroying them during a collective would wait forever."""
    if not clean:
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()


def _nccl_errors() -> set[str]:
    """Return the communication errors that NCCL's watchdog found in any group of this process. The watchdog does not raise
    them."""
    if not _uses_nccl():
        return set()
    found = set()
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # the error that torch raises for a process group without GPUs
            if ask := getattr(group._get_backend(torch.device("cuda")), "get_error", None):
                found.add(ask().name)
    return found & {
        "COMM_ERROR",
        "REMOTE_ERROR",
    }  # timeouts are ignored: the driver finds hangs (``ray.train.hang``)


def _uses_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config())


def rank_here() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def agreed(value: _T) -> _T:
    """Return rank 0's ``value`` on all ranks; all ranks call it together."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gathered(value: _T) -> list[_T]:
    """Return the ``value`` of every rank, a list in rank order; all ranks call it together."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(function: Callable[[], _T]) -> _T:
    """Call ``function`` on rank 0 and return its result on every rank; all ranks call it together. A SpringtideError or OSError
    of ``function`` is raised on every rank."""
    found: Any = None
    if rank_here() == 0:
        try:
            found = function()
        except (SpringtideError, OSError) as error:
            found = error
    found = agreed(found)
    if isinstance(found, Exception):
        raise found
    result: _T = found
    return result
