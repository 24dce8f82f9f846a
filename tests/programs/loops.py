"""Functions that run on every rank; they stand in a module of their own because ranks import them."""

from __future__ import annotations

import collections
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from layouts import whole

from springtide.checkpoint import leases, writer_process
from springtide.checkpoint.async_saver import AsyncSaver, Copying, Idle
from springtide.checkpoint.checkpointer import Checkpointer
from springtide.checkpoint.format import Meta
from springtide.checkpoint.staging import StagingBuffer
from springtide.checkpoint.tensors import local, named_tensors
from springtide.config import Config
from springtide.config.steps import OrderStep
from springtide.distributed import World
from springtide.distributed import world as world_of
from springtide.distributed.fsdp import parallelize
from springtide.elastic import GroupRequest
from springtide.errors import RunExists
from springtide.events import Evaluated, Event, Started, StepDone
from springtide.model import build, skeleton
from springtide.optim import loss_scale as loss_scale_module
from springtide.optim.build import optimizer_of
from springtide.planning.step_memory import Meter
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import Batch, RankReader, load, open_data
from springtide.tracking.journal import Journal
from springtide.training import (
    GroupContext,
    StepSetup,
    TrainLoop,
    Work,
    checkpoint_schedule,
    energy,
    group_lease,
    train_step,
)
from springtide.training.__main__ import train as run_alone
from springtide.training.evaluate import Evaluations
from springtide.training.losses import micro_batches
from springtide.training.state import initialize


def open_run(world: World, config: Config) -> TrainLoop:
    """The loop over the config's dataset, in the folder of ``run.id``."""
    return TrainLoop(config, world, open_data(config.data), Folder(config.run.root) / config.run.id)


def feed(reader: RankReader, step: int) -> Iterator[Batch]:
    """The batches of a rank, read in this process, as far as any of these loops goes."""
    return load(reader, reader.plan(step, step + 1000, 2**16))


def train(
    world: World, config: Config, stop_at: int = 0, ask: GroupRequest = GroupRequest.STOP, loss_scale: float = 0.0
) -> list[Event]:
    """Train; at ``stop_at`` the last rank alone asks for ``ask``. ``loss_scale`` is what to begin with."""
    loss_scale_module._FIRST = loss_scale or loss_scale_module._FIRST
    run = open_run(world, config)

    def interrupt() -> GroupRequest | None:
        return ask if stop_at and run.state.step + 1 == stop_at and world.rank == world.size - 1 else None

    return list(run.events(feed, interrupt))


def train_and_write(world: World, config: Config, stop_at: int = 0) -> list[Event]:
    """Train as ``train`` does, with a config and a journal in the run's folder, as ``verify`` reads them."""
    run, found = open_run(world, config), []
    if world.is_first:
        Run(run.folder).write_config(config)

    def interrupt() -> GroupRequest | None:
        return GroupRequest.STOP if stop_at and run.state.step + 1 == stop_at else None

    with Journal(run.folder, enabled=world.is_first) as journal:
        for event in run.events(feed, interrupt):
            journal(event)
            found.append(event)
    return found


def train_each(world: World, configs: Sequence[Config]) -> list[list[Event]]:
    """Train the runs of ``configs``, one after the other."""
    return [train(world, config) for config in configs]


def train_each_until(world: World, configs: Sequence[Config], stop_at: int) -> list[list[Event]]:
    """Train the runs of ``configs``, each in its layout; stop those with checkpoints on the way at ``stop_at``."""
    return [train_laid_out(world, config, stop_at * bool(config.checkpoint.every_steps)) for config in configs]


def evaluate_new_model(world: World, config: Config) -> Evaluated:
    """Evaluate the model as it is before training."""
    run = open_run(world, config)
    initialize(run.state.model, config.model, run.data.vocab_size)
    [found] = next(part for part in run.parts if isinstance(part, Evaluations)).now()
    return found


def train_poisoned(world: World, config: Config, poisoned: set[int]) -> list[Event]:
    """Train where the rows of some steps of the order, counted from one, are noise; as far as a journal says, go on."""
    run = open_run(world, config)

    def noisy(reader: RankReader, step: int) -> Iterator[Batch]:
        for batch in feed(reader, step):
            place = reader.data.order.step_after(batch.step) + 1
            if place in poisoned:
                noise = np.random.default_rng(place).integers(0, 256, batch.tokens.shape).astype(batch.tokens.dtype)
                batch = batch._replace(tokens=noise)
            yield batch

    found = []
    with Journal(run.folder, enabled=world.is_first) as journal:
        for event in run.events(noisy, lambda: None):
            journal(event)
            found.append(event)
    return found


def train_laid_out(world: World, config: Config, stop_at: int = 0) -> list[Event]:
    """Train in the layout of the config, which ``world`` does not know of."""
    return train(world_of("cpu", 0, config.parallel.shards), config, stop_at)


