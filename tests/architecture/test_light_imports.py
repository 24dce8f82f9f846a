"""Importing springtide is light, and training without Ray imports no Ray. Each test imports in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("module", ["springtide", "springtide.config", "springtide.stream", "springtide.elastic"])
def test_what_is_light_stays_light(module: str) -> None:
    program = f"import {module}, sys; print([name for name in ('torch', 'ray', 'mlflow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_loads_no_arrays_before_a_command_runs() -> None:
    heavy = ("numpy", "pyarrow", "pydantic", "torch", "yaml")
    program = f"import springtide.cli.main, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_public_name_is_the_same_whatever_was_imported_before() -> None:
    program = """
import springtide as st
before = {name: getattr(st, name) for name in st.__all__}
import springtide.api.sweep, springtide.api.train, springtide.tune, springtide.training
assert before == {name: getattr(st, name) for name in st.__all__}
assert callable(st.train) and callable(st.sweep)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_loop_needs_no_ray() -> None:
    program = "import springtide.training.__main__, sys; print('ray' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False True"
