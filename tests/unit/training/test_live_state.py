"""A rank whose group is lost offers the state after a whole step, or none; never what a step has left half done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from live_copies import Nodes
from loops import feed
from stepping import done_step
from torch import nn

from springtide.checkpoint import leases
from springtide.checkpoint.format import Meta, committed, name_of
from springtide.checkpoint.snapshot_parts import Snapshot
from springtide.checkpoint.staging import StagingBuffer
from springtide.checkpoint.tensors import local
from springtide.config import Config
from springtide.distributed import World
from springtide.distributed import world as world_of
from springtide.elastic import GroupRequest
from springtide.elastic.copies import LiveShard
from springtide.events import Left, Saved, Started, Stopped
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training import GroupContext, Part, TrainLoop
from springtide.training.live_state import LiveState
from springtide.training.part import Verdict
from springtide.training.sample import Closing

LOST = "the group is lost"


class Store:
    """Holds what it is given in this process."""

    def __init__(self) -> None:
        self.held: list[tuple[Snapshot, bytes]] = []

    def hold(self, snapshot: Snapshot, stage: StagingBuffer) -> None:
        self.held.append((snapshot, bytes(stage._bytes.numpy())))

    def keep(self, *_: Any) -> int:
        return 0

    def settled(self, handle: Any) -> bool:
        return True

    def forget(self, *_: Any) -> None:
        return None


@pytest.fixture
def world() -> Iterator[World]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield world_of("cpu")
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def config(tiny: Config) -> Config:
    return tiny.override(
        {"train.total": 6 * 12 * 64, "train.eval_tokens": 64, "train.eval_every": 3, "optim.warmup": 0}
    )


def begin(world: World, config: Config) -> tuple[TrainLoop, LiveState, Store]:
    store: Any = Store()
    folder = Folder(config.run.root) / config.run.id
    run = TrainLoop(config, world, open_data(config.data), folder, snapshot_store=store)
    return run, LiveState(run.state, world, run.described, store, config.checkpoint.stage), store


def watch(run: TrainLoop, live: LiveState, left: dict[int, tuple[str, dict[str, torch.Tensor]]]) -> None:
    """Train; add the chain and the tensors that each step leaves."""
    for event in run.events(feed, lambda: None, [live]):
        if event.kind == "step":
            left[event.step] = run.state.chain, {name: one.clone() for name, one in run.state.tensors().items()}


def half_an_update(run: TrainLoop, fail: Callable[[], None]) -> None:
    """The optimizer has changed some weights when the group is lost."""
    step = run.state.optimizer.step

    def torn(*arguments: Any) -> None:
        fail_at = run.state.step + 1
        if fail_at == 4:
            with torch.no_grad():
                next(iter(run.state.model.parameters())).add_(1.0)
            fail()
        step(*arguments)

    run.state.optimizer.step = torn  # type: ignore[method-assign, assignment]


def after_the_update(run: TrainLoop, fail: Callable[[], None]) -> None:
    """The weights are those of a step that nothing counts yet."""
    advance = run.state.advance

    def lost(*arguments: Any) -> None:
        if run.state.step + 1 == 4:
            fail()
        advance(*arguments)

    run.state.advance = lost  # type: ignore[method-assign]


def in_the_forward(run: TrainLoop, fail: Callable[[], None]) -> None:
    run.state.model.register_forward_pre_hook(
        lambda *_: fail() if run.state.step + 1 == 4 and torch.is_grad_enabled() else None
    )


def in_another_part(run: TrainLoop, fail: Callable[[], None]) -> None:
    """What it would say of a checkpoint is not complete: the guard's part may lack."""

    class First(Part):
        def after_step(self, done: Any) -> Any:
            if done.step == 4:
                fail()
            return iter(())

    run.setup.parts = [First(), *run.parts]