def train_with_a_slow_feed(world: World, config: Config, slow: int, seconds: float) -> list[Event]:
    """Train where the feed of rank ``slow`` takes ``seconds`` a batch longer."""
    run = open_run(world, config)

    def slowly(reader: RankReader, step: int) -> Iterator[Batch]:
        for batch in feed(reader, step):
            time.sleep(seconds if world.rank == slow else 0)
            yield batch

    return list(run.events(slowly, lambda: None))


def train_and_count(world: World, config: Config, names: Sequence[str]) -> tuple[list[Event], list[int]]:
    """Train where the counter of joules of each rank is the machine's own, if its name is empty, else one of that name: of CPU
    time, or ``still``. Returns the events, and how often each sum over ranks was made that each step makes, by its length."""
    counter_of, all_reduce, lengths = energy.counter_of, torch.distributed.all_reduce, list[int]()
    if name := names[world.rank]:
        joules = (lambda: 0.0) if name == "still" else time.process_time
        energy.counter_of = lambda *_: energy.Counter(name, joules, every_s=0.0)

    def count(values: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if values.dtype == torch.float64 and values.dim() == 2:
            lengths.append(len(values))
        return all_reduce(values, *arguments, **named)

    torch.distributed.all_reduce = count
    try:
        events = train(world, config)
        return events, [times for times in collections.Counter(lengths).values() if times >= config.num_steps]
    finally:
        energy.counter_of, torch.distributed.all_reduce = counter_of, all_reduce


_THROTTLE = """
import os, select, signal, sys
target = int(sys.argv[1])
while not select.select([sys.stdin], [], [], 0.005)[0]:
    os.kill(target, signal.SIGSTOP)
    select.select([sys.stdin], [], [], 0.02)
    os.kill(target, signal.SIGCONT)
"""


def train_with_a_slow_device(world: World, config: Config, slow: int, nodes: list[str]) -> list[Event]:
    """Train where the process of rank ``slow`` stands still four fifths of the time."""
    run = TrainLoop(
        config,
        world,
        open_data(config.data),
        Folder(config.run.root) / config.run.id,
        context=GroupContext(nodes=nodes),
    )
    if world.rank != slow:
        return list(run.events(feed, lambda: None))
    with subprocess.Popen([sys.executable, "-c", _THROTTLE, str(os.getpid())], stdin=subprocess.PIPE):
        return list(run.events(feed, lambda: None))  # its end closes the pipe, and that ends it


def gradients(world: World, config: Config, tokens: np.ndarray, micro_batch: int) -> dict[str, torch.Tensor]:
    """The full gradients of one step over ``tokens`` (G, L + 1), shared out by the order's lanes, unclipped."""
    model = parallelize(skeleton(config.model, 257), config.parallel, world)
    initialize(model, config.model, 257)
    kept: dict[str, torch.Tensor] = {}

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                kept[name] = whole(parameter.grad)

    lanes = [lane for lane in range(len(tokens)) if lane * world.size // len(tokens) == world.rank]
    setup = StepSetup(model, Keep(model.parameters(), lr=0.0), world)
    train_step(
        setup,
        Work(
            torch.from_numpy(tokens[lanes].astype(np.int64)),
            micro_batches(
                [1] * len(lanes), 1, -(-len(tokens) // world.size), micro_batch, config.parallel.reduction == "fp64"
            ),
            tokens_per_step=tokens.shape[0] * (tokens.shape[1] - 1),
        ),
    )
    return kept


def save_weights_alone(world: World, config: Config) -> None:
    """Save the new model of ``config`` as a loop of one's own does whose optimizer has no state."""
    data = open_data(config.data)
    model = build(config.model, data.vocab_size)
    with Checkpointer(f"{config.run.root}/{config.run.id}") as checkpoints:
        checkpoints.save(1, model, torch.optim.SGD(model.parameters()))


def full_state(world: World, config: Config) -> dict[str, torch.Tensor]:
    """Every parameter and every optimizer moment after restoring the newest checkpoint, gathered."""
    run = open_run(world, config)
    event = list(run._restore())[-1]
    assert isinstance(event, Started)
    assert event.step > 0
    state = {}
    for name, parameter in run.state.model.named_parameters():
        moments = run.state.optimizer.state[parameter]
        for kind, tensor in {"weight": parameter, "m": moments["exp_avg"], "v": moments["exp_avg_sq"]}.items():
            state[f"{name}/{kind}"] = whole(tensor).detach().clone()
        state[f"{name}/step"] = local(moments["step"]).clone()
    return state


def every_tensor(world: World, config: Config) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer after restoring the newest checkpoint, gathered."""
    run = open_run(world, config)
    list(run._restore())
    found = named_tensors(run.state.model, run.state.optimizer)
    return {name: whole(tensor).detach().clone() for name, tensor in found.items()}


def save_and_die(world: World, config: Config, point: str) -> list[Event]:
    """Train to the second checkpoint; at ``point`` of its save the trainers are killed, or rank 0's alone, or a writer."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    begin = AsyncSaver.begin

    def begin_and_die(self: AsyncSaver, tensors: Any, meta: Meta, config: Any) -> None:
        if meta.step != 10:
            begin(self, tensors, meta, config)
        elif point == "writer":
            assert isinstance(self.state, Idle)
            assert self.state.writer is not None
            writer = self.state.writer.pid
            if world.is_first:
                begin(self, tensors, meta, config)
            else:
                os.kill(writer, signal.SIGSTOP)  # it gets the save and has done nothing about it when it is killed
                begin(self, tensors, meta, config)
                os.kill(writer, signal.SIGKILL)
        else:
            if point == "staging":
                StagingBuffer.settle = die  # type: ignore[method-assign]
            elif point == "before staging" or (point == "one of two" and world.is_first):
                die()
            begin(self, tensors, meta, config)
            if point == "handed over":
                assert isinstance(self.state, Copying)
                self.state.handed_over.result()
                die()

    AsyncSaver.begin = begin_and_die  # type: ignore[method-assign]
    return train(world, config)


SLOW_WRITER = (
    "import time; from springtide.storage import Folder; put = Folder.put; "
    "Folder.put = lambda *arguments: (time.sleep(0.2), put(*arguments)); "
    "from springtide.checkpoint.writer_process import main; main()"
)
"""A writing process to which every file takes a fifth of a second."""


def train_with_writer(
    world: World, config: Config, program: str, stop_at: int = 0, ask: GroupRequest = GroupRequest.STOP
) -> list[Event]:
    """Train with another program as the writing process."""
    writer_process.PROGRAM = ("-c", program)
    return train(world, config, stop_at, ask)


def train_with_short_intervals(world: World, config: Config) -> list[Event]:
    """Train; ``checkpoint.every_steps = auto`` saves every 0.2 to 0.4 s."""
    with (
        mock.patch.object(checkpoint_schedule, "LEAST_SAVE_INTERVAL_S", 0.2),
        mock.patch.object(checkpoint_schedule, "MOST_SAVE_INTERVAL_S", 0.4),
    ):
        return train(world, config)


def train_with_dropout(world: World, config: Config, stop_at: int = 0) -> list[Event]:
    """Train a model that drops a tenth of its embeddings, by torch's generator and by numpy's."""

    def drop(module: Any, inputs: Any, found: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return found
        scale = 1.0 + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        return torch.nn.functional.dropout(found, 0.1) * scale

    run_of = TrainLoop.__post_init__

    def made(run: TrainLoop) -> None:
        run_of(run)
        next(one for one in run.state.model.modules() if isinstance(one, torch.nn.Embedding)).register_forward_hook(
            drop
        )

    TrainLoop.__post_init__ = made  # type: ignore[method-assign]
    return train(world, config, stop_at)


def memory(world: World, config: Config, vocab_size: int) -> float:
    """Most bytes of tensors that this rank holds at once in a usual step of the config, by the allocator's account."""
    _memory(world, config, 64)  # what libraries take for themselves the first time
    return _memory(world, config, vocab_size)


def _memory(world: World, config: Config, vocab_size: int) -> float:
    rows = -(-config.stream.global_batch // world.size)
    rows_NL = torch.randint(1, vocab_size, (rows, config.shards.sequence_length + 1))
    parts = micro_batches([1] * rows, 1, rows, config.train.micro_batch, by_lane=False)
    here = world_of("cpu", 0, config.parallel.shards)
    with Meter(world.device) as meter:
        model = parallelize(skeleton(config.model, vocab_size, 0), config.parallel, here)
        initialize(model, config.model, vocab_size)
        optimizer = optimizer_of(model, config.optim)
        most = []
        setup, work = StepSetup(model, optimizer, here, clip_norm=1.0), Work(rows_NL, parts, rows_NL.numel())
        for _ in range(4):
            train_step(setup, work)
            most.append(meter.lap())
    # how far gloo's threads are with what they send differs from step to step
    return statistics.median(most[1:])


def train_as_torchrun_does(world: World, config: Config, from_scratch: bool = False) -> None:
    """Train with a journal and a config file in the run's folder."""
    run_alone(config, Folder(config.run.root) / config.run.id, "cpu", 0, from_scratch)


def go_back_when_fenced(world: World, config: Config) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    """Train until step 3, have another driver claim the run, and go back as after a spike: what is said, and every file of the
    run's folder before and after."""
    run = open_run(world, config)
    events = run.events(feed, lambda: None)
    for event in events:
        if isinstance(event, StepDone) and event.step == 3:
            break
    events.close()  # type: ignore[attr-defined]
    leases.claim(run.folder, "another driver")

    def files() -> dict[str, bytes]:
        return {name: run.folder.read(name) for name in run.folder.files()}

    before, said = files(), ""
    try:
        group_lease.go_back(config, run.data.skipping([OrderStep(2)]), run.lease)
    except RunExists as error:
        said = str(error)
    return said, before, files()
