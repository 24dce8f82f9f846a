"""The code that each Ray Train worker runs: the training loop, with its interfaces implemented by Ray.

A worker's process outlives its worker group: ``work`` may be called in it again, as another rank of another group.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import logging
import math
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from springtide.checkpoint import leases
from springtide.checkpoint.second_reader import still_bad
from springtide.config.steps import StepsDone
from springtide.distributed import Connections, abort, end_group, gathered, world
from springtide.elastic.copies import LiveShard
from springtide.elastic.health import Health
from springtide.events import Left, Started
from springtide.faults import arm, fault_point
from springtide.ray.cluster.nodes import accepting, where
from springtide.ray.data.feed import feed
from springtide.ray.train.job import TrainJob
from springtide.ray.train.mailbox import EventSender, MailboxClient
from springtide.ray.train.snapshot_client import SnapshotClient
from springtide.storage import Folder
from springtide.stream import Batch, RankReader, open_data
from springtide.training import GroupContext, TrainLoop
from springtide.training.live_state import LiveState
from springtide.training.preflight import preflight

_log = logging.getLogger(__name__)

_LET_GO = threading.Event()
"""Set when this process must leave its group. It is also the group's ``World.aborted``: a step then does not use the results of
an aborted collective."""
_TRAINING = threading.Lock()
_links: Connections | None = None
"""The connections of this process to the other ranks of its group; ``let_go`` cuts them."""
_clean = True
"""True if no collective of this process's group can be in flight, so that none has to be aborted."""
_live: LiveState | None = None
"""This rank's shard of the training state, in the group that trains or in the group that was lost."""
_free_since_s = 0.0
"""When this process left its newest group, by ``time.perf_counter``; 0 before [s]."""
_LEFT_BYTES = 64 * 2**20
"""Device memory that a process may still hold after it has left a group [bytes]. A process with more is not used again, because
the next group would lack room."""


def work(job: TrainJob) -> None:
    """Train as one rank of a worker group; Ray Train calls this in each worker."""
    global _clean, _live
    arm(job.fault_points)
    with _TRAINING:
        _LET_GO.clear()
        _clean, _live = False, None
        try:
            left = _train(job)
            _clean, _live = True, None
        except BaseException as error:
            # free model, optimizer and feed, whose memory the next group needs; ``settle`` frees what ``_live`` has
            traceback.clear_frames(error.__traceback__)
            raise
        if left:  # do not return: Ray would take that as the end of training
            _LET_GO.wait()


def let_go(patience_s: float, survivors: Sequence[int] = ()) -> LiveShard | bool:
    """Make this worker's process leave its group and get ready for another one; called while ``work`` runs. Returns True if it
    is ready in time. If the ranks ``survivors`` together hold the whole state, returns this rank's shard instead; call
    ``settle`` next.

    The order matters. First set the flag, because an aborted collective returns as if it had succeeded. Then abort NCCL. Then
    cut gloo's connections, which releases a rank that waits for a lost peer. Last, wait for the training thread.
    """
    global _clean, _live
    _LET_GO.set()
    if _live is not None:
        _live.freeze()
    if not _clean:
        abort()
    if _links is not None:  # a collective that waits for a lost peer fails now
        _links.cut()
    if not _TRAINING.acquire(timeout=patience_s):
        return False
    _TRAINING.release()
    offer = _live.offer(survivors) if _live is not None else None
    if offer is None:
        _live = None
    gc.collect()
    end_group(_clean)
    _clean = True
    return _is_ready() if offer is None else offer


def settle(ranks: Sequence[int]) -> bool:
    """Store the shard that ``let_go`` returned on this node, or drop it if ``ranks`` is empty. ``ranks``: the ranks that
    together have the whole state. Returns True if the process is ready for another group."""
    global _live
    live, _live = _live, None
    try:
        if ranks and live is not None:
            live.deposit(ranks)
    except Exception:  # no error matters: snapshots and checkpoints remain
        _log.warning("cannot store this rank's state of a lost group in memory", exc_info=True)
    del live
    gc.collect()
    return _is_ready()


def _is_ready() -> bool:
    """Free this process's unused memory; return whether enough is free for another group."""
    global _free_since_s
    _free_since_s = time.perf_counter()
    with contextlib.suppress(AttributeError):  # glibc only: each group's thread leaves an arena full of freed memory
        ctypes.CDLL(None).malloc_trim(0)
    return not torch.cuda.is_initialized() or _gave_memory_back()


def _gave_memory_back() -> bool:
    """Free the device's cached memory; return whether enough is free for another group."""
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    if held > _LEFT_BYTES:
        _log.warning("%d MiB of device memory remain in use after a group; this process is not used again", held >> 20)
    return held <= _LEFT_BYTES


