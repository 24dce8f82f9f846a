"""What one GPU says of springtide, in seven stages, most valuable first; without Ray, from a checkout.

    smoke    the GPU tests; 50 steps of gpu_125m by torchrun, and a resume
    speed    tokens/s, MFU and joules of 125M, 1.3B and a stack of 8B's layers, against a bare loop on the same model
    groups   twenty process groups one after the other: memory clean, nothing compiled again
    kernels  attention, head loss and norms side by side; a node with compiled code of its run
    save     what staging and saving take, and what they cost the step beside them
    memory   what a step fills beside what was predicted, with what is left to the host; contexts and holes
    lanes    two workers against one with fp64 lanes: bit-equal or not, and its price

    python benchmarks/gpu [--quick] [--json] [--only smoke,speed] [--out FOLDER] [--seconds 1400] [--force] [--tables]

Each stage runs in a process of its own, under its own limit, and writes FOLDER/STAGE.json after every cell; run again, measured
cells of the same code, torch and device are left out. Without a GPU every stage runs on tiny shapes and says what it skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
STAGES = {"smoke": 230, "speed": 400, "groups": 170, "kernels": 240, "save": 155, "memory": 55, "lanes": 230}
"""Stage -> its most seconds; together under 25 minutes."""
GRACE = 0.85
"""Of those, after which a stage begins no further cell."""
LEAVING_S = 8.0
LONGEST = 40
"""Characters of a value that a table shows; the rest is in the JSON."""


def main() -> int:
    """Run the stages asked for, or, as a child, one of them."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions: a smoke test, no evidence")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, comma between")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--seconds", type=float, default=float(sum(STAGES.values())), help="for all stages together")
    parser.add_argument("--force", action="store_true", help="measure again what is measured")
    parser.add_argument(
        "--tables", action="store_true", help="print the tables of what is in the folder, measure nothing"
    )
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        return one(options)
    names = options.only.split(",")
    if unknown := set(names) - STAGES.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}: there are {', '.join(STAGES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    status = 0
    if not options.tables:
        began = time.monotonic()
        for name in STAGES:
            left = options.seconds - (time.monotonic() - began)
            if name in names:
                status |= run(name, min(STAGES[name], left), options)
    found = {name: json.loads(path.read_text()) for name in STAGES if (path := options.out / f"{name}.json").exists()}
    text = tables(found)
    (options.out / "tables.md").write_text(text)
    print(text)
    if options.json:
        claims = [claim for stage in found.values() for claim in stage["claims"]]
        quick = any(stage["quick"] for stage in found.values())
        print(json.dumps({"quick": quick, "claims": claims, "stages": {name: state(found[name]) for name in found}}))
    return status


def run(name: str, seconds: float, options: argparse.Namespace) -> int:
    """One stage in a process of its own, ended when its time is over; 0 when it finished."""
    if seconds < 10:
        print(f"{name}: left out: the time is spent", flush=True)
        return 1
    command = [sys.executable, str(HERE), "--stage", name, "--out", str(options.out), "--seconds", str(GRACE * seconds)]
    command += [flag for flag in ("--quick", "--force") if getattr(options, flag[2:])]
    # the GPU machine need not have springtide installed: this checkout, then wheels that were brought along
    path = [str(REPOSITORY / "platform"), str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    # a session of its own, so that torchrun and its ranks end with it
    with subprocess.Popen(command, env=environment, start_new_session=True, cwd=REPOSITORY) as process:
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"{name}: ended after {seconds:.0f} s", flush=True)
            status = 1
        finally:
            end(process)
    print(f"{name}: {'finished' if status == 0 else 'not finished'} in {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if status else 0


def end(process: subprocess.Popen[bytes]) -> None:
    """End all of its session; torchrun has its ranks in sessions of their own, and ends them when it is asked to."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + LEAVING_S
        while time.monotonic() < deadline:
            process.poll()  # so that it is not there only for us to hear of
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)


def one(options: argparse.Namespace) -> int:
    """The stage of this process."""
    sys.path.insert(0, str(HERE.parent))  # for claims.py
    import torch
    from measure import CUDA, Book

    if not CUDA:
        torch.set_num_threads(1)  # on a busy machine the threads of a tiny product wait for each other

    book = Book(options.stage, options.out, options.quick, options.seconds, options.force)
    if book.finished:
        print(f"{options.stage}: left out: it finished with this code, torch and device; --force runs it again")
        return 0
    return book.end(importlib.import_module(options.stage).measure(book))


def state(stage: dict[str, Any]) -> dict[str, Any]:
    """A stage in short: whether it finished, and cells by status, with the reasons of those that were not measured."""
    found: dict[str, Any] = {"finished": stage["finished"], "measured": []}
    for name, cell in stage["cells"].items():
        if cell["status"] == "measured":
            found["measured"].append(name)
        else:
            found.setdefault(cell["status"], {})[name] = cell["why"]
    return found


def tables(stages: dict[str, dict[str, Any]]) -> str:
    """All cells as Markdown, a table for each group of them; then what was not measured, and why."""
    lines = []
    for name, stage in stages.items():
        about = ", ".join(f"{key} {value}" for key, value in stage["facts"].items())
        lines += [f"### {name}{' (--quick: no evidence)' if stage['quick'] else ''}", "", about, ""]
        groups: dict[str, dict[str, dict[str, Any]]] = {}
        for key, cell in stage["cells"].items():
            if cell["status"] == "measured":
                group, _, which = key.partition("/")
                groups.setdefault(group, {})[which or group] = cell["values"]
        for group, rows in groups.items():
            columns = list(dict.fromkeys(key for row in rows.values() for key in row if _is_short(row[key])))
            lines += [f"| {group} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
            lines += [
                f"| {which} | {' | '.join(_shown(row.get(column, '')) for column in columns)} |"
                for which, row in rows.items()
            ]
            lines.append("")
        for key, cell in stage["cells"].items():
            if cell["status"] != "measured":
                lines.append(f"- {key}: {cell['status']}: {' '.join(cell['why'].split())[:300]}")
        for claim in stage["claims"]:
            holds = "met" if claim["holds"] else "missed"
            lines.append(
                f"- {claim['name']}: {claim['value']}, goal {claim['goal']} {holds} ({claim['better']} is better)"
            )
        lines.append("")
    return "\n".join(lines)


def _is_short(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
