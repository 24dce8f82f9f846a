"""Steps done and steps of the order are different types: mypy finds code that mixes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

PACKAGE = Path(__file__).parents[2] / "platform" / "springtide"
PROGRAM = """
from springtide.config.steps import OrderStep, StepsDone, one_more
from springtide.stream.order import Order

def train(order: Order, done: StepsDone, step: OrderStep) -> None:
    order.batch(order.step_after(done))
    order.batch(order.step_before(one_more(done)))
    {mistake}
"""
MISTAKES = {
    "right": "pass",
    "batch_of_a_count": "order.batch(done)",
    "count_of_an_index": "order.step_after(step)",
    "incremented_index": "one_more(step)",
    "number_by_hand": "order.batch(done - 1)",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy finds in each program: one run for all, of these files alone."""
    folder = tmp_path_factory.mktemp("programs")
    for name, mistake in MISTAKES.items():
        (folder / f"{name}.py").write_text(PROGRAM.format(mistake=mistake))
    (folder / "mypy.ini").write_text("[mypy]\n")
    files = [PACKAGE / "config" / "steps.py", PACKAGE / "stream" / "order.py", *sorted(folder.glob("*.py"))]
    options = ["--follow-imports=skip", "--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
    said, complaints, _ = api.run([*options, "--no-error-summary", *map(str, files)])
    assert not complaints
    return {name: re.findall(rf"/{name}\.py:\d+: error: (.*)", said) for name in MISTAKES}


@pytest.mark.parametrize("name", MISTAKES)
def test_mypy_finds_what_mixes_steps_done_and_steps_of_the_order(problems: dict[str, list[str]], name: str) -> None:
    found = problems[name]
    assert len(found) == (name != "right"), found
    assert all("incompatible type" in one for one in found)