def in_an_evaluation(run: TrainLoop, fail: Callable[[], None]) -> None:
    run.state.model.register_forward_pre_hook(
        lambda *_: fail() if run.state.step == 3 and not torch.is_grad_enabled() else None
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("point", "step", "reduction"),
    [
        (half_an_update, None, "fp32"),
        (after_the_update, None, "fp32"),
        (in_another_part, None, "fp32"),
        (in_the_forward, 3, "fp32"),
        (in_the_forward, 3, "fp64"),  # under FSDP, which has the weights whole then
        (in_an_evaluation, 3, "fp32"),
    ],
)
def test_what_is_offered_is_the_state_after_a_whole_step_bit_for_bit(
    world: World,
    config: Config,
    point: Callable[[TrainLoop, Callable[[], None]], None],
    step: int | None,
    reduction: str,
) -> None:
    run, live, store = begin(world, config.override({"parallel.reduction": reduction}))

    def fail() -> None:
        raise ConnectionError(LOST)

    point(run, fail)
    left: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
    with pytest.raises(ConnectionError, match=LOST):
        watch(run, live, left)
    live.freeze()
    offer = live.offer([0])
    assert offer == (None if step is None else LiveShard(0, step, 0, 1))
    if step is None:
        return
    dist.destroy_process_group()  # as the process has, to be ready for another one
    live.deposit([0])
    [(snapshot, data)] = store.held
    chain, tensors = left[step]
    assert (snapshot.meta.step, snapshot.meta.chain, snapshot.num_survivors) == (step, chain, 1)
    assert {piece.tensor for piece in snapshot.pieces} == tensors.keys()
    for piece in snapshot.pieces:
        expected = local(tensors[piece.tensor]).reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[piece.begin : piece.begin + piece.size_bytes] == expected, piece.tensor


def begin_on_a_node(world: World, config: Config, node: Nodes) -> tuple[TrainLoop, LiveState]:
    """A group of a run that a driver holds, whose snapshots lie in the folder of a node."""
    store, folder = cast("Any", node), Folder(config.run.root) / config.run.id
    context = GroupContext(owner="a driver")
    run = TrainLoop(config, world, open_data(config.data), folder, snapshot_store=store, context=context)
    return run, LiveState(run.state, world, run.described, store, config.checkpoint.stage)


@pytest.mark.processes
@pytest.mark.parametrize("when", ["in the evaluation", "after the save"])
def test_a_group_lost_after_the_last_step_is_followed_by_one_that_saves_it_once(
    world: World, config: Config, tmp_path: Path, when: str
) -> None:
    config = config.override({"checkpoint.every_steps": 0, "train.sample_tokens": 0, "run.id": "run"})
    folder, node, last = Folder(config.run.root) / "run", Nodes(tmp_path / "nodes", [0], 0), config.num_steps
    leases.claim(folder, "a driver", trains=False)
    run, live = begin_on_a_node(world, config, node)

    def fail() -> None:
        raise ConnectionError(LOST)

    if when == "in the evaluation":
        run.state.model.register_forward_pre_hook(lambda *_: fail() if run.state.step == last else None)
    else:
        closing = next(part for part in run.parts if isinstance(part, Closing))
        closing.at_end = lambda verdict: fail()  # type: ignore[method-assign, return-value, assignment]
    with pytest.raises(ConnectionError, match=LOST):
        list(run.events(feed, lambda: None, [live]))
    live.freeze()
    assert live.offer([0])
    live.deposit([0])
    before = committed(folder)
    assert before == ([name_of(last)] if when == "after the save" else [])
    run, live = begin_on_a_node(world, config, node)
    events = list(run.events(feed, lambda: None, [live]))
    assert isinstance(events[0], Started)
    assert events[0].resumed_from == f"live copy of step {last}"
    assert [event.step for event in events if isinstance(event, Saved)] == [last] * (not before)
    assert committed(folder) == [name_of(last)]
    assert events[-1] == Stopped(step=last, status="finished", time_s=events[-1].time_s)


