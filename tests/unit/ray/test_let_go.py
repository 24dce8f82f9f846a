"""A worker's process is made ready for another group, in a process group of one and with NCCL's part of it faked: a collective
that waits until it is aborted, and then returns without raising."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from springtide.config import recipes
from springtide.distributed import CollectiveError, CutOff, World, collectives, process_group, sum_over_ranks, world
from springtide.elastic.copies import LiveShard
from springtide.ray.train import worker
from springtide.ray.train.job import TrainJob


class Nccl:
    """What of it a test needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aborted, self.waits, self.did = threading.Event(), threading.Event(), []
        self._destroy = dist.destroy_process_group
        monkeypatch.setattr(collectives, "_uses_nccl", lambda: True)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", self.abort)
        monkeypatch.setattr(dist, "destroy_process_group", self.destroy)

    def all_reduce(self, message: torch.Tensor) -> None:
        """Waits for a peer that is gone."""
        self.waits.set()
        assert self.aborted.wait(30)

    def abort(self) -> None:
        """Torch's: the group is gone with it."""
        self.did.append("abort, flag " + ("set" if worker._LET_GO.is_set() else "NOT set"))
        self._destroy()
        self.aborted.set()

    def destroy(self) -> None:
        """Of a group with work in flight, it never returns."""
        self.did.append("destroy")
        assert self.aborted.is_set() or not self.waits.is_set(), "would wait for ever"
        self._destroy()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    """In a group of one process; the worker's state is a new process's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(worker, "_links", None)
    worker._LET_GO.clear()
    try:
        yield Nccl(monkeypatch)
    finally:
        monkeypatch.undo()
        worker._clean, worker._live = True, None
        if dist.is_initialized():
            dist.destroy_process_group()


def start(monkeypatch: pytest.MonkeyPatch, train: Any) -> tuple[threading.Thread, list[BaseException]]:
    """``worker.work`` in a thread, as Ray runs it, with ``train`` in the place of the loop; and what it raises."""
    raised: list[BaseException] = []
    monkeypatch.setattr(worker, "_train", train)

    def run() -> None:
        try:
            worker.work(TrainJob(recipes.tiny(), mailbox=None))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_rank_that_waits_in_nccl_is_released_in_process(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    """A rank that waits in NCCL is released in process and uses nothing of what came back."""
    here: World = world("cpu", aborted=worker._LET_GO)
    thread, raised = start(monkeypatch, lambda job: sum_over_ranks(torch.ones(3), here))
    assert nccl.waits.wait(30)
    assert worker.let_go(30.0)
    thread.join()
    assert [type(error) for error in raised] == [CutOff]
    assert nccl.did == ["abort, flag set"]
    assert not dist.is_initialized()


def test_a_failed_rank_leaves_a_group_that_still_waits(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    """A rank that failed by itself leaves a group in which others still wait.

    Its lock is free; its kernels may be in flight."""

    def train(job: TrainJob) -> bool:
        nccl.waits.set()
        raise torch.OutOfMemoryError("CUDA out of memory")

    thread, _ = start(monkeypatch, train)
    thread.join()
    assert worker.let_go(30.0)
    assert nccl.did == ["abort, flag set"]


def test_a_group_that_left_is_destroyed_as_usual(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    began = threading.Event()

    def train(job: TrainJob) -> bool:
        began.set()
        return True

    thread, raised = start(monkeypatch, train)
    assert began.wait(30)
    while not worker._clean:  # until it has left
        thread.join(0.01)
    assert worker.let_go(30.0)
    thread.join()
    assert raised == []
    assert nccl.did == ["destroy"]


def test_without_ray_a_group_that_failed_is_aborted(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: None)  # there is one
    nccl.waits.set()
    with pytest.raises(torch.OutOfMemoryError), process_group("cpu"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert [did.split(",")[0] for did in nccl.did] == ["abort"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", ["SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"])
def test_a_broken_communicator_of_another_group_spoils_the_step(
    monkeypatch: pytest.MonkeyPatch, nccl: Nccl, error: str
) -> None:
    """Gradients are summed over the groups of a mesh; one of them may break where the step's message goes through."""

    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(get_error=lambda: ErrorType.__members__[error])

    here: World = world("cpu")
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, Group(), None)
    nccl.aborted.set()  # the message itself is right
    if error in ("SUCCESS", "TIMEOUT"):
        assert sum_over_ranks(torch.ones(2), here) == [1.0, 1.0]
    else:
        with pytest.raises(CollectiveError, match=f"rank 0 .*{error}"):
            sum_over_ranks(torch.ones(2), here)


