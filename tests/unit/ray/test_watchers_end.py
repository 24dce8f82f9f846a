"""The watchers of a run end with its controller, not when its objects happen to be collected. No cluster."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.config import recipes
from springtide.ray.cluster import watchers
from springtide.ray.cluster.watchers import PreemptionWatchers
from springtide.ray.train import ray_adapter

NODES = ("a" * 56, "b" * 56)


@pytest.mark.parametrize("error", [None, RuntimeError("a controller that fails")], ids=["finished", "failed"])
def test_the_watchers_of_a_run_end_with_it(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    killed = list[str]()
    actors = iter(SimpleNamespace(node=node, silent=SimpleNamespace(remote=object)) for node in NODES)
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(actors)))
    fake = SimpleNamespace(
        remote=lambda _: options, wait=lambda *_, **__: ([], []), kill=lambda one: killed.append(one.node)
    )
    monkeypatch.setattr(watchers, "ray", fake)
    watches = PreemptionWatchers("off", "", "", False, lambda node, left: None)

    class Controller:
        """One that covers two nodes and ends."""

        def __init__(self, *_: object, **__: object) -> None:
            watches.cover(set(NODES))

        async def run(self) -> None:
            if error:
                raise error

        def get_result(self) -> None:
            return None

    for name in ("SpringtideFailurePolicy", "SpringtideScalingPolicy"):
        monkeypatch.setattr(ray_adapter, name, lambda *_: None)
    monkeypatch.setattr(ray_adapter, "Controller", Controller)
    monkeypatch.setattr(ray_adapter, "run_as_actor", lambda _: contextlib.nullcontext())
    trainer: Any = object.__new__(ray_adapter.SpringtideTrainer)
    trainer.__dict__.update(run_config=SimpleNamespace(failure_config=None), scaling_config=None)
    trainer._bounds, trainer._watches = SimpleNamespace(worker_multiple=1), watches
    trainer._job = SimpleNamespace(config=recipes.tiny(), mailbox=SimpleNamespace(actor=None))
    trainer._workers = SimpleNamespace(processes=None, is_alone=False)
    if error:
        with pytest.raises(RuntimeError, match="fails"):
            trainer._initialize_and_run_controller(callbacks=[])
    else:
        trainer._initialize_and_run_controller(callbacks=[])
    assert sorted(killed) == list(NODES)
