"""What the ranks of a hung group are doing is written down, if the store takes it, and the group is ended in any case."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.on_ray.train import hang


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two, of which the second does not answer."""
    ray = SimpleNamespace(wait=lambda asked, num_returns, timeout: (["stacks"], ["silent"]), get=lambda answer: answer)
    monkeypatch.setattr(hang, "ray", ray)
    return [
        SimpleNamespace(
            actor=SimpleNamespace(execute=SimpleNamespace(remote=lambda function, answer=answer: answer)),
            metadata=SimpleNamespace(node_id="node", pid=1),
        )
        for answer in ("stacks", "silent")
    ]


class Store:
    """A run's folder in a store."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.written, self.back = error, dict[str, str](), threading.Event()
        self.back.set()

    def __truediv__(self, name: str) -> Store:
        return self

    def write(self, name: str, text: str) -> None:
        """Wait until the store is back, and write or fail."""
        self.back.wait(60)
        if self.error:
            raise self.error
        self.written[name] = text


def test_the_stacks_are_written_and_the_silent_ones_named(workers: list[Any]) -> None:
    store: Any = Store()
    summary, silent = hang.diagnose(workers, store, 7)
    assert silent == workers[1:]
    [(name, text)] = store.written.items()
    assert summary == f"rank 1 on node node, pid 1 does not answer; their stacks are in hangs/{name}"
    assert "rank 0 on node node, pid 1\nstacks" in text


def test_a_store_that_is_away_does_not_keep_a_hung_group_alive(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    away: Any = Store(RuntimeError("botocore: Could not connect to the endpoint URL"))
    summary, silent = hang.diagnose(workers, away, 7)
    assert "could not be written: RuntimeError: botocore" in summary
    assert silent == workers[1:]
    slow: Any = Store()
    slow.back.clear()
    monkeypatch.setattr(hang, "_WRITE_S", 0.05)
    assert "still being written" in hang.diagnose(workers, slow, 7)[0]
    slow.back.set()
