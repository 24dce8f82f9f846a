"""A worker group: each rank is a process that restores the state with the real code, trains, saves and takes snapshots.

A step's arithmetic is a hash: the state is the history of the steps it has trained, so that a step that is lost, repeated or
trained on a wrong batch shows at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from ray.exceptions import RayActorError
from torch import nn

from simulation.clock import Clock, Process
from simulation.cluster import Cluster, Snapshots
from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, Committed, PieceWriter, tidy
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored, restore
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.second_reader import still_bad
from springtide.checkpoint.snapshot_parts import Snapshot
from springtide.checkpoint.snapshots import restore_from_snapshots
from springtide.checkpoint.staging import StagingPlan
from springtide.checkpoint.tensors import named_tensors
from springtide.checkpoint.writer_process import try_to_write
from springtide.config import Config, fingerprint
from springtide.config.steps import StepsDone
from springtide.elastic import GroupRequest
from springtide.errors import CheckpointError, SpringtideError
from springtide.events import Left, Saved, SaveFailed, Started, StepDone, Stopped
from springtide.ray.train.mailbox import EventSender
from springtide.storage import Folder
from springtide.storage.digest import of_bytes as digest_of
from springtide.storage.errors import may_pass
from springtide.stream import Data
from springtide.stream.chain import next_chain
from springtide.training.checkpoint_schedule import _AWAY_S
from springtide.training.group_lease import GroupLease

_SLOTS = 6
_ORPHAN_S = 60.0
_MASK = (1 << 62) - 1


class History(nn.Module):
    """The state: in each buffer a hash of all steps so far."""

    def __init__(self) -> None:
        super().__init__()
        for slot in range(_SLOTS):
            self.register_buffer(f"history{slot}", torch.full((1,), slot, dtype=torch.int64))

    def learn(self, step: int, digest: int) -> None:
        """Train one step."""
        for slot in range(_SLOTS):
            tensor = getattr(self, f"history{slot}")
            tensor[0] = mixed(int(tensor[0]), step, digest)

    @property
    def value(self) -> tuple[int, ...]:
        return tuple(int(getattr(self, f"history{slot}")[0]) for slot in range(_SLOTS))


def mixed(before: int, step: int, digest: int) -> int:
    """The history with one more step."""
    return ((before ^ digest) * 6364136223846793005 + step * 1442695040888963407) & _MASK


class Collective:
    """The ranks' process group: everyone waits for everyone, and all fail when one is lost."""

    def __init__(self, clock: Clock, size: int) -> None:
        self.clock, self.size, self.broken = clock, size, False
        self._rounds = [0] * size
        self._values: dict[int, dict[int, Any]] = {}
        self._waiting: list[Process] = []

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The value of every rank."""
        number, self._rounds[rank] = self._rounds[rank], self._rounds[rank] + 1
        values = self._values.setdefault(number, {})
        values[rank] = value
        if len(values) == self.size:
            self._wake()
        while len(values) < self.size:
            if self.broken:
                raise RuntimeError("Connection closed by peer")
            assert self.clock.current is not None
            self._waiting.append(self.clock.current)
            self.clock.park()
        self._values.pop(number - 2, None)
        return [values[other] for other in range(self.size)]

    def cut(self) -> None:
        """A rank is lost; the others learn it a little later."""
        self.broken = True
        self.clock.after(self.clock.random.uniform(0.05, 1.0), self._wake)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for process in waiting:
            self.clock.after(0.0, process.step)


@dataclasses.dataclass
class Setting:
    """What a group of one run has in common with all others."""

    clock: Clock
    cluster: Cluster
    config: Config
    run: Folder
    data: Data
    digests: list[int]
    """Of each step's batch, from step 1."""
    step_s: float


