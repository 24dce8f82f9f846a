"""The training loop: an iterator of events. It knows nothing about Ray, consoles or trackers; they listen to the events.

feed(reader, step) -> batches from that step on
interrupt()        -> the request to the loop, read once per step
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored, restore
from springtide.checkpoint.restore import begin as begin_from
from springtide.checkpoint.snapshots import SnapshotStore, Snapshotter, restore_from_snapshots
from springtide.checkpoint.tensors import named_tensors
from springtide.config import Config, code_fingerprint, fingerprint
from springtide.dist import World
from springtide.elastic import Interrupt
from springtide.errors import SpringtideError, TrainingFailed
from springtide.events import Evaluated, Event, Left, Rejected, RolledBack, Started, StepDone, Stopped, Waited
from springtide.model import flops_per_token, hardware_flops_per_token, make, num_parameters
from springtide.parallel import parallelize
from springtide.store import Folder
from springtide.store.digest import of_bytes
from springtide.stream import Batch, Data, RankReader, check, digest
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.device import peak_memory, to_device
from springtide.training.device_check import StragglerDetector
from springtide.training.evaluate import evaluate
from springtide.training.group_lease import GroupLease
from springtide.training.micro_batches import largest_micro_batch, micro_batches
from springtide.training.optim import optimizer_of, rate_after, set_learning_rate
from springtide.training.peak_flops import peak_flops
from springtide.training.profile import Profile
from springtide.training.recompiles import Recompiles
from springtide.training.sample import write_sample
from springtide.training.snapshot_schedule import SnapshotSchedule
from springtide.training.step import StepResult, StepSignals, train_step
from springtide.training.step_guard import StepGuard
from springtide.training.weights import initialize

Feed = Callable[[RankReader, int], Iterator[Batch]]


@dataclasses.dataclass
class TrainLoop:
    """A run as one worker group trains it, from restore to the last step."""

    config: Config
    world: World
    data: Data
    folder: Folder
    """The run's folder; checkpoints lie below it."""
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    """Written into every checkpoint."""
    keeper: SnapshotStore | None = None
    """The store of this rank's snapshots in memory; None takes none."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Duration of each phase of the start [s]."""
    owner: str = ""
    """Owner id of the driver that has claimed the run; empty if there is no driver: this worker group claims the run itself."""
    nodes: Sequence[str] = ()
    """Node of each rank, if known."""
    markets: Sequence[str] = ()
    """Market of each rank's node, if known."""

    def __post_init__(self) -> None:
        begin = time.perf_counter()
        if self.folder.exists(configs.RUN_CONFIG):  # an earlier worker group may have rolled back
            self.data = self.data.skipping(configs.parse(self.folder.read(configs.RUN_CONFIG)).stream.skip)
        if self.config.parallel.threads:
            torch.set_num_threads(self.config.parallel.threads)
        model = make(self.config.model, self.data.vocab_size, self.data.eos_id)
        self.flops_per_token = flops_per_token(model, self.data.sequence_length)
        self.hardware_flops_per_token = hardware_flops_per_token(
            model, self.data.sequence_length, self.config.parallel.recompute
        )
        self.num_parameters = num_parameters(model)
        self.model = parallelize(model, self.config.parallel, self.world)
        self.exact = self.config.parallel.reduction == "fp64"
        """Whether sums over micro-batches and workers are exact, so that results are bit-identical at any world size."""
        self.optimizer = optimizer_of(
            self.model, self.config.optim, fused=not (self.exact and self.world.device.type == "cpu")
        )
        self.step = 0
        """Steps done: all of the data state."""
        self.tokens = 0
        self.judge = StepGuard(self.config)
        self.term = 0
        """Term of this worker group's lease on the run."""
        self._lease = GroupLease(self.folder, self.owner, self.nodes[self.world.rank] if self.nodes else "")
        self._fingerprint = fingerprint(self.config)
        self._losses_since_save: list[float] = []
        self._heldout_losses: dict[int, float] = {}
        self._recompiles = Recompiles(self.config.parallel.compile)
        self.data_waits_s = [0.0] * self.world.size
        """How long each rank has waited for its feed since this worker group began [s]."""
        self.phases_s["model"] = time.perf_counter() - begin
        self.peak_flops, self.peak_source = peak_flops(self.world.device)
        self.phases_s["peak"] = time.perf_counter() - begin - self.phases_s["model"]

    def events(self, feed: Feed, interrupt: Callable[[], Interrupt | None]) -> Iterator[Event]:
        """Train to the end of the run, or until asked to stop; yield the events."""
        begin = time.perf_counter()
        self.term = self._on_first(self._lease.claim)
        self.phases_s["claim"] = time.perf_counter() - begin
        yield from self._restore()
        if self.step == branch.first_step(self.config.train):
            yield from self._evaluate()
        while (yield from self._train(feed, interrupt)):
            yield from self._go_back()

    def _train(self, feed: Feed, interrupt: Callable[[], Interrupt | None]) -> Generator[Event, None, bool]:
        """Train to the end of the run, or until asked to stop. Returns True if the last step must be rolled back."""
        config, last = self.config, self.config.num_steps
        with contextlib.ExitStack() as stack:
            saves = stack.enter_context(self._checkpoint_schedule())
            memory = self._memory()
            snapshots = SnapshotSchedule(config.checkpoint, memory, self._state, self.step, self.world.is_first)
            stack.callback(snapshots.close)
            profile = Profile(config.train.profile, self.world, self.folder)
            stack.callback(profile.close)
            pace = StragglerDetector(self.world, self.nodes, float(config.elastic.compare))

            def before_update() -> None:
                saves.before_update()
                snapshots.before_update()

            stopped = False
            reader = self.data.reader(self.world.rank, self.world.size)
            batches = to_device(feed(reader, self.step) if self.step < last else (), self.world.device)
            clock = time.perf_counter()
            while self.step < last and not stopped:
                batch, tokens_NL = next(batches)
                data_wait_s = time.perf_counter() - clock
                check(self.data.order, self.world.rank, self.world.size, self.step, batch)
                tell = self._tell(interrupt(), saves, snapshots, pace)
                result, rate = self._step(batch, tokens_NL, tell._replace(data_wait_s=data_wait_s), before_update)
                now = time.perf_counter()
                yield self._done(result, rate, now - clock)
                yield from self._recompiles.after(self.step)
                yield from self.judge.after(self.step, result)
                if self.judge.needs_rollback and not result.interrupts:  # when interrupted, only skip the step, and end
                    yield from saves.settle()
                    return True
                yield from profile.after(self.step, data_wait_s)
                stopped = Interrupt.STOP in result.interrupts
                if self.step == last or self._evaluates_now:
                    yield from self._evaluate()
                if stopped or self.step == last:
                    yield from saves.finish(self.step)
                elif result.interrupts & {Interrupt.LEAVE, Interrupt.EVACUATE}:
                    yield from self._leave(Interrupt.EVACUATE in result.interrupts, saves, snapshots)
                    return False
                else:
                    yield from saves.after(self.step, result, now - clock)
                    yield from snapshots.after(self.step, result, now - clock)
                    yield from pace.after(self.step, result.examine, result.speeds)
                if saves.last_step == self.step:
                    self._losses_since_save = []
                    yield Waited(step=self.step, data_waits_s=[round(wait, 3) for wait in self.data_waits_s])
                clock = time.perf_counter()
            saves.end()
        if self.world.is_first:
            leases.end(self.folder, self.term)
        if self.step < last:
            yield Stopped(step=self.step, status="stopped", reason=f"asked to; saved at step {self.step}")
            return False
        yield from self._evaluate()
        yield from write_sample(self.model, self.data, self.world, config, self.step)
        yield Stopped(step=self.step, status="finished")
        return False

    def _go_back(self) -> Iterator[Event]:
        """Roll back to the newest checkpoint before a spike. The spike's step, and those that may have led to it, are skipped
        from now on; the run's config makes every later worker group skip them, too."""
        optim, order = self.config.optim, self.data.order
        steps = range(max(0, self.step - 1 - optim.rollback_steps), self.step)
        skipped = [order.order_step(step) for step in steps]
        self.data = self.data.skipping(skipped)
        in_a_row = next(count for count in itertools.count() if skipped[-1] - count not in self.data.order.skip)
        if in_a_row > optim.max_left_out + optim.rollback_steps:
            raise TrainingFailed(
                f"{in_a_row} steps of the order in a row, to {skipped[-1]}, are skipped because of spikes: look at their "
                "rows (springtide data inspect), lower optim.peak_lr, or raise optim.spike_deviations"
            )
        yield RolledBack(step=self.step, skipped=skipped, reason=f"for the spike at step {self.step}")
        order, ended = self.data.order, self.term
        go_back = functools.partial(self._lease.go_back, ended, self.config, order.identity_at, order.skip)
        self.term = self._on_first(go_back)
        self.judge, self._losses_since_save = StepGuard(self.config), []
        yield from self._restore(from_memory=False)

    def _tell(
        self, asked: Interrupt | None, saves: CheckpointSchedule, snapshots: SnapshotSchedule, pace: StragglerDetector
    ) -> StepSignals:
        return StepSignals(
            interrupts=frozenset(filter(None, [asked, Interrupt.SAVE if saves.asks() else None])),
            saving=saves.busy,
            save_failed=saves.failed,
            keeping=snapshots.keeping,
            turned_off=snapshots.turned_off,  # after ``keeping``, which may set it
            snapshot=snapshots.due(self.step + 1),
            examine=pace.due(),
            speed=pace.speed,
        )

    def _leave(self, evacuate: bool, saves: CheckpointSchedule, snapshots: SnapshotSchedule) -> Iterator[Event]:
        """Bring the state to safety for the next worker group."""
        kept = not evacuate and snapshots.leave(self.step)
        if not kept:
            yield from saves.finish(self.step)
        yield Left(step=self.step, kept_in="memory" if kept else "store")

    def _step(
        self, batch: Batch, tokens_NL: Tensor, tell: StepSignals, before_update: Callable[[], None]
    ) -> tuple[StepResult, float]:
        config = self.config
        rate = rate_after(config, self.step + 1)
        set_learning_rate(self.optimizer, rate)
        order, world = self.data.order, self.world
        cut = (order.lane_share(self.step), -(-order.lanes // world.size), config.train.rows_at_once, self.exact)
        seed_generators(config.train.seed, self.step, world.rank)
        result = train_step(
            self.model,
            self.optimizer,
            tokens_NL,
            digest(batch.sample_ids),
            self.world,
            micro_batches=micro_batches(order.lane_rows(self.step, world.rank, world.size), *cut),
            padded_rows=largest_micro_batch(*cut) * config.parallel.compile,
            tokens_per_step=order.rows(self.step) * self.data.sequence_length,
            clip_norm=config.optim.clip_norm,
            z_weight=config.optim.z_loss,
            loss_scale=self.judge.scale.value,
            tell=tell,
            allows_update=self.judge.allows_update,
            before_update=before_update,
        )
        self.data_waits_s = [sum(waits) for waits in zip(self.data_waits_s, result.data_waits_s, strict=True)]
        self.step += 1
        self.tokens += result.tokens
        return result, rate

    def _done(self, result: StepResult, rate: float, step_time_s: float) -> StepDone:
        tokens_per_s = result.tokens / step_time_s
        self._losses_since_save.append(result.loss)
        return StepDone(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=self.tokens,
            step_tokens=result.tokens,
            step_time_s=step_time_s,
            data_wait_s=max(result.data_waits_s),
            tokens_per_s=tokens_per_s,
            mfu=self.flops_per_token * tokens_per_s / (self.peak_flops * self.world.size),
            memory_bytes=peak_memory(self.world.device),
            world_size=self.world.size,
            digest=f"{result.digest:016x}",
            updated=result.updated,
            loss_scale=self.judge.scale.value,
        )

    @property
    def _evaluates_now(self) -> bool:
        every, beside = self.config.train.eval_every, self.config.train.eval_async
        return every > 0 and self.step % every == 0 and not beside

    def _evaluate(self) -> Iterator[Evaluated]:
        train = self.config.train
        if train.eval_rows and self.step not in self._heldout_losses:
            rows, padded = train.rows_at_once, self.config.parallel.compile
            found = evaluate(self.model, self.data, self.world, self.step, train.eval_rows, rows, padded)
            self._heldout_losses[self.step] = found.heldout_loss
            yield found

    def _state(self) -> tuple[dict[str, Tensor], Meta]:
        """Return the tensors and the metadata of a checkpoint of the current step."""
        losses = self._losses_since_save
        metrics = {"loss": sum(losses) / len(losses)} if losses else {}
        if self.step in self._heldout_losses:
            metrics["heldout_loss"] = self._heldout_losses[self.step]
        meta = Meta(
            step=self.step,
            tokens=self.tokens,
            world_size=self.world.size,
            order_identity=self.data.order.identity_at(self.step),
            config_fingerprint=self._fingerprint,
            code_fingerprint=code_fingerprint(),
            tokenizer_digest=self.data.tokenizer_digest,
            saved_s=time.time(),
            metrics=metrics,
            components=self.judge.state(),
            labels=self.labels,
        )
        return named_tensors(self.model, self.optimizer), meta

    def _on_first(self, function: Callable[[], int]) -> int:
        """Call ``function`` on rank 0; return its result, or raise its error, on every rank."""
        found: list[int | Exception] = [0]
        if self.world.is_first:
            try:
                found = [function()]
            except (SpringtideError, OSError) as error:
                found = [error]
        dist.broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _checkpoint_schedule(self) -> CheckpointSchedule:
        losses = leases.losses(self.folder) if self.world.is_first else 0
        schedule = CheckpointSchedule(self.config, self.world, self.folder, self.term, losses, self._state)
        schedule.last_step = self.step
        return schedule

    def _memory(self) -> Snapshotter | None:
        if self.keeper is None or not self.config.checkpoint.memory_every or not self.config.checkpoint.stage:
            return None
        stage, is_cut = self.config.checkpoint.stage, self.world.cut.is_set
        return Snapshotter(self.keeper, self.term, self.world.rank, self.world.size, stage, is_cut)

    def _restore(self, from_memory: bool = True) -> Iterator[Event]:
        begin, identity, found = time.perf_counter(), self.data.order.identity_at, None
        if self.keeper and from_memory and self._on_first(lambda: leases.has_trained(self.folder, self.term)):
            found = restore_from_snapshots(self.folder, self.keeper, self.model, self.optimizer, identity)
        if found is None:
            found = restore(self.folder, self.model, self.optimizer, identity, self._lease.node, self.term)
        if found is None:
            found = begin_from(self.config.train, self.model, self.optimizer, identity)
        if found is None:
            self.step = self.tokens = 0
            initialize(self.model, self.config.model, self.data.vocab_size, self.data.eos_id)
            self.optimizer.state.clear()  # of a snapshot that could not be read to its end
        else:
            self.step, self.tokens = found.meta.step, found.meta.tokens
            self.judge.load(found.meta.components)
            for name, reason in found.rejected:
                yield Rejected(step=self.step, name=name, reason=reason)
        self.phases_s["state"] = time.perf_counter() - begin
        yield Started(
            step=self.step,
            world_size=self.world.size,
            resumed_from=found.name if found else "",
            order_identity=self.data.order.identity,
            num_parameters=self.num_parameters,
            flops_per_token=self.flops_per_token,
            hardware_flops_per_token=self.hardware_flops_per_token,
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
            remark=_remark(found),
            nodes=list(self.nodes),
            markets=list(self.markets),
            phases_s={phase: round(seconds, 3) for phase, seconds in self.phases_s.items()},
        )


def _remark(found: Restored | None) -> str:
    if found is None or found.meta.code_fingerprint == code_fingerprint():
        return ""
    return f"saved by springtide's code {found.meta.code_fingerprint}, this is {code_fingerprint()}"


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed every generator that a model or a user's code may draw from, as a function of the step. So checkpoints hold no
    generator state, and an interrupted run draws the same numbers as an uninterrupted one, at the same world size."""
    mixed = int(of_bytes(f"{seed} {step} {rank}".encode())[:16], 16)
    torch.manual_seed(mixed)  # on every device
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
