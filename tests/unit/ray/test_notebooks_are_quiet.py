"""In a notebook without ipywidgets nothing warns of progress bars that nobody draws."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

_KERNEL = """
import sys, types, warnings
sys.modules["ipywidgets"] = None  # not installed
kernel = type("ZMQInteractiveShell", (), {"config": {"IPKernelApp": {}}})
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: kernel())
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
warnings.simplefilter("always")
"""


@pytest.mark.parametrize(("first", "warns"), [("import springtide.ray", False), ("", True)], ids=["ours", "alone"])
def test_tqdm_does_not_ask_for_widgets(first: str, warns: bool) -> None:
    """Ray imports ``tqdm.auto``; alone it warns here, so the test sees what it looks for."""
    code = f"{_KERNEL}\n{first}\nbefore = list(warnings.filters)\nimport tqdm.auto\nassert warnings.filters == before"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("IProgress not found" in done.stderr) == warns, done.stderr
