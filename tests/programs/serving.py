"""A model behind HTTP while its run trains: clients that ask without a pause, and a count of what they got.

python tests/programs/serving.py [REQUESTS [SWAPS]]     prints one object of JSON, and fails if a request was dropped
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from ports import reserve

import springtide as st
from springtide.app.serve import server
from springtide.config import Config, dump
from springtide.dist import world
from springtide.on_ray.serve.server import Serving
from springtide.run.folder import Run
from springtide.store import Folder
from springtide.stream import load, open_data
from springtide.track.journal import Journal
from springtide.training import TrainLoop

PROMPTS = ("def ", "import ", "class ", "return ", "    if ", "for ")
_TIMEOUT_S = 120.0


def train_to(config: Config, steps: int) -> Run:
    """Train, or train on, in this process until so many steps are committed."""
    config = config.override({"train.total": steps * config.tokens_per_step})
    run = Run(Folder(config.run.root) / config.run.id)
    run.write_config(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loop = TrainLoop(config, world("cpu"), open_data(config.data), run.folder)
        with Journal(run.folder) as journal:
            for event in loop.events(lambda reader, step: load(reader, reader.plan(step, steps, 2**22)), lambda: None):
                journal(event)
    finally:
        dist.destroy_process_group()
    return run


class Client:
    """One connection to a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._path = parts.path
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)

    def get(self, path: str) -> tuple[int, Any]:
        self.connection.request("GET", self._path + path)
        return self._read()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the answer; ``body``: JSON, or bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", self._path + path, data, {"Content-Type": "application/json"})
        return self._read()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """The events of a stream; the last one is ``[DONE]``."""
        data = json.dumps({**body, "stream": True}).encode()
        self.connection.request("POST", self._path + path, data, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"data: "):
                text = line[6:].strip().decode()
                yield text if text == "[DONE]" else json.loads(text)

    def _read(self) -> tuple[int, Any]:
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def close(self) -> None:
        self.connection.close()


@dataclasses.dataclass(frozen=True)
class Got:
    """What a client got for a request."""

    prompt: str
    status: int
    text: str
    checkpoint: str
    seconds: float


def ask_all(url: str, clients: int, goes_on: Callable[[list[Got]], bool], tokens: int = 12) -> list[Got]:
    """Clients that ask one request after the other, greedily, as long as ``goes_on`` of what they have got."""
    found: list[Got] = []

    def ask(number: int) -> None:
        client = Client(url)
        while goes_on(found):
            number += 1
            prompt, begin = PROMPTS[number % len(PROMPTS)], time.perf_counter()
            body = {"prompt": prompt, "max_tokens": tokens - number % 4, "temperature": 0}
            try:
                if number % 3:
                    status, answer = client.post("/completions", body)
                    text = answer["choices"][0]["text"] if status == 200 else str(answer)
                else:
                    *events, done = client.stream("/completions", body)
                    status, answer = 200 if done == "[DONE]" else 0, events[-1]
                    text = "".join(event["choices"][0]["text"] for event in events)
                checkpoint = answer.get("system_fingerprint", "")
            except (OSError, http.client.HTTPException, LookupError) as error:
                status, text, checkpoint = 0, repr(error), ""
                client.close()
            found.append(Got(f"{prompt}:{body['max_tokens']}", status, text, checkpoint, time.perf_counter() - begin))
        client.close()

    threads = [threading.Thread(target=ask, args=(7 * number,)) for number in range(clients)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def different_texts(run: Run, got: list[Got]) -> list[Got]:
    """Answers that the checkpoint which they name does not give in this process, one by one."""
    from springtide.checkpoint.format import step_of
    from springtide.generation import Sampling
    from springtide.run.text import text_model

    known: dict[tuple[str, str], str] = {}
    for name in sorted({one.checkpoint for one in got}):
        model = text_model(run, step_of(name))
        for asked in sorted({one.prompt for one in got if one.checkpoint == name}):
            prompt, _, tokens = asked.rpartition(":")
            known[name, asked] = model.generate([prompt], int(tokens), Sampling(0))[0].text
    return [one for one in got if known[one.checkpoint, one.prompt] != one.text]


@contextlib.contextmanager
def training(config: Config, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains a run without Ray."""
    (folder / "training.yaml").write_text(dump(config))
    command = [sys.executable, "-m", "springtide.training", "--config", str(folder / "training.yaml")]
    command.append("--accept-changes")  # it trains on from what is served first, to another end
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    here["MASTER_PORT"] = str(reserve(1)[0])
    with (folder / "training.log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | here, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def experiment(config: Config, folder: Path, requests: int, swaps: int, clients: int = 16) -> dict[str, Any]:
    """Serve a run while it trains, until ``requests`` are answered and ``swaps`` newer checkpoints have come to serve."""
    run = train_to(config, 2)
    config = run.config.override({"train.total": 4000 * config.tokens_per_step})
    how = Serving(port=reserve(1)[0], max_batch=clients, gpus=0.0)
    with server(run.folder.url, how, poll_s=1.0) as found, training(config, folder) as process:
        stop_s = time.monotonic() + 600

        def goes_on(got: list[Got]) -> bool:
            trains = process.poll() is None and time.monotonic() < stop_s
            return trains and (len(got) < requests or _swaps(got) < swaps)

        begin = time.monotonic()
        got = ask_all(found.url, clients, goes_on)
        seconds, trains = time.monotonic() - begin, process.poll() is None
        times = sorted(one.seconds for one in got)
    return {
        "requests": len(got),
        "dropped": len([one for one in got if one.status != 200]),
        "swaps": _swaps(got),
        "by_checkpoint": dict(sorted(collections.Counter(one.checkpoint for one in got).items())),
        "other_texts": len(different_texts(run, [one for one in got if one.status == 200])),
        "training_still_ran": trains,
        "seconds": round(seconds, 1),
        "p50_s": round(times[len(times) // 2], 3),
        "p99_s": round(times[len(times) * 99 // 100], 3),
    }


def _swaps(got: list[Got]) -> int:
    return len({one.checkpoint for one in got if one.status == 200}) - 1


def usual(folder: Path, **changes: Any) -> Config:
    """The config of the experiment: the tiny recipe below ``folder``, which keeps its checkpoints."""
    settings = {
        "run.id": "served",
        "run.root": str(folder / "runs"),
        "shards.root": str(folder / "datasets"),
        "optim.warmup": 0,
        "stream.max_epochs": 1000,
        "checkpoint.every_steps": 100,
        "checkpoint.keep_last": 1000,
        "track.mlflow_uri": "off",
        **changes,
    }
    return st.prepare(st.recipes.tiny().override(settings))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        asked = [int(text) for text in sys.argv[1:]] + [1000, 2][len(sys.argv) - 1 :]
        result = experiment(usual(Path(where)), Path(where), *asked)
    print(json.dumps(result))
    sys.exit(bool(result["dropped"] or result["other_texts"] or result["swaps"] < asked[1]))