@pytest.mark.processes
def test_a_state_from_memory_is_saved_before_it_is_evaluated(world: World, config: Config, tmp_path: Path) -> None:
    """A group that begins at the last step: if evaluations are what ends the groups, the state must reach the store."""
    config = config.override({"checkpoint.every_steps": 0, "train.eval_every": 0, "run.id": "run"})
    folder, node, last = Folder(config.run.root) / "run", Nodes(tmp_path / "nodes", [0], 0), config.num_steps
    leases.claim(folder, "a driver", trains=False)
    for lost in range(2):
        run, live = begin_on_a_node(world, config, node)

        def fail() -> None:
            raise ConnectionError(LOST)

        run.state.model.register_forward_pre_hook(lambda *_, run=run: fail() if run.state.step == last else None)
        with pytest.raises(ConnectionError, match=LOST):
            list(run.events(feed, lambda: None, [live]))
        live.freeze()
        assert committed(folder) == [name_of(last)] * lost
        if not lost:
            live.deposit([0])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ask", "at", "kept_in"),
    [(GroupRequest.LEAVE, 4, "memory"), (GroupRequest.EVACUATE, 4, "store"), (GroupRequest.STOP, 6, "")],
)
def test_a_request_decides_where_the_last_state_goes(
    world: World, config: Config, tmp_path: Path, ask: GroupRequest, at: int, kept_in: str
) -> None:
    """In the last step time is short, too: the save comes before the evaluation."""
    run, _ = begin_on_a_node(world, config.override({"run.id": "run"}), Nodes(tmp_path / "nodes", [0], 0))
    leases.claim(run.folder, "a driver", trains=False)
    events = list(run.events(feed, lambda: ask if run.state.step + 1 == at else None))
    if kept_in:
        [left] = [event for event in events if isinstance(event, Left)]
        assert left.kept_in == kept_in
        return
    kinds = [event.kind for event in events]
    assert kinds.index("saved") < len(kinds) - 1 - kinds[::-1].index("evaluated")
    assert kinds[-1] == "stopped"


class Group:
    """The state of one rank of four, of which nothing is real but the order of events."""

    def __init__(self, copies: int = 2, device: str = "cpu") -> None:
        self.step, self.aborted = 0, threading.Event()
        self.optimizer = SimpleNamespace(state={})
        tensors = {"model/w": nn.Linear(2, 2).weight.detach()}
        state: Any = SimpleNamespace(optimizer=self.optimizer, tensors=lambda: tensors)
        world = World(3, 4, torch.device(device), SimpleNamespace(ndim=2, size=lambda axis: copies), self.aborted)  # type: ignore[arg-type]
        self.live = LiveState(state, world, lambda: (1, self.meta), Store(), "/dev/shm")  # type: ignore[arg-type]

    @property
    def meta(self) -> Meta:
        return Meta(step=self.step, tokens=1, world_size=4, order_identity="o", config_fingerprint="c")

    def train(self, verdict: Verdict = Verdict.CONTINUE) -> None:
        self.live.before_update()
        self.step += 1
        assert list(self.live.after_step(done_step(self.step, verdict=verdict))) == []


def test_a_group_offers_what_it_has_restored_before_its_first_step() -> None:
    """A second loss while it compiles, when what it was restored from is nowhere else any more."""
    group = Group(copies=2)
    group.live.offer_restored()
    assert group.live.offer([2, 3]) is None  # the run begins
    group.step, group.optimizer.state = 7, {"w": {}}
    group.live.offer_restored()
    assert group.live.offer([2, 3]) == LiveShard(3, 7, 1, 2)
    group.live.before_update()
    assert group.live.offer([2, 3]) is None


def test_a_rank_offers_its_shard_where_those_left_may_have_all_of_them() -> None:
    group = Group(copies=2)
    assert group.live.offer([2, 3]) is None  # before the first step
    group.train()
    assert group.live.offer([2, 3]) == LiveShard(3, 1, 1, 2)
    assert group.live.offer([1, 3]) is None  # shard 0 is lost
    assert Group(copies=1).live.offer([0, 1, 3]) is None


def test_a_step_that_is_to_be_rolled_back_and_one_that_ends_after_the_cut_are_not_offered() -> None:
    group = Group()
    group.train()
    group.train(Verdict.ROLL_BACK)
    assert group.live.offer(range(4)) is None
    group = Group()
    group.train()
    group.live.before_update()
    group.aborted.set()
    group.live.freeze()
    group.train()  # what an aborted collective has left
    assert group.live.offer(range(4)) is None


@pytest.mark.parametrize("is_done", [True, False])
def test_an_update_that_a_device_has_not_carried_out_before_the_abort_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    event = SimpleNamespace(record=lambda: None, query=lambda: is_done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    group = Group(device="cuda")
    group.train()
    group.live.freeze()
    assert (group.live.offer(range(4)) is not None) is is_done