def test_a_torch_that_cannot_abort_is_not_asked_to(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_abort_process_group")
    assert not collectives.abort()


@pytest.mark.parametrize(("held_mib", "free"), [(0, True), (64, True), (65, False)])
def test_a_process_whose_device_is_not_empty_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, nccl: Nccl, held_mib: int, free: bool
) -> None:
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held_mib << 20)
    assert worker.let_go(30.0) is free
    assert emptied == [True]


class Live:
    """What a rank still has of its group's state."""

    def __init__(self, did: list[str], offer: LiveShard | None, problem: str = "") -> None:
        self.did, self._offer, self._problem = did, offer, problem

    def freeze(self) -> None:
        self.did.append("freeze")

    def offer(self, survivors: Any) -> LiveShard | None:
        self.did.append(f"offer to {list(survivors)}")
        return self._offer

    def deposit(self, ranks: Any) -> None:
        self.did.append(f"deposit among {list(ranks)}")
        if self._problem:
            raise OSError(self._problem)


@pytest.mark.parametrize("problem", ["", "no room"])
def test_a_rank_keeps_its_offer_until_it_is_settled(monkeypatch: pytest.MonkeyPatch, nccl: Nccl, problem: str) -> None:
    """A rank keeps what it offers until it is settled and is ready then whatever happens."""
    offer = LiveShard(1, 8, 0, 1)

    def train(job: TrainJob) -> bool:
        worker._live = Live(nccl.did, offer, problem)  # type: ignore[assignment]
        nccl.waits.set()
        raise ConnectionError("a peer is lost")

    thread, _ = start(monkeypatch, train)
    thread.join()
    assert worker.let_go(30.0, [1, 2]) == offer
    assert worker._live is not None
    # no later step counts from before the abort on: what that releases is garbage
    assert nccl.did == ["freeze", "abort, flag set", "offer to [1, 2]"]
    assert worker.settle([1, 2])
    assert nccl.did[3:] == ["deposit among [1, 2]"]
    assert worker._live is None


def test_a_rank_without_a_whole_state_gives_it_up(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    """A rank whose state is not whole among those left gives it up at once."""
    worker._live = Live(nccl.did, None)  # type: ignore[assignment]
    assert worker.let_go(30.0, [1]) is True
    assert worker._live is None
    worker._live = Live(nccl.did, LiveShard(1, 8, 0, 1))  # type: ignore[assignment]
    assert worker.settle(()) is True  # others have it
    assert worker._live is None
    assert "deposit" not in " ".join(nccl.did)


def test_a_group_that_left_or_that_trains_anew_offers_nothing(monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    worker._live = Live(nccl.did, LiveShard(1, 8, 0, 1))  # type: ignore[assignment]
    seen: list[Any] = []
    began = threading.Event()

    def train(job: TrainJob) -> bool:
        began.set()
        seen.append(worker._live)
        worker._live = Live(nccl.did, LiveShard(1, 9, 0, 1))  # type: ignore[assignment]
        return True

    thread, _ = start(monkeypatch, train)
    assert began.wait(30)
    while not worker._clean:  # until it has left
        thread.join(0.01)
    assert worker.let_go(30.0, [0]) is True
    thread.join()
    assert seen == [None]
