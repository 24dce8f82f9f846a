"""What it is worth that requests share a batch: tokens per second of one server at 16 clients, with batches of 16 against 1.

Both servers are replicas of one Serve on a machine of two cores, one core each, of the same model, and are asked in
alternation; who is not asked computes nothing. Each client asks over its own connection, one request after the other. Weights
are random, and texts end at their length or, seldom, by chance: what counts is the tokens that were written.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))

import claims
from chatting import chat_run
from ports import reserve
from serving import PROMPTS, Client

from springtide.app.serve import server
from springtide.config import Config
from springtide.on_ray.cluster.session import cluster
from springtide.on_ray.serve.server import Serving

CLIENTS = 16
CPUS = 1
"""Of each server: with both cores its threads wait for each other at every layer while the proxy and the clients run."""
LARGE = {"num_layers": 8, "dim": 768, "num_heads": 12, "num_kv_heads": 4, "ffn_dim": 2048}


def tokens_per_s(url: str, requests: int, tokens: int) -> float:
    """Tokens that all clients get per second, ``requests`` requests each."""
    written: list[int] = []

    def ask(number: int) -> None:
        client = Client(url)
        for turn in range(requests):
            body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": tokens, "seed": 100 * turn + number}
            status, answer = client.post("/completions", body)
            assert status == 200, answer
            written.append(answer["usage"]["completion_tokens"])
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    begin = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(written) == CLIENTS * requests
    return sum(written) / (time.perf_counter() - begin)


def measure(rounds: int, requests: int, tokens: int, model: dict[str, int]) -> dict[str, list[float]]:
    """Tokens per second of each round, batched and single."""
    found: dict[str, list[float]] = {"batched": [], "single": []}
    size = {"elastic.max_workers": 2, "elastic.cpus_per_worker": CPUS}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = chat_run(Path(folder), **{f"model__{name}": value for name, value in model.items()})
        stack.enter_context(cluster(Config().override(size), dashboard=False))
        port, urls = reserve(1)[0], {}
        for name, rows in (("batched", CLIENTS), ("single", 1)):
            how = Serving(port=port, max_batch=rows, batch_wait_s=0.02, cpus=CPUS, gpus=0.0, route=f"/{name}")
            urls[name] = stack.enter_context(server(run.folder.url, how, step=7)).url
        for number in range(-1, rounds):
            for name, url in urls.items():
                rate = tokens_per_s(url, requests, tokens if number >= 0 else 2)  # first a round that warms up
                if number >= 0:
                    found[name].append(rate)
                    print(
                        json.dumps({"round": number, "server": name, "tokens_per_s": round(rate, 1)}), file=sys.stderr
                    )
    return found


def main() -> None:
    """Measure, and print the claim."""
    options = claims.options(__doc__, 3, requests=(1, 1), tokens=(64, 8))
    model: dict[str, Any] = {} if options.quick else LARGE
    found = measure(options.rounds, int(options.requests), int(options.tokens), model)
    ratio = statistics.median(a / b for a, b in zip(found["batched"], found["single"], strict=True))
    detail = {name: [round(rate, 1) for rate in rates] for name, rates in found.items()}
    claims.show(options, [claims.claim("batched_vs_single", ratio, 3.0, "higher", detail)])


if __name__ == "__main__":
    main()
