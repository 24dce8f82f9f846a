"""A trained run behind HTTP: what clients get, and that a newer checkpoint takes over without one of them noticing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import reserve
from serving import Client, ask_all, different_texts, train_to

from springtide.app.serve import server
from springtide.config import Config
from springtide.on_ray.serve.server import Serving

pytestmark = pytest.mark.cluster
PROGRAM = Path(__file__).parents[1] / "programs" / "serving.py"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # between looks


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_is_served_and_a_newer_checkpoint_takes_over_while_requests_are_under_way(tiny: Config) -> None:
    config = tiny.override(
        {"run.id": "served", "checkpoint.every_steps": 4, "checkpoint.keep_last": 9, "optim.warmup": 0}
    )
    run = train_to(config, 4)
    how = Serving(port=reserve(1)[0], max_batch=4, gpus=0.0)
    with server(run.folder.url, how, poll_s=0.1) as found:
        client = Client(found.url)
        check_answers(client, run.generate("def ", 9, temperature=0)[0].text)
        check_refusals(client)
        check_a_client_that_goes_away(found.url)

        stop = threading.Event()
        got = []
        asking = threading.Thread(target=lambda: got.extend(ask_all(found.url, 6, lambda _: not stop.is_set())))
        asking.start()
        try:
            train_to(config, 8)
            until(lambda: found.state().get("step") == 8)
            answered = found.state()["answered"]
            until(lambda: found.state()["answered"] > answered + 12)
        finally:
            stop.set()
            asking.join()
        assert {one.status for one in got} == {200}, [one for one in got if one.status != 200]
        assert {one.checkpoint for one in got} == set(run.checkpoints) == {"step-0000000004", "step-0000000008"}
        assert different_texts(run, got) == []

        damaged = Path(run.folder.url) / "checkpoints" / "step-0000000009"
        damaged.mkdir()
        (damaged / "COMMITTED").write_text("{}")
        until(lambda: bool(found.state().get("problem")))
        assert "step-0000000009 cannot be read" in found.state()["problem"]
        assert client.post("/completions", {"prompt": "def "})[1]["system_fingerprint"] == "step-0000000008"


def check_answers(client: Client, expected: str) -> None:
    status, models = client.get("/models")
    assert (status, models["data"][0]["id"], models["data"][0]["springtide"]["step"]) == (200, "served", 4)
    asked = {"model": "served", "prompt": "def ", "max_tokens": 9, "temperature": 0}
    status, whole = client.post("/completions", asked)
    assert (status, whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (200, expected, "length")
    assert whole["usage"]["completion_tokens"] == 9
    *events, done = client.stream("/completions", asked)
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    stop = expected[3:5]
    choice = client.post("/completions", {**asked, "stop": [stop]})[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected[: expected.index(stop)], "stop")
    drawn = [client.post("/completions", {**asked, "temperature": 1, "seed": 3})[1]["choices"][0]["text"] for _ in "ab"]
    assert drawn[0] == drawn[1]


def check_refusals(client: Client) -> None:
    user = [{"role": "user", "content": "Hi"}]
    for path, body, status, told in (
        ("/chat/completions", {"messages": user}, 400, "corpus.chat_template"),
        ("/completions", {"prompt": "x", "model": "other"}, 404, "its name is served"),
        ("/completions", {"prompt": "x" * 5000}, 400, "tokens"),
        ("/completions", {"prompt": "x", "max_tokens": 10**6}, 400, "at most"),
        ("/completions", b"[" * 50_000, 400, "nested"),
        ("/completions", b'{"prompt": "' + b"x" * 2**20 + b'"}', 413, "more than"),
        ("/embeddings", {"input": "x"}, 404, "no such path"),
    ):
        found = client.post(path, body)
        assert found[0] == status, found
        assert told in found[1]["error"]["message"]


def check_a_client_that_goes_away(url: str) -> None:
    counts = Client(url)

    def is_noticed() -> bool:
        client = Client(url)
        next(client.stream("/completions", {"prompt": "d", "max_tokens": 50, "temperature": 1}))
        client.close()
        about = counts.get("/models")[1]["data"][0]["springtide"]
        return about["abandoned"] > 0 and about["waiting"] == 0

    until(is_noticed)


@pytest.mark.full
def test_a_thousand_requests_while_training_goes_on_and_two_swaps() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["dropped"], found["other_texts"], found["training_still_ran"]) == (0, 0, True)
    assert found["requests"] >= 1000
    assert found["swaps"] >= 2
