"""A benchmark's ``--quick`` as a test: that it still runs, and ends with claims of the form that readers of ``--json`` expect.
Its figures are no evidence, and not looked at."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 400
_CLAIM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "value": {"type": "number"},
        "goal": {"type": "number"},
        "better": {"enum": ["higher", "lower"]},
        "holds": {"type": "boolean"},
    },
    "required": ["name", "value", "goal", "better", "holds", "detail"],
    "additionalProperties": {},
}
_FORM = {
    "type": "object",
    "properties": {"quick": {"const": True}, "claims": {"type": "array", "items": _CLAIM}},
    "required": ["quick", "claims"],
}
_BAMBOO = "0,add,a\n0,add,b\n3600000,add,c\n7200000,remove,a\n10800000,add,d\n14400000\n"
_SKYPILOT = '{"metadata": {"gap_seconds": 600}, "data": [2, 3, 3, 1, 2, 4, 4]}'
_GOOGLE = "2024-01-01, 00:00:00, 2\n2024-01-01, 01:00:00, 4\n2024-01-01, 02:00:00, 1\n2024-01-01, 03:00:00, 3\n"
_TRACES = {
    "bamboo/traces/p3-trace.csv": _BAMBOO,
    "bamboo/traces/g4dn-trace.csv": _BAMBOO,
    "bamboo/traces/gcloud/a100x1-east1b.txt": _GOOGLE,
    "skypilot-spot-traces/availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json": _SKYPILOT,
}


def traces(folder: Path) -> Path:
    """Records of spot capacity of a few hours, where the benchmarks look for those of weeks."""
    for name, text in _TRACES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def claims(benchmark: str, *options: str) -> dict[str, dict[str, Any]]:
    """Run ``benchmarks/<benchmark>.py --quick --json``; its claims by name."""
    command = [sys.executable, str(BENCHMARKS / f"{benchmark}.py"), "--quick", "--json", *options]
    # one thread each: as many as there are cores, in each of several processes, would spin for one another
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return _checked(done.stdout)


def claims_here(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, Any]]:
    """As ``claims``, in this process, which may have imported already what takes most of the time."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = str(BENCHMARKS / f"{benchmark}.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--json"])
    runpy.run_path(script, run_name="__main__")
    return _checked(capsys.readouterr().out)


def _checked(output: str) -> dict[str, dict[str, Any]]:
    """The claims in the last line of what a benchmark has printed."""
    found = json.loads(output.splitlines()[-1])
    jsonschema.validate(found, _FORM)
    for claim in found["claims"]:
        value, goal = claim["value"], claim["goal"]
        assert not math.isnan(value), claim["name"]
        near = abs(value - goal) < 1e-4  # a value is rounded when it has been judged
        assert near or claim["holds"] == (value >= goal if claim["better"] == "higher" else value <= goal), claim
    return {claim["name"]: claim for claim in found["claims"]}
