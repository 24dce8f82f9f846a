"""A batch that a thread writes while the event loop serves its clients; and the checkpoint that it is written with."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chatting import chat_run

from springtide.errors import CheckpointError, ConfigError
from springtide.generation import Part, Sampling, TextModel, TextRequest
from springtide.on_ray.serve.follow import Follower, Source
from springtide.on_ray.serve.replica import Waiting, written
from springtide.on_ray.serve.server import Serving
from springtide.run.text import open_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return open_text(chat_run(tmp_path_factory.mktemp("served")).folder.url)


def waiting(model: TextModel, tokens: int, streams: bool = True) -> Waiting:
    ids = tuple(model.prompt_ids("Add 3"))
    return Waiting(TextRequest(ids, tokens, Sampling(0), frozenset(), streams=streams))


Lists = list[list[Any]]


async def lists(model: TextModel, batch: list[Waiting], gone_after: int = 10**9) -> Lists:
    """What ``written`` yields; the client of the last row goes away after so many of them."""
    found: Lists = []
    with ThreadPoolExecutor(1) as executor:
        async for some in written(model, batch, executor):
            found.append(some)
            batch[-1].is_gone = len(found) >= gone_after
    return found


def test_parts_come_while_the_batch_is_written_and_a_short_row_ends_before_a_long_one(model: TextModel) -> None:
    found = asyncio.run(lists(model, [waiting(model, 3), waiting(model, 60), waiting(model, 5, streams=False)]))
    assert len(found) > 5  # not all at the end
    rows = [[some[row] for some in found] for row in range(3)]
    ends = [row.index(StopAsyncIteration) for row in rows[::2]]
    assert max(ends) < len(found) - 3
    for row, tokens in zip(rows, (3, 60, 5), strict=True):
        parts = [part for part in row if isinstance(part, Part) and part.num_tokens]
        assert (parts[-1].num_tokens, parts[-1].ended) == (tokens, "length")
        assert "".join(part.text for part in parts) == model.generate(["Add 3"], tokens, Sampling(0))[0].text


def test_a_client_that_goes_away_takes_its_row_out(model: TextModel) -> None:
    found = asyncio.run(lists(model, [waiting(model, 20), waiting(model, 150)], gone_after=2))
    assert max(one[1].num_tokens for one in found if isinstance(one[1], Part)) < 100
    assert max(one[0].num_tokens for one in found if isinstance(one[0], Part)) == 20


def test_who_reads_no_more_ends_the_thread(model: TextModel) -> None:
    async def first() -> list[Waiting]:
        batch = [waiting(model, 150)]
        with ThreadPoolExecutor(1) as executor:
            parts = written(model, batch, executor)
            await anext(parts)
            await parts.aclose()  # type: ignore[attr-defined]
        return batch

    assert [one.is_gone for one in asyncio.run(first())] == [True]


class Checkpoints:
    """Checkpoints as a source sees them; those in ``bad`` cannot be read."""

    def __init__(self) -> None:
        self.newest: str | Exception = "a"
        self.bad: dict[str, Exception] = {}
        self.opened: list[str] = []

    def name(self) -> str:
        if isinstance(self.newest, Exception):
            raise self.newest
        return self.newest

    def open(self, name: str) -> Any:
        self.opened.append(name)
        if name in self.bad:
            raise self.bad[name]
        return f"model {name}"


def test_the_newest_checkpoint_serves_and_one_that_cannot_be_read_is_told() -> None:
    store = Checkpoints()
    follower = Follower(Source("run", store.name, store.open, 1.0))
    assert not follower.look()
    store.newest = "b"
    assert follower.look()
    assert follower.served[:2] == ("b", "model b")

    store.newest, store.bad["c"] = "c", CheckpointError("bytes are bad")
    assert not follower.look()
    assert not follower.look()
    assert follower.served.checkpoint == "b"
    assert follower.problem == "c cannot be read (bytes are bad); b goes on serving"
    assert store.opened.count("c") == 1  # its bytes stay as they are

    store.newest, store.bad["d"] = "d", OSError("the store is away")
    assert not follower.look()
    del store.bad["d"]
    assert follower.look()  # a store comes back
    assert (follower.served.checkpoint, follower.problem) == ("d", "")

    store.newest = OSError("the store is away")
    assert not follower.look()
    assert "the run's folder cannot be read" in follower.problem


def test_a_server_that_has_nothing_to_serve_does_not_start() -> None:
    store = Checkpoints()
    store.bad["a"] = CheckpointError("bytes are bad")
    with pytest.raises(CheckpointError):
        Follower(Source("run", store.name, store.open))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"replicas": (2, 1)}, "replicas = '2:1'"),
        ({"replicas": (0, 1)}, "replicas"),
        ({"max_batch": 0}, "max_batch = 0: must be at least 1"),
        ({"port": 0}, "port = 0"),
        ({"gpus": -1.0}, "gpus = -1"),
        ({"route": "x y"}, "route = 'x y'"),
    ],
)
def test_how_a_model_cannot_be_served_is_refused(how: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Serving(**how)
    assert Serving(route="/a/b").host == "127.0.0.1"  # this machine only, unless another is asked for