def warm_up(job: TrainJob, measure_network: bool, is_first: bool) -> Health:
    """Prepare a new worker's process for its first group, and check its device; return the preflight's result.

    Args:
        job: what will be trained.
        measure_network: whether to measure the node's network speed; one process per node does that.
        is_first: whether the run has had no group yet. Then there is no snapshot to resume from, and this node's snapshot
            server starts later, during the first steps.
    """
    arm(job.fault_points)
    ahead = job.keeps_snapshots and not is_first
    servers = SnapshotClient(job.config, job.folder, job.mailbox, owner=job.owner) if ahead else None
    found = preflight(job.config, job.compiled)
    if measure_network:
        found = found._replace(network_bytes_per_s=job.mailbox.fetch_speed())
    if servers is not None:
        servers.wait()
    gc.collect()
    gc.freeze()  # later garbage collections skip the loaded objects
    return found


def _train(job: TrainJob) -> bool:
    """Train as one rank, to the end of the run or until the group leaves. Returns True if it has left, so that another group
    resumes."""
    fault_point("rendezvous", "after")
    begin = time.perf_counter()
    config = job.config
    if (most := job.mailbox.largest_micro_batch().get()) is not None:
        config = config.override({"train.micro_batch": most})
    context = ray.train.get_context()
    device = "cuda" if config.elastic.gpus_per_worker else "cpu"
    here = world(device, context.get_local_rank(), config.parallel.shards, _LET_GO)
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(here.device)  # so that the reported peak is that of this group alone
    data = open_data(config.data)
    global _links, _live
    _links = Connections()
    phases_s = {"rendezvous": begin - _free_since_s} if _free_since_s else {}
    phases_s["data"] = time.perf_counter() - begin
    name = f"{config.run.id}/rank-{here.rank}/feed"

    def batches(reader: RankReader, step: StepsDone) -> Iterator[Batch]:
        return feed(reader, reader.plan(step, config.num_steps, int(config.feed.read_bytes)), config.feed, name)

    servers = None
    fault_point("first_collective", "before")
    nodes, markets, domains = zip(*gathered(where()), strict=True)
    if here.is_first:
        job.mailbox.group_formed()
    fault_point("first_collective", "after")
    if job.keeps_snapshots:
        servers = SnapshotClient(config, job.folder, job.mailbox, owner=job.owner)
        servers.pair(nodes, domains)
    phases_s["snapshots"] = time.perf_counter() - begin - phases_s["data"]
    # only rank 0 talks to the driver: a request that it receives reaches the other ranks in the step's all-reduce
    sender = EventSender(job.mailbox) if here.is_first else None
    beat = sender.heartbeat if sender else lambda: None
    left_s = sender.time_to_leave_s if sender else lambda: math.inf
    compiled, read = dataclasses.replace(job.compiled, config=config), functools.partial(read_elsewhere, job.mailbox)
    context = GroupContext(job.owner, nodes, markets, read, beat, left_s, compiled)
    run = TrainLoop(config, here, data, job.folder, job.labels, servers, phases_s, context)
    _live = LiveState(run.state, here, run.described, servers, config.checkpoint.stage)
    left = False
    for event in run.events(batches, sender.interrupt if sender else lambda: None, [_live]):
        left |= isinstance(event, Left)
        if isinstance(event, Started):
            _live.offer_restored()
        if sender:
            sender(event)
    if sender:
        sender.flush()
    return left


# Read a checkpoint's file again on another node: the fault may be the node's, not the file's. Used when a file looks bad, and
# all ranks that could read it again are on the node that found it bad.
#
# rank --can the node see the run's folder?--> a task on the driver's node, else on other nodes --> reads the file again
#
# The task runs in a new process without torch, because this is rarely needed.

_BEGIN_S = 60.0
"""How long a node may take to start a process and look for the run [s]. The time to read the file is not limited."""
_CANDIDATES = 3
"""At most this many nodes are tried."""


def read_elsewhere(mailbox: MailboxClient, run: Folder, name: str, file: str, nodes: Collection[str]) -> str | None:
    """Read ``file`` of checkpoint ``name`` on a live node that is not in ``nodes``. The driver's node is tried first, because
    it has the run's storage. Returns what is wrong with the file; empty if it is good; None if no other node can see the run's
    folder.

    Raises:
        OSError: the store cannot be reached, or other nodes are up and none of them answers.
    """
    driver = ray.get(mailbox.actor.node.remote())
    others = sorted((node for node in accepting() if node not in nodes), key=lambda node: node != driver)
    silent = []
    for node in others[:_CANDIDATES]:
        there = {
            "name": f"{run.name}/read-again",
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        seen = ray.remote(_sees).options(**there).remote(run)
        try:
            if ray.get(seen, timeout=_BEGIN_S):
                return str(ray.get(ray.remote(still_bad).options(**there).remote(run, name, file)))
        except RayError as error:
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise OSError(str(error)) from None  # the store's own error
            ray.cancel(seen, force=True)
            silent.append(node)
            _log.warning("node %s does not read %s again: %s", node[:8], file, error)
    if silent:
        raise OSError(f"{file} of {run.url} looks bad, and nodes {', '.join(silent)} did not read it again")
    return None


def _sees(run: Folder) -> bool:
    """Return True if this node can see the run's folder. Without the run's storage, every file would seem to be missing."""
    return leases.newest(run) is not None
