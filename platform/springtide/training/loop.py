"""The training loop: an iterator of events. Ray, consoles and trackers consume these events; the loop does not depend on them.
Features plug in as parts, which the loop calls only through the class ``Part``. ``parts.py`` lists them.

The caller of ``TrainLoop.events`` passes two functions:

feed(reader, done) -> iterator of this rank's batches after the first ``done`` steps
interrupt()        -> a request to the worker group, or None; called once per step, just before the step's all-reduce
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from torch import Tensor

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import begin as begin_from
from springtide.checkpoint.restore import restore
from springtide.checkpoint.snapshots import SnapshotStore, restore_from_snapshots
from springtide.config import Config, fingerprint
from springtide.config.steps import OrderStep, StepsDone, one_more
from springtide.distributed import World, on_first
from springtide.distributed.fsdp import parallelize
from springtide.elastic import GroupRequest
from springtide.events import Event, Rejected, Started, StepDone, Stopped
from springtide.faults import fault_point
from springtide.model import as_held, make
from springtide.model.objective import Columns
from springtide.optim.build import may_fuse, optimizer_of
from springtide.optim.loss_scale import LossScale
from springtide.optim.parameter_groups import check_groups, freeze
from springtide.optim.schedule import set_learning_rate
from springtide.storage import Folder
from springtide.stream import Batch, Data, RankReader, check
from springtide.training.device import choose_kernels, peak_memory, to_device
from springtide.training.group_context import GroupContext
from springtide.training.group_lease import GroupLease, go_back, without_suspects
from springtide.training.losses import LossOptions, largest_micro_batch, micro_batches
from springtide.training.part import DoneStep, Part, StepResult, Verdict, Work
from springtide.training.parts import parts_of
from springtide.training.requests import Requests
from springtide.training.seeds import lane_seeds, seed_of
from springtide.training.start_check import check_adapter
from springtide.training.state import ModelFigures, TrainState, initialize_adapter, rate_after
from springtide.training.step import StepSetup, train_step
from springtide.training.teacher import objective_of

Feed = Callable[[RankReader, StepsDone], Iterator[Batch]]


@dataclasses.dataclass
class TrainLoop:
    """Training of a run by one worker group, from the restored state to the last step."""

    config: Config
    world: World
    data: Data
    folder: Folder
    """The run's folder, which contains its checkpoints."""
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names and texts that are written into the metadata of every checkpoint."""
    snapshot_store: SnapshotStore | None = None
    """Store of this rank's in-memory snapshots. None: no snapshots are taken."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Duration of each startup phase, by name [s]."""
    context: GroupContext = dataclasses.field(default_factory=GroupContext)

    def __post_init__(self) -> None:
        begin, config = time.perf_counter(), self.config
        # the saved config lists the steps that earlier worker groups skipped in a rollback: skip them, too
        if self.folder.exists(configs.RUN_CONFIG):
            saved = configs.parse(self.folder.read(configs.RUN_CONFIG), self.folder.where(configs.RUN_CONFIG))
            self.data = self.data.skipping(map(OrderStep, saved.stream.skip))
        choose_kernels(config.parallel)
        model = make(config.model, self.data.vocab_size, *self.data.document_ids)
        check_adapter(config)
        check_groups(model, config.optim)
        freeze(model, config.optim)
        figures = ModelFigures.of(model, self.data.sequence_length, config.parallel.recompute)
        model = parallelize(model, config.parallel, self.world)
        optimizer = optimizer_of(model, config.optim, may_fuse(config.parallel, self.world.device))
        objective, self.teacher = objective_of(config, self.data, self.world.device)
        self.state = TrainState(model, optimizer, fingerprint(config))
        self.loss_scale, self.requests = LossScale(config.parallel.precision == "fp16"), Requests()
        nodes = self.context.nodes
        node = nodes[self.world.rank] if nodes else ""
        self.lease = GroupLease(self.folder, self.context.owner, node, config.needs_trust)
        loss = LossOptions(config.optim.z_loss, objective)
        self.setup = StepSetup(
            model, optimizer, self.world, loss, config.optim.clip_norm, lambda: self.loss_scale.value, parts_of(self)
        )
        self._begun = contextlib.ExitStack()
        """Stack that closes the parts (features of a step) whose ``begin`` was called."""
        self.phases_s["model"] = time.perf_counter() - begin
        self.figures = figures.on(self.world.device)
        self.phases_s["peak"] = time.perf_counter() - begin - self.phases_s["model"]

    @property
    def parts(self) -> Sequence[Part]:
        """All parts (features of a step), in the order in which they are called."""
        return self.setup.parts

    def events(
        self, feed: Feed, interrupt: Callable[[], GroupRequest | None], others: Sequence[Part] = ()
    ) -> Iterator[Event]:
        """Train to the end of the run or until a request to stop or leave; yield the events. ``others``: the caller's own
        parts, called after all other parts."""
        begin = time.perf_counter()
        self.requests.from_outside = interrupt
        self.setup.parts = [*self.parts, *others]
        self.lease.term = on_first(self.lease.claim)
        self.phases_s["claim"] = time.perf_counter() - begin
        with self._begun:
            yield from self._restore()
            for part in self.parts:
                yield from part.at_start()
            verdict = yield from self._stretch(feed)
        while verdict is Verdict.ROLL_BACK:
            self.data, event = without_suspects(self.config, self.data, self.state.step)
            yield event
            go_back(self.config, self.data, self.lease)
            with self._begun:
                yield from self._restore(from_memory=False)
                verdict = yield from self._stretch(feed)
        step = self.state.step
        if verdict is Verdict.STOP:
            yield Stopped(step=step, status="stopped", reason=f"asked to; saved at step {step}")
        if verdict is Verdict.FINISH:
            yield Stopped(step=step, status="finished")

    def _stretch(self, feed: Feed) -> Generator[Event, None, Verdict]:
        """Train with one fixed order of samples, until the run ends or a part requests a rollback, a hand-over or a stop.
        Returns the verdict that ended training: FINISH, ROLL_BACK, LEAVE or STOP."""
        state, last, world = self.state, self.config.num_steps, self.world
        reader = RankReader(self.data, world.rank, world.size)
        batches = to_device(feed(reader, state.step) if state.step < last else (), world.device)
        verdict = Verdict.CONTINUE if state.step < last else Verdict.FINISH
        clock = time.perf_counter()
        while verdict is Verdict.CONTINUE:
            batch, tokens_NL, columns = next(batches)
            data_wait_s = time.perf_counter() - clock
            check(self.data.order, world.rank, world.size, state.step, batch)
            result, rate = self._step(batch, tokens_NL, columns, data_wait_s)
            verdict = max(part.verdict(result) for part in self.parts)
            if state.step == last and verdict is not Verdict.ROLL_BACK:
                verdict = Verdict.FINISH
            done = DoneStep(state.step, result, rate, time.perf_counter() - clock, data_wait_s, verdict)
            yield self._event(done)
            for part in self.parts:
                yield from part.after_step(done)
            if verdict is Verdict.CONTINUE:
                for part in self.parts:
                    yield from part.between_steps(done)
            clock = time.perf_counter()
        for part in self.parts:
            yield from part.at_end(verdict)
        return verdict

    def _step(self, batch: Batch, tokens_NL: Tensor, columns: Columns, data_wait_s: float) -> tuple[StepResult, float]:
        """Train one step. Returns its result and its learning rate."""
        config, state, order, world = self.config, self.state, self.data.order, self.world
        rate, order_step = rate_after(config, one_more(state.step)), order.step_after(state.step)
        set_learning_rate(state.optimizer, rate)
        shape = (
            order.rows_per_lane_at(order_step),
            -(-order.lanes // world.size),
            config.train.rows_at_once,
            config.parallel.exact,
        )
        lanes, rows = order.lanes_of(world.rank, world.size), order.lane_rows(order_step, world.rank, world.size)
        work = Work(
            tokens_NL,
            micro_batches(rows, *shape),
            tokens_per_step=order.rows(order_step) * self.data.sequence_length,
            padded_rows=largest_micro_batch(*shape) * config.parallel.compile,
            sample_ids=batch.sample_ids,
            columns=columns,
            seeds=lane_seeds(config.train.seed, state.step, lanes, rows, config.parallel.exact),
            step=state.step,
            name=f"step {order_step} of the order",
            data_wait_s=data_wait_s,
        )
        result = train_step(self.setup, work)
        state.advance(order_step, result)
        return result, rate

    def _event(self, done: DoneStep) -> StepDone:
        result, world = done.result, self.world
        tokens_per_s = result.tokens / done.step_time_s
        known = {
            "mfu": self.figures.flops_per_token * tokens_per_s / (self.figures.peak_flops * world.size),
            "data_wait_s": done.data_wait_s,
        }
        return StepDone(
            step=done.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=done.learning_rate,
            tokens=self.state.tokens,
            step_tokens=result.tokens,
            step_time_s=done.step_time_s,
            tokens_per_s=tokens_per_s,
            memory_bytes=peak_memory(world.device),
            world_size=world.size,
            digest=f"{result.digest:016x}",
            updated=result.updated,
            extra=result.extra,
            **known | result.fields,
        )

    def seed(self, rank: int) -> int:
        """Return the generator seed with which ``rank`` begins the current step: the seed of the rank's first lane (a fixed
        share of every batch)."""
        return seed_of(self.config.train.seed, self.state.step, self.data.order.lanes_of(rank, self.world.size)[0])

    def checkpoint(self) -> tuple[dict[str, Tensor], Meta]:
        """Return the tensors and the metadata of a checkpoint of the current step."""
        return self.state.tensors(), self.described()[1]

    def described(self) -> tuple[int, Meta]:
        """Return the term (number) of the group's lease and the metadata of a checkpoint of the current step."""
        meta = self.state.meta(self.data, self.world, self.labels)
        for part in self.parts:
            meta = part.describe(meta)
        return self.lease.term, meta

    def _restore(self, from_memory: bool = True) -> Iterator[Event]:
        fault_point("restore", "before")
        begin, identity, state, found = time.perf_counter(), self.data.order.identity_at, self.state, None
        if self.snapshot_store and from_memory and on_first(lambda: leases.has_trained(self.folder, self.lease.term)):
            found = restore_from_snapshots(self.folder, self.snapshot_store, state.model, state.optimizer, identity)
        if found is None:
            here = (self.lease.node, self.lease.term, self.context.read_elsewhere)
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
        for part in self.parts:
            part.begin(found)
            self._begun.callback(part.close)
        fault_point("restore", "after")
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
            nodes=list(self.context.nodes),
            markets=list(self.context.markets),
            phases_s={phase: round(seconds, 3) for phase, seconds in self.phases_s.items()},
            **{name: value for part in self.parts for name, value in part.started.items()},
        )
