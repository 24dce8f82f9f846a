"""Sums over ranks that are checked before anyone acts on them, and the end of a group that a lost rank has left hanging.

NCCL releases a rank that waits in a collective only when its communicator is aborted, and an aborted collective returns without
raising, with garbage in its buffer: here it always raises.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from springtide.dist.world import World


class CollectiveError(RuntimeError):
    """A collective returned garbage: a rank or its connection is gone, and the result must not be used."""


class CutOff(CollectiveError):
    """This process was cut off from its group while it was in a collective."""


def sum_over_ranks(values_N: Tensor, world: World) -> list[float]:
    """Returns the sums of ``values_N`` (N,), floating point, over all ranks of the group, in one all-reduce.

    A 1.0 travels beside each value: an aborted all-reduce may have ended for some elements and not for others.
    Raises: CutOff when ``world.cut`` was set by the time the sums are on the host; CollectiveError when the ones of some value
    do not sum to the world size, or when NCCL knows of a broken communicator: gradients go over others than this message.
    """
    message = torch.stack([values_N, torch.ones_like(values_N)], dim=1)
    dist.all_reduce(message)
    sums = message.tolist()
    if world.cut.is_set():  # set before anything is aborted, so whatever an abort released is seen here
        raise CutOff(
            f"rank {world.rank} of {world.size} was cut off from its group in a collective; its result is not used"
        )
    bad = [canary for _, canary in sums if canary != world.size]  # also where it is no number
    if bad:
        raise CollectiveError(
            f"an all-reduce of {world.size} ranks returned garbage on rank {world.rank}: {len(bad)} of {len(sums)} canaries "
            f"are not {world.size}, the first is {bad[0]!r}; nothing of it is used"
        )
    if errors := _nccl_errors():
        raise CollectiveError(f"NCCL's communicators of rank {world.rank} are broken: {', '.join(sorted(errors))}")
    return [value for value, _ in sums]


def abort() -> bool:
    """Abort this process's NCCL communicators, from any thread: a rank that waits in a collective returns, with garbage.

    Set ``World.cut`` first. Returns True if it did; False where there are none (gloo: see ``Links``) or torch cannot.
    """
    if not dist.is_initialized() or not _uses_nccl():
        return False
    abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)  # experimental: it may go in a later torch
    if abort_all is None:
        return False
    abort_all()
    return True


def end_group(clean: bool) -> None:
    """Leave the process group, if there is one. ``clean``: no collective is under way; otherwise NCCL's communicators are
    aborted, because to destroy them would wait for what never ends."""
    if not clean:
        abort()
    if dist.is_initialized():
        dist.destroy_process_group()


def _nccl_errors() -> set[str]:
    """Returns what NCCL's watchdog, which tells nobody else here, has found wrong with any group of this process."""
    if not _uses_nccl():
        return set()
    found = set()
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group of CPUs alone
            if ask := getattr(group._get_backend(torch.device("cuda")), "get_error", None):
                found.add(ask().name)
    return found & {"COMM_ERROR", "REMOTE_ERROR"}  # a timeout is no error: hangs are found by ``elastic.hang``


def _uses_nccl() -> bool:
    return "nccl" in str(dist.get_backend_config())
