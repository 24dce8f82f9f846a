"""The training loop: an iterator of events. It knows nothing about Ray, consoles or trackers; they listen to the events.

feed(reader, done) -> the batches after ``done`` steps
interrupt()        -> the request to the loop, read once per step, just before the step's all-reduce
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from torch import Tensor

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import Meta, committed, name_of
from springtide.checkpoint.restore import begin as begin_from
from springtide.checkpoint.restore import restore
from springtide.checkpoint.snapshots import SnapshotStore, Snapshotter, restore_from_snapshots
from springtide.config import Config, fingerprint
from springtide.config.steps import OrderStep, StepsDone, one_more
from springtide.dist import World, on_first
from springtide.elastic import Interrupt
from springtide.errors import TrainingFailed
from springtide.events import Evaluated, Event, Left, Rejected, RolledBack, Started, StepDone, Stopped, Waited
from springtide.faults import reach
from springtide.model import as_held, make
from springtide.objective import Columns
from springtide.parallel import parallelize
from springtide.store import Folder
from springtide.stream import Batch, Data, RankReader, check, digest
from springtide.training import source_figures
from springtide.training.anchor import Anchor
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.compile_cache import CompiledCode
from springtide.training.device import choose_kernels, peak_memory, to_device
from springtide.training.device_check import StragglerDetector
from springtide.training.energy import energy_meter
from springtide.training.evaluate import evaluate
from springtide.training.forgetting import FirstLosses
from springtide.training.group_lease import GroupLease
from springtide.training.hooks import StepContext, StepHook, StepHooks
from springtide.training.micro_batches import largest_micro_batch, micro_batches
from springtide.training.nvidia_ranges import tools_of
from springtide.training.optim import may_fuse, optimizer_of, rate_after, set_learning_rate
from springtide.training.parameter_groups import check_groups, freeze
from springtide.training.pauses import Pauses, check_can_tell, sensors
from springtide.training.placement import Placement
from springtide.training.profile import Profile
from springtide.training.recheck import Recheck
from springtide.training.recompiles import Recompiles
from springtide.training.sample import write_sample
from springtide.training.seeds import lane_seeds, seed_of
from springtide.training.snapshot_schedule import SnapshotSchedule
from springtide.training.start_check import check_adapter
from springtide.training.state import ModelFigures, TrainState
from springtide.training.step import StepResult, StepSignals, compute, train_step
from springtide.training.step_guard import StepGuard
from springtide.training.step_metrics import StepMetrics
from springtide.training.teacher import objective_of
from springtide.training.weight_average import averaged_weights, newest_share, set_newest_share
from springtide.training.weights import initialize_adapter

Feed = Callable[[RankReader, StepsDone], Iterator[Batch]]


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
    snapshot_store: SnapshotStore | None = None
    """The store of this rank's snapshots in memory; None takes none."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Duration of each phase of the start [s]."""
    placement: Placement = dataclasses.field(default_factory=Placement)

    def __post_init__(self) -> None:
        begin, config = time.perf_counter(), self.config
        if self.folder.exists(configs.RUN_CONFIG):  # an earlier worker group may have rolled back
            saved = configs.parse(self.folder.read(configs.RUN_CONFIG), self.folder.where(configs.RUN_CONFIG))
            self.data = self.data.skipping(map(OrderStep, saved.stream.skip))
        choose_kernels(config.parallel)
        model = make(config.model, self.data.vocab_size, *self.data.document_ids)
        check_adapter(config)
        if config.train.only_when:
            on_first(lambda: check_can_tell(config.train.only_when, sensors()))
        check_groups(model, config.optim)
        freeze(model, config.optim)
        figures = ModelFigures.of(model, self.data.sequence_length, config.parallel.recompute)
        model = parallelize(model, config.parallel, self.world)
        optimizer = optimizer_of(model, config.optim, may_fuse(config.parallel, self.world.device))
        objective, teacher = objective_of(config, self.data, self.world.device)
        names = config.train.metrics
        metrics = StepMetrics(names, model, self.world) if names else None
        anchor = Anchor(model, config.objective) if config.objective.anchor else None
        beside = objective, metrics, anchor, teacher
        self.state = TrainState(model, optimizer, StepGuard(config), fingerprint(config), *beside)
        nodes = self.placement.nodes
        node = nodes[self.world.rank] if nodes else ""
        self.lease = GroupLease(self.folder, self.placement.owner, node, config.needs_trust)
        self.data_waits_s = [0.0] * self.world.size
        """How long each rank has waited for its feed since this worker group began [s]."""
        self.state.energy = energy_meter(self.world)
        self.phases_s["model"] = time.perf_counter() - begin
        self.figures = figures.on(self.world.device)
        self.phases_s["peak"] = time.perf_counter() - begin - self.phases_s["model"]

    def events(
        self, feed: Feed, interrupt: Callable[[], Interrupt | None], others: Sequence[StepHook] = ()
    ) -> Iterator[Event]:
        """Train to the end of the run, or until asked to stop; yield the events. ``others``: hooks of the caller, the last."""
        begin = time.perf_counter()
        self.lease.term = on_first(self.lease.claim)
        self.phases_s["claim"] = time.perf_counter() - begin
        yield from self._restore()
        if self.state.step == branch.first_step(self.config.train) or self._evaluates_now:
            yield from self._evaluate()  # also where the group before had to leave at once
        while (yield from self._train(feed, interrupt, others)):
            yield from self._go_back()

    def _train(
        self, feed: Feed, interrupt: Callable[[], Interrupt | None], others: Sequence[StepHook]
    ) -> Generator[Event, None, bool]:
        """Train to the end of the run, or until asked to stop. Returns True if the last step must be rolled back."""
        state, last = self.state, self.config.num_steps
        with contextlib.ExitStack() as stack:
            saves = stack.enter_context(self._checkpoint_schedule())
            snapshots = self._snapshot_schedule()
            hooks = StepHooks([*self._hooks(saves, snapshots, interrupt), *others])
            stack.callback(hooks.close)
            stopped = False
            reader = self.data.reader(self.world.rank, self.world.size)
            batches = to_device(feed(reader, state.step) if state.step < last else (), self.world.device)
            clock = time.perf_counter()
            while state.step < last and not stopped:
                batch, tokens_NL, columns = next(batches)
                data_wait_s = time.perf_counter() - clock
                check(self.data.order, self.world.rank, self.world.size, state.step, batch)
                asked = StepSignals(asked=interrupt, data_wait_s=data_wait_s)
                signals = hooks.signals(asked, one_more(state.step))
                result, rate = self._step(batch, tokens_NL, columns, signals, hooks)
                done = StepContext(state.step, result, rate, time.perf_counter() - clock, data_wait_s)
                yield self._done(done)
                yield from hooks.after_step(done)
                # when interrupted, only skip the step, and end
                if state.guard.needs_rollback and not result.interrupts - {Interrupt.COPY}:
                    yield from saves.settle()
                    return True
                stopped = Interrupt.STOP in result.interrupts
                leaves = bool(result.interrupts & {Interrupt.LEAVE, Interrupt.EVACUATE})
                if (state.step == last or self._evaluates_now) and not stopped and not leaves:  # time is short
                    yield from self._evaluate()
                if stopped or state.step == last:
                    yield from saves.finish(state.step)
                elif leaves:
                    yield from self._leave(Interrupt.EVACUATE in result.interrupts, saves, snapshots)
                    return False
                else:
                    yield from hooks.between_steps(done)
                if saves.last_step == state.step:
                    state.losses_since_save = 0.0, 0
                    yield Waited(step=state.step, data_waits_s=[round(wait, 3) for wait in self.data_waits_s])
                clock = time.perf_counter()
            if state.step == last and not on_first(self._is_committed):
                # a group was lost after the last step, and this one has its state from memory
                saves.last_step = StepsDone(-1)
                yield from saves.finish(state.step)
            saves.end()
        yield from self._end(stopped=state.step < last)
        return False

    def _end(self, stopped: bool) -> Iterator[Event]:
        """End the lease; after the last step, evaluate and write a sample."""
        step = self.state.step
        if self.world.is_first:
            leases.end(self.folder, self.lease.term)
        if stopped:
            yield Stopped(step=step, status="stopped", reason=f"asked to; saved at step {step}")
            return
        yield from self._evaluate()
        yield from write_sample(self.state.model, self.data, self.world, self.config, step)
        yield Stopped(step=step, status="finished")

    def _hooks(
        self, saves: CheckpointSchedule, snapshots: SnapshotSchedule, interrupt: Callable[[], Interrupt | None]
    ) -> list[StepHook]:
        config, nodes, only_when = self.config, self.placement.nodes, self.config.train.only_when
        return [
            self.state.energy,
            Recheck(config, self.world, self.state, nodes, saves, self.lease, self._seed),
            Recompiles(config.parallel.compile),
            CompiledCode(self.placement.compiled, self.world, self.lease),
            self.state.guard,
            Profile(config.train.profile, self.world, self.folder, tools_of(self.world.device)),
            saves,
            snapshots,
            StragglerDetector(self.world, nodes, float(config.elastic.compare)),
            *([Pauses(only_when, self.world, interrupt, self.placement.heartbeat)] if only_when else ()),
        ]

    def _seed(self, rank: int) -> int:
        """Return the seed with which ``rank`` begins the current step."""
        return seed_of(self.config.train.seed, self.state.step, self.data.order.lanes_of(rank, self.world.size)[0])

    def _go_back(self) -> Iterator[Event]:
        """Roll back to the newest checkpoint before a spike. The spike's step, and those that may have led to it, are skipped
        from now on; the run's config makes every later worker group skip them, too."""
        optim, order, step = self.config.optim, self.data.order, self.state.step
        here = step - branch.first_step(self.config.train)  # a branch keeps the steps of its trunk
        suspects = min(here, optim.rollback_steps + 1)  # the last one is the spike's step
        skipped = [order.step_after(StepsDone(before)) for before in range(step - suspects, step)]
        self.data = self.data.skipping(skipped)
        in_a_row = next(count for count in itertools.count() if skipped[-1] - count not in self.data.order.skip)
        if in_a_row > optim.max_left_out + optim.rollback_steps:
            raise TrainingFailed(
                f"{in_a_row} steps of the order in a row, to {skipped[-1]}, are skipped because of spikes: look at their "
                "rows (springtide data inspect), lower optim.peak_lr, or raise optim.spike_deviations"
            )
        yield RolledBack(step=step, skipped=skipped, reason=f"for the spike at step {step}")
        order, ended = self.data.order, self.lease.term
        go_back = functools.partial(self.lease.go_back, ended, self.config, order.identity_at, order.skip)
        self.lease.term = on_first(go_back)
        self.state.guard, self.state.losses_since_save = StepGuard(self.config), (0.0, 0)
        yield from self._restore(from_memory=False)

    def _leave(self, evacuate: bool, saves: CheckpointSchedule, snapshots: SnapshotSchedule) -> Iterator[Event]:
        """Bring the state to safety for the next worker group."""
        step = self.state.step
        kept = not evacuate and snapshots.leave(step, on_first(self.placement.leave_left_s))
        if not kept:
            yield from saves.finish(step)
        if self.world.is_first:
            leases.end(self.folder, self.lease.term)  # the next group does not count it as lost
        yield Left(step=step, kept_in="memory" if kept else "store")

    def _step(
        self, batch: Batch, tokens_NL: Tensor, columns: Columns, signals: StepSignals, hooks: StepHooks
    ) -> tuple[StepResult, float]:
        """Do one step. Returns its result and its learning rate."""
        config, state, order, world = self.config, self.state, self.data.order, self.world
        rate, order_step = rate_after(config, one_more(state.step)), order.step_after(state.step)
        set_learning_rate(state.optimizer, rate)
        set_newest_share(state.optimizer, newest_share(config, one_more(state.step), state.tokens_before))
        cut = (
            order.lane_share(order_step),
            -(-order.lanes // world.size),
            config.train.rows_at_once,
            config.parallel.exact,
        )
        lanes, rows = order.lanes_of(world.rank, world.size), order.lane_rows(order_step, world.rank, world.size)
        result = train_step(
            state.model,
            state.optimizer,
            tokens_NL,
            digest(batch.sample_ids),
            world,
            micro_batches=micro_batches(rows, *cut),
            padded_rows=largest_micro_batch(*cut) * config.parallel.compile,
            tokens_per_step=order.rows(order_step) * self.data.sequence_length,
            clip_norm=config.optim.clip_norm,
            z_weight=config.optim.z_loss,
            objective=state.objective,
            anchor=state.anchor,
            metrics=state.metrics,
            loss_scale=state.guard.scale.value,
            signals=signals,
            allows_update=state.guard.allows_update,
            before_update=hooks.before_update,
            compute_first=hooks.compute_first(compute),
            sources_N=source_figures.numbers(self.data, batch.sample_ids, world.device),
            num_sources=source_figures.num_sources(self.data),
            columns=columns,
            seeds=lane_seeds(config.train.seed, state.step, lanes, rows, config.parallel.exact),
            name=f"step {order_step} of the order",
        )
        self.data_waits_s = [sum(waits) for waits in zip(self.data_waits_s, result.data_waits_s, strict=True)]
        state.advance(order_step, result)
        return result, rate

    def _done(self, done: StepContext) -> StepDone:
        result, world = done.result, self.world
        tokens_per_s = result.tokens / done.step_time_s
        return StepDone(
            step=done.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=done.learning_rate,
            tokens=self.state.tokens,
            step_tokens=result.tokens,
            step_time_s=done.step_time_s,
            data_wait_s=max(result.data_waits_s),
            tokens_per_s=tokens_per_s,
            mfu=self.figures.flops_per_token * tokens_per_s / (self.figures.peak_flops * world.size),
            memory_bytes=peak_memory(world.device),
            world_size=world.size,
            digest=f"{result.digest:016x}",
            energy_j=round(result.energy_j, 6),
            energy_between_j=round(result.energy_between_j, 6),
            updated=result.updated,
            loss_scale=self.state.guard.scale.value,
            extra={**result.extra, **self.state.sources.of_step(self.data, done.step, result)},
        )

    @property
    def _evaluates_now(self) -> bool:
        every, in_background = self.config.train.eval_every, self.config.train.eval_async
        return every > 0 and self.state.step % every == 0 and not in_background

    def _evaluate(self) -> Iterator[Evaluated]:
        train, state = self.config.train, self.state
        if train.eval_tokens and state.step not in state.heldout_losses:
            rows, padded = train.rows_at_once, self.config.parallel.compile
            how = int(train.eval_tokens), rows, padded, self.placement.heartbeat
            found = evaluate(state.model, self.data, self.world, state.step, *how)
            state.heldout_losses[state.step] = found.heldout_loss
            if not state.step:
                state.first_losses = on_first(lambda: FirstLosses.of(self.config, self.data, found))
            found = state.first_losses.compared(found)
            with averaged_weights(state.model, state.optimizer) as exist:
                if exist:
                    averaged = evaluate(state.model, self.data, self.world, state.step, *how)
                    found = dataclasses.replace(found, ema_heldout_loss=averaged.heldout_loss)
            yield found

    def _is_committed(self) -> bool:
        return name_of(self.state.step) in committed(self.folder)[-1:]

    def _checkpoint(self) -> tuple[dict[str, Tensor], Meta]:
        return self.state.tensors(), self.state.meta(self.data, self.world, self.labels)

    def described(self) -> tuple[int, Meta]:
        """Return the term of the group's lease and the metadata of a checkpoint of the current step."""
        return self.lease.term, self.state.meta(self.data, self.world, self.labels)

    def _checkpoint_schedule(self) -> CheckpointSchedule:
        losses = leases.losses(self.folder) if self.world.is_first else 0
        schedule = CheckpointSchedule(
            self.config, self.world, self.folder, self.lease, losses, self._checkpoint, self.placement.heartbeat
        )
        schedule.last_step = self.state.step
        return schedule

    def _snapshot_schedule(self) -> SnapshotSchedule:
        checkpoint, world, memory = self.config.checkpoint, self.world, None
        if self.snapshot_store is not None and checkpoint.memory_every and checkpoint.stage:
            is_cut = world.cut.is_set
            memory = Snapshotter(self.snapshot_store, self.lease.term, world.rank, world.size, checkpoint.stage, is_cut)
        return SnapshotSchedule(checkpoint, memory, self._checkpoint, self.state.step, world.is_first)

    def _restore(self, from_memory: bool = True) -> Iterator[Event]:
        reach("restore", "before")
        begin, identity, state, found = time.perf_counter(), self.data.order.identity_at, self.state, None
        if state.anchor:
            state.anchor.load(self.config)
        if state.teacher:
            state.teacher.load()
        if self.snapshot_store and from_memory and on_first(lambda: leases.has_trained(self.folder, self.lease.term)):
            found = restore_from_snapshots(self.folder, self.snapshot_store, state.model, state.optimizer, identity)
        if found is None:
            here = (self.lease.node, self.lease.term, self.placement.read_elsewhere)
            found = restore(self.folder, state.model, state.optimizer, identity, *here)
        if found is None:
            adapted = self.config.model.adapter != "none"
            convert = as_held if adapted else None
            found = begin_from(self.config.train, state.model, state.optimizer, identity, adapted, convert)
        if found is None:
            state.begin(self.config, self.data)
        else:
            if found.new_adapter:
                initialize_adapter(state.model, self.config.model)
            state.resume(found)
            for name, reason in found.rejected:
                yield Rejected(step=state.step, name=name, reason=reason)
        reach("restore", "after")
        self.phases_s["state"] = time.perf_counter() - begin
        yield Started(
            step=state.step,
            world_size=self.world.size,
            resumed_from=found.name if found else "",
            order_identity=self.data.order.identity,
            chain=state.chain,
            skipped_updates=list(state.skipped_updates),
            **dataclasses.asdict(self.figures),
            remark=found.remark if found else "",
            nodes=list(self.placement.nodes),
            markets=list(self.placement.markets),
            energy_source=state.energy.source,
            phases_s={phase: round(seconds, 3) for phase, seconds in self.phases_s.items()},
        )