class Rank:
    """One rank's process."""

    def __init__(self, group: WorkerGroup, rank: int) -> None:
        self.group, self.rank, self.node = group, rank, group.nodes[rank]
        self.actor: Any = None
        """The process that runs it, as the driver's pool knows it."""
        self.left = False
        self._saves: list[Any] = []
        self._writer: Process | None = None
        self._failed: BaseException | None = None
        self._in_a_row, self._given_up, self._failing_since_s = 0, False, 0.0
        self._last_save = -1
        setting = group.setting
        self._writes = PieceWriter(setting.run)
        self.process = setting.clock.start(f"rank{rank}", self.node, self._work)
        self.process.rank = self
        self.process.ended.append(self._end)

    def _reach(self, phase: str) -> None:
        """Come to a phase, where a trap may stop this process, as of the next wait."""
        self.group.setting.cluster.reach(phase, self.node)
        self.group.setting.clock.sleep(0.0)

    def gathered(self, value: Any) -> list[Any]:
        return self.group.collective.gather(self.rank, value)

    def _end(self) -> None:
        if not self.left and not self.group.released:
            self.group.collective.cut()

    def _work(self) -> None:
        setting, group = self.group.setting, self.group
        clock = setting.clock
        self._reach("rendezvous")
        clock.sleep(clock.random.uniform(0.3, 2.0))
        self.gathered(None)
        if self.rank == 0:
            group.mailbox.group_formed()
        model = History()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        self._reach("claim")
        lease = GroupLease(setting.run, group.owner, self.node)
        term = self.on_first(lease.claim)
        self._reach("restore")
        found = self._restore(model, optimizer, term)
        step, chain = (found.meta.step, found.meta.chain) if found else (StepsDone(0), "")
        identity, of_config = setting.data.order.identity_at, fingerprint(setting.config)
        sender = EventSender(group.mailbox) if self.rank == 0 else None
        send: Callable[[Any], None] = sender if sender else lambda event: None
        resumed = found.name if found else ""
        here = {"world_size": len(group.nodes), "order_identity": identity(step), "chain": chain}
        send(Started(step=step, resumed_from=resumed, **here))
        group.began(step, term, model)
        plan, snapshots = StagingPlan(self.rank, len(group.nodes)), Snapshots(setting.cluster, group.nodes, self.rank)
        self._last_save, taken, last = step, 0, setting.config.num_steps

        def state(step: StepsDone) -> tuple[Meta, list[Any], bytes]:
            tensors = plan.of(named_tensors(model))
            data = b"".join(tensors[piece.tensor].numpy().tobytes() for piece in plan.pieces)
            meta = Meta(
                step=step,
                tokens=step * setting.config.tokens_per_step,
                world_size=len(group.nodes),
                order_identity=identity(step),
                config_fingerprint=of_config,
                saved_s=clock.now,
                chain=chain,
            )
            return meta, list(plan.pieces), data

        def snapshot(step: StepsDone) -> None:
            meta, pieces, data = state(step)
            digests = tuple((digest_of(data[one.begin : one.begin + one.size_bytes]),) for one in pieces)
            snapshots.take(Snapshot.of(term, self.rank, meta, tuple(pieces), len(data), digests), data)

        self._reach("first step")
        while step < last:
            self._reach("step")
            clock.sleep(setting.step_s * clock.random.uniform(0.8, 1.2))
            asked = sender.interrupt() if sender else None
            said = self.gathered((asked, self._busy, self._failed is not None, snapshots.busy))
            step = StepsDone(step + 1)
            digest = setting.digests[step - 1]
            model.learn(step, digest)
            of_order = setting.data.order.step_before(step)
            chain = next_chain(chain, of_order, digest, setting.config.tokens_per_step, True)
            group.trained(step)
            send(_done(step, digest, len(group.nodes), setting))
            interrupts = {one[0] for one in said if one[0]}
            if any(failed for _, _, failed, _ in said):
                self._give_up(send, trains_on=True)
            self._poll(send)
            if GroupRequest.COPY in interrupts:
                snapshots.evacuate(self.on_first(snapshots.staying))
            if GroupRequest.STOP in interrupts or step == last:
                self._finish(step, state, term, send)
                break
            if interrupts & {GroupRequest.LEAVE, GroupRequest.EVACUATE}:
                self._leave(step, GroupRequest.EVACUATE in interrupts, snapshots, snapshot, state, term, send)
                clock.park()  # until the process is let go
            busy = any(busy for _, busy, _, _ in said)
            due = step % setting.config.checkpoint.every_steps == 0
            if (due or GroupRequest.SAVE in interrupts) and not busy and not self._busy:
                self._begin(step, state, term)
            if not any(keeping for *_, keeping in said):
                snapshot(step)
                taken += 1
                if taken == 2 and self.rank == 0:
                    snapshots.forget(term)
        self._reach("end")
        if self.rank == 0:
            leases.end(setting.run, term)
        group.last_state = model.value
        send(Stopped(step=step, status="finished" if step == last else "stopped"))
        self.left = True

    def _restore(self, model: nn.Module, optimizer: Any, term: int) -> Restored | None:
        setting = self.group.setting
        identity, found = setting.data.order.identity_at, None
        snapshots = Snapshots(setting.cluster, self.group.nodes, self.rank)
        if self.on_first(lambda: leases.has_trained(setting.run, term)):
            found = restore_from_snapshots(setting.run, snapshots, model, optimizer, identity)
        return found or restore(setting.run, model, optimizer, identity, self.node, term, self._read_elsewhere)

    def _read_elsewhere(self, run: Folder, name: str, file: str, nodes: Collection[str]) -> str:
        """Have the driver's host read a file again."""
        clock = self.group.setting.clock
        reader = clock.start("reader", "hub", functools.partial(still_bad, run, name, file))
        while reader.alive:
            clock.sleep(0.2)
        if reader.error is not None:
            raise reader.error
        return str(reader.result)

    def on_first(self, function: Callable[[], Any]) -> Any:
        """As the collective of that name."""
        found: Any = None
        if self.rank == 0:
            try:
                found = function()
            except (SpringtideError, OSError) as error:
                found = error
        found = self.gathered(found)[0]
        if isinstance(found, Exception):
            raise found
        return found

    @property
    def _busy(self) -> bool:
        return self._writer is not None and (self._writer.alive or not self._saves)

    def _begin(self, step: StepsDone, state: Callable[[StepsDone], tuple[Meta, list[Any], bytes]], term: int) -> None:
        setting = self.group.setting
        self._reach("save")
        meta, pieces, data = state(step)
        rule = Rule(setting.config.checkpoint.keep_last)
        job = CommitJob(setting.run.url, term, self.rank, meta, {}, pieces, rule, owner=self.group.owner)
        if not self._given_up:  # the same on all ranks
            self._in_a_row = 0
        self._last_save, self._saves, self._given_up = step, [], False
        self._writer = setting.clock.start(
            f"writer{self.rank}", self.node, functools.partial(self._write, job, data, self._saves)
        )

    def _write(self, job: CommitJob, data: bytes, outcome: list[Any]) -> None:
        clock = self.group.setting.clock
        alone_s: list[float] = []

        def gone() -> bool:
            if outcome:
                return True
            if not self.process.alive:
                alone_s.append(clock.now)
            return bool(alone_s) and clock.now - alone_s[0] > _ORPHAN_S

        def view(piece: Any) -> memoryview:
            return memoryview(data)[piece.begin : piece.begin + piece.size_bytes]

        result = try_to_write(self._writes, job, view, gone, self.group.setting.config.checkpoint.tries)
        outcome.append(result)
        if self.rank == 0 and isinstance(result, Committed):
            self.group.committed(job.meta.step)
            tidy(self.group.setting.run, job)

    def _poll(self, send: Callable[[Any], None]) -> None:
        if self._writer is None or not self._saves:
            return
        outcome, self._writer = self._saves[0], None
        if isinstance(outcome, Committed):
            if self.rank == 0:
                send(Saved(step=StepsDone(self._last_save), name=outcome.name, size_bytes=1, save_time_s=1.0))
        else:
            self._failed = outcome

    def _give_up(self, send: Callable[[Any], None], trains_on: bool = False) -> None:
        if not self._in_a_row:
            self._failing_since_s = self.group.setting.clock.now
        errors = self.gathered(self._failed)
        self._failed, self._given_up, self._in_a_row = None, True, self._in_a_row + 1
        self._saves.append(CheckpointError("canceled"))  # a writer that still waits for parts ends
        self._writer = None
        error = next(one for one in errors if one is not None)
        send(SaveFailed(step=StepsDone(self._last_save), reason=str(error), in_a_row=self._in_a_row))
        if isinstance(error, SpringtideError):
            raise error
        is_away = trains_on and may_pass(error) and self.group.setting.clock.now - self._failing_since_s < _AWAY_S
        if self._in_a_row > self.group.setting.config.checkpoint.max_failed and not is_away:
            raise CheckpointError(f"{self._in_a_row} saves failed one after the other")

    def _settle(self, send: Callable[[Any], None]) -> None:
        while True:
            self._poll(send)
            states = self.gathered((self._busy, self._failed is not None))
            if any(failed for _, failed in states):
                self._give_up(send)
            elif not any(busy for busy, _ in states):
                return
            else:
                self.group.setting.clock.sleep(0.5)

    def _finish(self, step: StepsDone, state: Any, term: int, send: Callable[[Any], None]) -> None:
        self._settle(send)
        if step == self._last_save and not self._in_a_row:
            return
        while True:
            self._begin(step, state, term)
            failed = self._in_a_row
            self._settle(send)
            if self._in_a_row <= failed:
                return

    def _leave(
        self,
        step: StepsDone,
        evacuate: bool,
        snapshots: Snapshots,
        snapshot: Callable[[StepsDone], None],
        state: Any,
        term: int,
        send: Callable[[Any], None],
    ) -> None:
        kept = False
        self._reach("leave")
        if not evacuate:
            while snapshots.busy:
                self.group.setting.clock.sleep(0.05)
            self.gathered(None)
            if kept := all(self.gathered(snapshots.evacuate(self.on_first(snapshots.staying)))):
                snapshot(step)
                while snapshots.busy:
                    self.group.setting.clock.sleep(0.05)
                self.gathered(None)
        if not kept:
            self._finish(step, state, term, send)
        send(Left(step=step, kept_in="memory" if kept else "store"))


