"""What one GPU tells about springtide, in stages of at most 150 seconds, most valuable first; without Ray, from a checkout.

    smoke          the GPU tests; 20 steps of gpu_125m by torchrun, and a resume
    fp8            fp8 with one scale a tensor against bf16: tokens/s at 8B's shape, 60 steps of loss at 125M
    fp8_rowwise    the same with one scale a row
    whole_8b       all 32 layers of 8B: does it fit, tokens/s, memory against its prediction
    documents      eight documents a row kept apart by FlexAttention, inside the step
    head_loss      the head's loss with its compiled part, inside the step, at 1.3B and 125M
    deterministic  deterministic kernels with fp64 sums, run twice: bit-equal or not, and the price
    saves          1.3B with a save every 20 steps: the stall of each, skipped saves counted
    lora           LoRA of 8B's shape against PEFT

    python benchmarks/gpu [--quick] [--json] [--only smoke,fp8] [--out FILE] [--seconds 570] [--force] [--tables]

Each stage is a process of its own, and starts only if its time is left: what it took before on this device, else an
estimate. Results go into one JSON file after every cell. A later call goes on where this one stopped, and skips a stage that
was measured with the same code (keys.py), torch and device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from keys import HERE, REPOSITORY, key_of


@dataclasses.dataclass(frozen=True)
class Stage:
    """One comparison."""

    estimate_s: float
    """What it should take on an H200, guessed from earlier measurements until it has run [s]."""
    file: str = ""
    """Its module, if it is not called as the stage."""
    programs: tuple[str, ...] = ()
    """Modules that it starts in other processes."""


STAGES = {
    "smoke": Stage(120, programs=("springtide.training.__main__",)),
    "fp8": Stage(140, file="eight_bits"),
    "fp8_rowwise": Stage(110, file="eight_bits"),
    "whole_8b": Stage(110),
    "documents": Stage(90),
    "head_loss": Stage(110),
    "deterministic": Stage(60),
    "saves": Stage(120),
    "lora": Stage(90),
}
"""Stage -> its time and file, most valuable first."""
LIMIT_S = 150.0
"""A stage is ended after so long."""
GRACE = 0.85
"""Share of its time after which a stage begins no further cell."""
STARTING_S = 10.0
"""A process takes so long to import torch and find the device."""
LEAVING_S = 8.0
LONGEST = 40
"""Characters of a value that a table shows; the rest is in the JSON."""
NO_GPU = "no GPU here, so nothing is measured; --quick runs every stage on tiny shapes"


def main() -> int:
    """Run the stages asked for, or, as a child, one of them."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes or few repetitions: a smoke test, no evidence"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, comma between")
    parser.add_argument("--out", type=Path, help="file of the results (benchmarks/results/gpu.json)")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all stages together")
    parser.add_argument("--force", action="store_true", help="measure again what is measured")
    parser.add_argument("--tables", action="store_true", help="print the tables of the results, measure nothing")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--key", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is None:
        options.out = HERE / "quick.json" if options.quick else HERE.parent / "results" / "gpu.json"
    if options.stage:
        return one(options)
    names = options.only.split(",")
    if unknown := set(names) - STAGES.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}: there are {', '.join(STAGES)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    status, left_out = (0, {}) if options.tables else measure(names, options)
    found = read(options.out)
    print(tables(found))
    for name, why in left_out.items():
        print(f"- {name}: left out: {why}")
    if options.json:
        claims = [claim for stage in found.values() for claim in stage["claims"]]
        states = {name: state(found[name]) for name in STAGES if name in found}
        print(json.dumps({"quick": options.quick, "claims": claims, "stages": states, "left_out": left_out}))
    return status


def measure(names: list[str], options: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """Run the stages ``names`` one after the other. Returns the exit status, 1 if a stage failed or was left out, and why the
    stages that were left out were."""
    end = time.monotonic() + options.seconds
    here = machine()
    if here["device"] == "cpu" and not options.quick:
        print(NO_GPU, file=sys.stderr)
        return 3, {}
    status, left_out = 0, {}
    for name in (name for name in STAGES if name in names):
        key = key_of(HERE / f"{STAGES[name].file or name}.py", STAGES[name].programs)
        known = {} if options.force else read(options.out).get(name, {})
        is_same = all(known.get(what) == value for what, value in identity(key, here, options.quick).items())
        if is_same and known["finished"]:
            print(f"{name}: stands: measured on {known['date']} with this code, torch and device", flush=True)
            continue
        needs_s, left_s = needed(STAGES[name], known, here["device"], is_same), end - time.monotonic()
        if needs_s > left_s:
            left_out[name] = f"needs about {needs_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
            print(f"{name}: left out: {left_out[name]}", flush=True)
            status = 1
            continue
        status |= run(name, key, min(LIMIT_S, left_s), options)
    return status, left_out


def needed(stage: Stage, known: dict[str, Any], device: str, is_same: bool) -> float:
    """Return what a stage will take: what it took on this device before, whatever the code, else the estimate; less what its
    cells of the same code have taken already [s].

    Args:
        stage: the stage.
        known: what the file of results has of it; empty if nothing.
        device: this one's name.
        is_same: whether ``known`` is of this code, torch and device, so that its cells stay.
    """
    measured = known.get("device") == device and known.get("finished") and not known.get("quick")
    whole_s = float(known["seconds"]) if measured else stage.estimate_s
    done_s = float(known["seconds"]) if is_same and not measured else 0.0
    return max(STARTING_S, whole_s - done_s)


def machine() -> dict[str, str]:
    """Return the names of torch's version and of the device, which a process of its own finds: this one never loads torch."""
    program = (
        "import torch\nprint(torch.__version__)\n"
        "print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    torch_version, device = done.stdout.splitlines()[-2:]
    return {"torch": torch_version, "device": device}


def identity(key: str, here: dict[str, str], quick: bool) -> dict[str, Any]:
    """Return what a stage's results must agree with to stand."""
    return {"key": key, **here, "quick": quick}


def environment() -> dict[str, str]:
    """Return the variables of a child: this checkout, then wheels that were brought along, before the machine's packages."""
    path = [str(REPOSITORY / "platform"), str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}


def run(name: str, key: str, seconds: float, options: argparse.Namespace) -> int:
    """Run one stage in a process of its own, which is ended after ``seconds``; return 0 if it finished."""
    command = [sys.executable, str(HERE), "--stage", name, "--key", key, "--out", str(options.out)]
    command += ["--seconds", str(GRACE * seconds)]
    command += [flag for flag in ("--quick", "--force") if getattr(options, flag[2:])]
    begin = time.monotonic()
    # a session of its own, so that torchrun and its ranks end with it
    with subprocess.Popen(command, env=environment(), start_new_session=True, cwd=REPOSITORY) as process:
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
            process.poll()  # reaps it: a zombie would still answer signal 0
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)


def one(options: argparse.Namespace) -> int:
    """Run the stage of this process."""
    sys.path.insert(0, str(HERE.parent))  # for claims.py
    import torch
    from measure import CUDA, Book

    if not CUDA:
        torch.set_num_threads(1)  # on a busy machine the threads of a tiny product wait for each other
    book = Book(options.stage, options.key, options.out, options.quick, options.seconds, options.force)
    return book.end(importlib.import_module(STAGES[options.stage].file or options.stage).measure(book))


def read(out: Path) -> dict[str, Any]:
    """Return the file of results: stage -> its results; empty if there is none."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found


def state(stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stage in short: whether it finished, and cells by status, with the reasons of those that were not measured."""
    found: dict[str, Any] = {"finished": stage["finished"], "measured": []}
    for name, cell in stage["cells"].items():
        if cell["status"] == "measured":
            found["measured"].append(name)
        else:
            found.setdefault(cell["status"], {})[name] = cell["why"]
    return found


def tables(stages: dict[str, dict[str, Any]]) -> str:
    """Return all cells as Markdown, a table for each stage; below it what was not measured and why, and the claims."""
    lines = []
    for name in (name for name in STAGES if name in stages):
        stage = stages[name]
        about = ", ".join(f"{key} {value}" for key, value in stage["facts"].items())
        title = f"### {name}, {stage['date']}{' (--quick: no evidence)' if stage['quick'] else ''}"
        lines += [title, "", f"{about}, {stage['seconds']:.0f} s", ""]
        rows = {
            key if len(values) == 1 else f"{key}: {which}": row
            for key, cell in stage["cells"].items()
            if cell["status"] == "measured"
            for values in (by_variant(cell["values"]),)
            for which, row in values.items()
        }
        columns = list(dict.fromkeys(key for row in rows.values() for key in row if _is_short(row[key])))
        if columns:
            lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for which, row in rows.items():
            lines.append(f"| {which} | {' | '.join(_shown(row.get(column, '')) for column in columns)} |")
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


def by_variant(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of a cell: one for each variant that it compares, if its values are tables, and what they share."""
    variants = {name: row for name, row in values.items() if isinstance(row, dict)}
    shared = {name: value for name, value in values.items() if name not in variants}
    return variants | ({"together": shared} if shared and variants else {}) or {"": shared}


def _is_short(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value) if _is_short(value) else "..."
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
