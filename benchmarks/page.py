"""What a run's page and the commands about a run cost on a long journal: a million steps of two sources, with restarts, saves
and evaluations.

    read      the journal, from the page cache of the system, by the reader that the page uses
    build     the page from what was read: charts, ledger, tables
    size      of the page
    status, list    as `springtide run` does them, with what they read
    look      one more look of `run status --follow`, at ten new steps

The journal is generated: lines as a run writes them, with other numbers. Each measurement is a fresh process; the best of all
rounds counts.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import claims

SEGMENT_LINES = 10_000
SOURCES = ("code", "prose")


def lines(steps: int, restarts: int) -> list[bytes]:
    """The lines of a journal: a restart every so often, which trains two steps again."""
    from springtide.events import Evaluated, Event, Saved, Started, StepDone
    from springtide.events.record import FORMAT, record

    def line(event: Event, **changes: Any) -> bytes:
        return json.dumps({"format": FORMAT, **record(event), **changes}).encode()

    noise, extra = (
        random.Random(0),
        {f"{what}/{name}": 1.0 for name in SOURCES for what in ("loss", "step_tokens", "epochs")},
    )
    common = {"grad_norm": 1.0, "learning_rate": 1e-3, "step_tokens": 8192, "data_wait_s": 0.001, "mfu": 0.4}
    one = StepDone(
        **{"step": 1, "loss": 1.0, "tokens": 0, "step_time_s": 0.25, "tokens_per_s": 32768.0, **common},  # type: ignore[arg-type]
        memory_bytes=2**30,
        world_size=8,
        digest="0123456789abcdef",
        term=1,
        extra=extra,
    )
    start = Started(step=1, world_size=8, term=1, num_parameters=10**9, peak_source="a device")  # type: ignore[arg-type]
    save = Saved(step=1, name="", size_bytes=2**30, save_time_s=2.0, term=1)  # type: ignore[arg-type]
    held_out = Evaluated(step=1, heldout_loss=1.0, heldout_bits_per_byte=1.0, rows=64, term=1)  # type: ignore[arg-type]
    fields = json.loads(line(one))
    found, now, every, step = [], 1.7e9, max(1, steps // restarts), 0
    found.append(line(start, step=0, time_s=now))
    while step < steps:
        step, now = step + 1, now + 0.25
        loss = math.nan if noise.random() < 1e-4 else 2 + 6 * step**-0.2 + noise.gauss(0, 0.05)
        of_sources = {f"loss/{name}": loss + at for at, name in enumerate(SOURCES)}
        fields |= {"step": step, "tokens": 8192 * step, "loss": loss if loss == loss else None, "time_s": round(now, 6)}
        fields["grad_norm"], fields["tokens_per_s"] = abs(noise.gauss(1, 0.2)), 32768 + noise.gauss(0, 500)
        fields["extra"] = extra | {name: value if loss == loss else None for name, value in of_sources.items()}
        found.append(json.dumps(fields).encode())
        if step % every == every - 1 and len(found) < 1.5 * steps:
            now += 5.0
            found.append(line(start, step=step - 2, world_size=4 + step % 5, time_s=now))
            step -= 2
            every_save = step // every
            found.append(line(save, step=step, name=f"step-{step:010d}", time_s=now + 0.1)) if every_save % 2 else None
            found.append(line(held_out, step=step, time_s=now + 0.2)) if every_save % 5 == 0 else None
            step, now = step + 2, now + 0.5
            found += [json.dumps(fields | {"step": step - 1 + at, "time_s": now + at / 4}).encode() for at in (0, 1)]
    return found


def written(root: str, steps: int, restarts: int) -> int:
    """Write a run with a journal; returns the size of that."""
    from springtide import config as configs
    from springtide.run.folder import Run
    from springtide.storage import Folder

    run = Run(Folder(root) / "long")
    run.write_config(configs.recipe("tiny").override({"run.id": "long", "run.root": root}))
    folder, found = Path(root) / "long" / "journal", lines(steps, restarts)
    folder.mkdir()
    for number, begin in enumerate(range(0, len(found), SEGMENT_LINES)):
        data = b"\n".join(found[begin : begin + SEGMENT_LINES]) + b"\n"
        (folder / f"0001-{number:04d}.jsonl").write_bytes(data)
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def page(root: str) -> dict[str, Any]:
    """Seconds, processor seconds and bytes of each part."""
    from springtide.run.folder import open_run
    from springtide.run.page_facts import facts_of
    from springtide.run.report.run_page import render
    from springtide.tracking.journal_reader import JournalReader

    run, found = open_run(f"{root}/long"), {}
    facts = facts_of(run)
    reader = JournalReader(run.folder)

    def measured(name: str, function: Any) -> Any:
        begin, cpu = time.perf_counter(), time.process_time()
        result = function()
        found[name], found[f"{name}_cpu"] = time.perf_counter() - begin, time.process_time() - cpu
        return result

    measured("read_s", reader.read)
    html = measured("build_s", lambda: render(run.id, reader.timeline, facts))
    return found | {"page_bytes": len(html), "restarts": html.count("restart: ")}


def status(root: str) -> dict[str, Any]:
    """Seconds of ``springtide run status``, and of another look of ``--follow`` when ten steps are new."""
    from rich.console import Console

    from springtide.cli.run import _Watcher
    from springtide.run.folder import open_run

    console, begin = Console(width=120), time.perf_counter()
    watcher = _Watcher(open_run(f"{root}/long"))
    watcher.look()
    watcher.table(watcher.status(), console)
    found = {"status_s": time.perf_counter() - begin}
    last = sorted((Path(root) / "long" / "journal").glob("*.jsonl"))[-1]
    fields = json.loads(next(line for line in reversed(last.read_text().splitlines()) if '"kind": "step"' in line))
    with last.open("a") as file:
        for _ in range(10):
            fields |= {"step": fields["step"] + 1, "time_s": fields["time_s"] + 0.25}
            file.write(json.dumps(fields) + "\n")
    begin = time.perf_counter()
    watcher.look()
    watcher.table(watcher.status(), console)
    return found | {"look_s": time.perf_counter() - begin}


def listed(root: str) -> dict[str, Any]:
    """Seconds of ``springtide run list``."""
    from springtide.run.run_status import overview

    begin = time.perf_counter()
    overview(root)
    return {"list_s": time.perf_counter() - begin}


def main() -> None:
    """Measure, and print the claims."""
    options = claims.options(__doc__, rounds=3, steps=(1_000_000, 20_000), restarts=(10_000, 200))
    with tempfile.TemporaryDirectory() as root:
        size = written(root, int(options.steps), int(options.restarts))
        each = (status, listed, page)
        rounds = [{k: v for one in each for k, v in claims.alone(one, root).items()} for _ in range(options.rounds)]
    best = {name: min(one[name] for one in rounds) for name in rounds[0]}
    detail = {"steps": int(options.steps), "restarts": int(options.restarts), "journal_mib": round(size / 2**20)}
    cpu = {name: round(best[f"{name}_cpu"], 2) for name in ("read_s", "build_s")}
    detail |= {"cpu": cpu, "peak_mib": round(best["peak_mib"])}
    shown = [
        claims.claim("page_build_s", best["build_s"], 3.0, "lower", detail),
        claims.claim("page_read_and_build_s", best["read_s"] + best["build_s"], 3.0, "lower", detail),
        claims.claim("page_mb", best["page_bytes"] / 1e6, 5.0, "lower", detail),
        *(claims.claim(f"run_{name}", best[name], 3.0, "lower", detail) for name in ("status_s", "list_s")),
        claims.claim("run_status_look_s", best["look_s"], 1.0, "lower", detail),
    ]
    claims.show(options, shown)


if __name__ == "__main__":
    main()
