"""Checked sums over ranks, values that all ranks share, and the end of a process group that hangs after a lost rank.

NCCL releases a rank that waits in a collective only when its communicator is aborted, and an aborted collective returns
garbage in its buffer without raising. Here it always raises.
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
    """A collective returned garbage: a rank or its connection is lost, and the result must not be used."""


class CutOff(CollectiveError):
    """This process was cut off from its group while it was in a collective."""


def sum_over_ranks(values_N: Tensor, world: World) -> list[float]:
    """Return the sums of ``values_N`` (N,), floating point, over all ranks of the group, in one all-reduce.

    Next to each value a canary of 1.0 is summed: an aborted all-reduce may have finished for some elements only.
    Raises: CutOff if ``world.aborted`` is set by the time the sums are on the host; CollectiveError if a canary does not sum to
    the world size, or if NCCL reports a broken communicator: gradients use other communicators than this message.
    """
    message = torch.stack([values_N, torch.ones_like(values_N)], dim=1)
    dist.all_reduce(message)
    sums = message.tolist()
    if world.aborted.is_set():  # set before anything is aborted, so whatever an abort released is seen here
        raise CutOff(
            f"rank {world.rank} of {world.size} was cut off from its group in a collective; its result is not used"
        )
    bad = [canary for _, canary in sums if canary != world.size]  # also if it is NaN
    if bad:
        raise CollectiveError(
            f"an all-reduce of {world.size} ranks returned garbage on rank {world.rank}: {len(bad)} of {len(sums)} canaries "
            f"are not {world.size}, the first is {bad[0]!r}; its result is not used"
        )
    if errors := _nccl_errors():
        raise CollectiveError(f"NCCL's communicators of rank {world.rank} are broken: {', '.join(sorted(errors))}")
    return [value for value, _ in sums]


def by_rank(values: Sequence[float], world: World) -> list[list[float]]:
    """Return the ``values`` of every rank, by rank, the same number of each. Raises as ``sum_over_ranks``."""
    table = torch.zeros(world.size, len(values), dtype=torch.float64)
    table[world.rank] = torch.tensor(values, dtype=torch.float64)
    sums = sum_over_ranks(table.flatten().to(world.device), world)
    return [sums[rank * len(values) :][: len(values)] for rank in range(world.size)]


def shifted(rows_NL: Tensor, shift: int, lengths: Sequence[int], world: World) -> Tensor:
    """Return the ``rows_NL`` (N, L, ...) of the rank that is ``shift`` further on; all ranks call it together.

    ``lengths``: N of each rank. Each pair of ranks that exchange nothing costs nothing, on NCCL too. An aborted exchange
    returns garbage: compare a sum of the rows with the sender's before they are used.
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
    """Abort this process's NCCL communicators, from any thread: a collective that waits returns, with garbage.

    Set ``World.aborted`` first. Returns True if it aborted them; False if there are none (for gloo see ``Connections``) or this
    torch cannot do it.
    """
    if not dist.is_initialized() or not _uses_nccl():
        return False
    # experimental: a later torch may not have it
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort_all is None:
        return False
    abort_all()
    return True


def end_group(clean: bool) -> None:
    """Leave the process group, if there is one. ``clean``: no collective is in progress; otherwise NCCL's communicators are
    aborted first, because destroying them would wait forever."""
    if not clean:
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()


def _nccl_errors() -> set[str]:
    """Return the errors that NCCL's watchdog found in any group of this process; it does not report them otherwise."""
    if not _uses_nccl():
        return set()
    found = set()
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group without GPUs
            if ask := getattr(group._get_backend(torch.device("cuda")), "get_error", None):
                found.add(ask().name)
    return found & {"COMM_ERROR", "REMOTE_ERROR"}  # timeouts do not count: hangs are found by ``elastic.hang``


def _uses_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config())


def rank_here() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def agreed(value: _T) -> _T:
    """Return rank 0's ``value`` on all ranks; all call it together."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gathered(value: _T) -> list[_T]:
    """Return the ``value`` of every rank, by rank; all call it together."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(function: Callable[[], _T]) -> _T:
    """Call ``function`` on rank 0; return its result, or raise its error, on every rank. All call it together."""
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
