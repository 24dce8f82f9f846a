"""A batch that a thread writes while the event loop serves its clients; and the checkpoint that it is written with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chatting import chat_run
from starlette.requests import Request

from springtide.errors import CheckpointError, ConfigError, StoreUnavailable
from springtide.generation import Part, Sampling, TextModel, TextRequest
from springtide.on_ray.serve import batches, replica
from springtide.on_ray.serve.batches import Batches, Waiting
from springtide.on_ray.serve.follow import Follower, Served, Source
from springtide.on_ray.serve.replica import Replica
from springtide.on_ray.serve.server import Serving
from springtide.run.text import open_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return open_text(chat_run(tmp_path_factory.mktemp("served")).folder.url)


def waiting(model: TextModel, tokens: int, streams: bool = True) -> Waiting:
    ids = tuple(model.prompt_ids("Add 3"))
    return Waiting(TextRequest(ids, tokens, Sampling(0), frozenset(), streams=streams))


class Clients:
    """Clients of a model's batches, and what each has got so far."""

    def __init__(
        self, model: Any, executor: ThreadPoolExecutor, max_batch: int = 8, batch_wait_s: float = 0.05
    ) -> None:
        self.batches = Batches(lambda: Served("a", model, 0.0), executor, max_batch, batch_wait_s)
        self.parts: list[list[Part]] = []

    async def ask(self, one: Waiting, gone_after: int = 10**9) -> list[Part]:
        """The parts of a text; the client goes away after ``gone_after`` of them."""
        parts: list[Part] = []
        self.parts.append(parts)
        async with contextlib.aclosing(self.batches.parts(one)) as coming:
            async for part in coming:
                parts.append(part)
                if len(parts) >= gone_after:
                    break
        return parts


def test_parts_come_while_the_batch_is_written_and_a_short_row_ends_before_a_long_one(model: TextModel) -> None:
    async def all_parts() -> tuple[list[list[Part]], list[int]]:
        with ThreadPoolExecutor(1) as executor:
            clients, ended = Clients(model, executor), []

            async def ask(number: int, tokens: int, streams: bool) -> list[Part]:
                parts = await clients.ask(waiting(model, tokens, streams))
                ended.append(number)
                assert number == 1 or len(clients.parts[1]) < 40
                return parts

            asked = enumerate(((3, True), (60, True), (5, False)))
            return await asyncio.gather(*(ask(number, *how) for number, how in asked)), ended

    rows, ended = asyncio.run(all_parts())
    assert len(rows[1]) > 5  # not all at the end
    assert len(rows[2]) == 1
    assert ended == [0, 2, 1]
    for parts, tokens in zip(rows, (3, 60, 5), strict=True):
        assert (parts[-1].num_tokens, parts[-1].ended) == (tokens, "length")
        assert "".join(part.text for part in parts) == model.generate(["Add 3"], tokens, Sampling(0))[0].text


def test_a_client_that_goes_away_takes_its_row_out(model: TextModel) -> None:
    async def ask() -> tuple[float, float]:
        with ThreadPoolExecutor(1) as executor:
            clients = Clients(model, executor)
            long, short = waiting(model, 150), waiting(model, 20)
            whole, cut = await asyncio.gather(clients.ask(short), clients.ask(long, gone_after=2))
            assert (whole[-1].num_tokens, long.is_gone) == (20, True)
            await asyncio.wrap_future(executor.submit(int))  # the thread is free again
            while not long.new_parts.empty():
                cut.append(long.new_parts.get_nowait() or cut[-1])
            return whole[-1].num_tokens, cut[-1].num_tokens

    assert asyncio.run(ask())[1] < 100