def _done(step: StepsDone, digest: int, workers: int, setting: Setting) -> StepDone:
    return StepDone(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=step * setting.config.tokens_per_step,
        step_tokens=setting.config.tokens_per_step,
        step_time_s=setting.step_s,
        data_wait_s=0.0,
        tokens_per_s=1.0,
        mfu=0.0,
        memory_bytes=0,
        world_size=workers,
        digest=f"{digest:016x}",
        time_s=1_700_000_000.0 + setting.clock.now,
    )


class WorkerGroup:
    """The ranks that train together, as the controller sees them."""

    def __init__(self, setting: Setting, nodes: tuple[str, ...], owner: str, mailbox: Any, watch: Any) -> None:
        self.setting, self.nodes, self.owner, self.mailbox, self._watch = setting, nodes, owner, mailbox, watch
        self.collective = Collective(setting.clock, len(nodes))
        self.released = False
        self.last_state: tuple[int, ...] = ()
        self._began = False
        self.ranks = [Rank(self, rank) for rank in range(len(nodes))]

    def began(self, step: int, term: int, model: History) -> None:
        """Called by every rank when it has its state; the first of them counts."""
        if not self._began:
            self._began = True
            self._watch.began(self, step, term, model.value)

    def trained(self, step: int) -> None:
        self._watch.trained(step)

    def committed(self, step: int) -> None:
        self._watch.committed(step)

    def failures(self) -> dict[int, BaseException]:
        """What has become of ranks that did not end as they should."""
        found: dict[int, BaseException] = {}
        for one in self.ranks:
            if one.process.error is not None:
                found[one.rank] = one.process.error
            elif not one.process.alive and not one.left and not one.process.greenlet.dead:
                found[one.rank] = RayActorError(error_msg="The actor died unexpectedly")
        return found

    @property
    def is_over(self) -> bool:
        """Whether every rank has returned."""
        return all(one.left for one in self.ranks)

    def release(self) -> None:
        """End the ranks; their writers go on."""
        self.released = True
        for one in self.ranks:
            with contextlib.suppress(Exception):
                one.process.kill()
