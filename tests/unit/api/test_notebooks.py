"""Notebooks that need no cluster, run from top to bottom. Those that train are in tests/elastic."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.processes

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.full) for one in ("plan", "data")])
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ())]
    if name == "plan":
        assert said[0]["text/html"].startswith("<table>")
        assert "8xh100, 8 workers" in said[1]["text/plain"]
        assert "4xl4" in said[2]["text/plain"]
    else:
        assert "'duplicate': 1" in said[1]["text/plain"]


def test_each_notebook_is_saved_without_its_outputs() -> None:
    """Each but the one whose outputs are its result."""
    for path in NOTEBOOKS.glob("*.ipynb"):
        outputs = [cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells]
        assert path.stem == "width" or not any(outputs), path.name