class Slow:
    """Stands in for ``answer``: a batch takes until it is let go; what the rows of each batch are."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.fails = False

    def __call__(self, _: Any, rows: Any, listen: Any, is_wanted: Any) -> None:
        self.sizes.append(len(rows))
        assert self.go.wait(60)
        if self.fails:
            raise CheckpointError("logits are not numbers")
        for row in range(len(rows)):
            listen(row, Part("x", 1, "length"))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(batches, "answer", found := Slow())
    return found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)  # between looks


REQUEST = TextRequest((1,), 1, Sampling(0), frozenset())


def test_requests_that_come_one_by_one_while_a_batch_is_written_make_the_next_batch(slow: Slow) -> None:
    async def ask() -> None:
        with ThreadPoolExecutor(1) as executor:
            clients = Clients(None, executor, max_batch=8, batch_wait_s=0.001)
            asked = [asyncio.create_task(clients.ask(Waiting(REQUEST)))]
            await until(lambda: slow.sizes == [1])
            for _ in range(11):
                asked.append(asyncio.create_task(clients.ask(Waiting(REQUEST))))
                await asyncio.sleep(0.003)  # longer than a batch waits for more
            asked[5].cancel()  # its client is gone
            await asyncio.wait(asked[5:6])
            slow.go.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(one) for one in found] == [list] * 5 + [asyncio.CancelledError] + [list] * 6
            assert slow.sizes == [1, 8, 2]
            await clients.ask(Waiting(REQUEST))  # after nobody had waited
            assert slow.sizes == [1, 8, 2, 1]

    asyncio.run(ask())


def test_a_batch_that_fails_fails_its_own_rows_and_the_next_one_is_written(slow: Slow) -> None:
    async def ask() -> None:
        with ThreadPoolExecutor(1) as executor:
            clients = Clients(None, executor)
            slow.fails = True
            slow.go.set()
            found = await asyncio.gather(*(clients.ask(Waiting(REQUEST)) for _ in "ab"), return_exceptions=True)
            assert [type(one) for one in found] == [CheckpointError] * 2
            slow.fails = False
            assert (await clients.ask(Waiting(REQUEST)))[-1].ended == "length"
            assert slow.sizes == [2, 1]

    asyncio.run(ask())


def post(body: bytes | None, path: str = "/v1/completions") -> Request:
    """A request; without a body, its client sends the headers and nothing more."""
    sent: list[bytes | None] = []

    async def receive() -> dict[str, Any]:
        if body is None or sent:
            await asyncio.Event().wait()
        sent.append(body)
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    return Request(scope, receive)


def test_bodies_that_do_not_come_wait_like_any_request_and_end(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = b'{"prompt": "Add 3", "max_tokens": 5, "temperature": 0}'

    async def ask() -> None:
        server = Replica(Source("run", lambda: "step-0000000007", lambda _: model), 4, 0.0, 3)
        stuck = [asyncio.create_task(server(post(None))) for _ in range(3)]
        await asyncio.sleep(0)
        refused = await server(post(good))
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        stuck[0].cancel()
        await asyncio.wait(stuck[:1])
        found = await server(post(good))
        text = json.loads(found.body)["choices"][0]["text"]
        assert (found.status_code, text) == (200, model.generate(["Add 3"], 5, Sampling(0))[0].text)
        late = await asyncio.gather(*stuck[1:])
        assert [one.status_code for one in late] == [408, 408]
        assert b"the body has not come within 2 s" in late[0].body
        assert (await server(post(b"["))).status_code == 400
        about: Any = server.state()
        assert about["data"][0]["springtide"]["waiting"] == 0

    monkeypatch.setattr(replica, "_BODY_S", 2.0)
    asyncio.run(asyncio.wait_for(ask(), 60))


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

    away = OSError("the store is away"), StoreUnavailable("the store is away"), ConfigError("3.9 GB free")
    for name, error in zip("def", away, strict=True):
        store.newest, store.bad[name] = name, error
        assert not follower.look()
        assert str(error) in follower.problem
        del store.bad[name]
        assert follower.look()  # a store or memory comes back
        assert (follower.served.checkpoint, follower.problem) == (name, "")

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
