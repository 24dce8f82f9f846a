"""A process that is gone, and one that is busy, slow, has ended, or speaks another protocol."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.ray.cluster import liveness
from springtide.ray.cluster.liveness import GONE_S, Liveness
from springtide.ray.cluster.nodes import mute


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None] | None) -> Iterator[tuple[str, int]]:
    """A port that accepts, as the kernel does for a stopped process, and does with a connection what ``answer`` says."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while answer is not None:
                    with listening.accept()[0] as connection:
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)


def settings(connection: socket.socket) -> None:
    """As a server of gRPC."""
    assert connection.recv(100).startswith(b"PRI * HTTP/2.0")
    connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))


def test_only_a_process_that_accepts_and_says_nothing_is_mute() -> None:
    with server(settings) as busy, server(None) as stopped, server(socket.socket.close) as secured:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            ended = closed.getsockname()
        asked = {"busy": busy, "stopped": stopped, "secured": secured, "ended": ended}
        assert mute(asked, 1.0) == {"stopped"}


def test_a_thousand_are_asked_in_a_second_or_two() -> None:
    with server(settings) as busy, server(None) as stopped:
        asked = {number: stopped if number % 100 == 7 else busy for number in range(1000)}
        assert mute(asked, 1.0) == {number for number in asked if number % 100 == 7}


class Processes:
    """Processes by name, some of which are stopped, on a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.stopped, self.looks = 0.0, set[str](), 0
        self.fails: Exception | None = None
        monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(liveness, "silent_processes", self._silent)

    def _silent(self, actors: Any) -> set[str]:
        self.looks += 1
        if self.fails:
            raise self.fails
        return self.stopped & set(actors)


def test_one_that_misses_every_look_for_nine_seconds_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, asked = Processes(monkeypatch), Liveness()
    names: Any = {"a": "", "b": ""}
    processes.stopped = {"b"}
    found = list[set[Any]]()
    for tenth in range(120):
        processes.now_s = tenth / 10
        found.append(asked.gone(names))
    assert [number for number, one in enumerate(found) if one] == list(range(int(GONE_S * 10), 120))
    assert found[-1] == {"b"}
    assert processes.looks == 4
    assert asked.gone({"a": ""}) == set()  # nobody waits for it any more


def test_one_answer_in_between_and_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, asked = Processes(monkeypatch), Liveness()
    names: Any = {"a": ""}
    for second in range(60):
        processes.now_s = float(second)
        processes.stopped = set() if 6 <= second % 9 < 9 else {"a"}
        assert asked.gone(names) == set()


def test_where_it_cannot_be_found_out_nobody_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    processes, asked = Processes(monkeypatch), Liveness()
    processes.stopped, processes.fails = {"a"}, OSError("too many open files")
    names: Any = {"a": ""}
    for second in range(60):
        processes.now_s = float(second)
        assert asked.gone(names) == set()
