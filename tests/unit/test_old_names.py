"""Old names of modules are the modules of today, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from springtide.renamed import NEW_NAMES


@pytest.mark.parametrize("old", [*NEW_NAMES, "springtide.store.folder", "springtide.report.charts"])
def test_an_old_name_is_the_module_of_today(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name in NEW_NAMES or name.rpartition(".")[0] in NEW_NAMES]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning) as said:
        module = importlib.import_module(old)
    new = str(said[-1].message).removeprefix(f"{old} is now ")
    assert module is importlib.import_module(new)
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == new


def test_a_name_that_never_was_is_not_found() -> None:
    """Nothing is said either: it has no new name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("springtide.app")  # the package has one
    warnings.simplefilter("error")  # pytest restores the filters
    with pytest.raises(ModuleNotFoundError) as refused:
        importlib.import_module("springtide.app.nothing")
    assert refused.value.name == "springtide.api.nothing"


@pytest.mark.processes
def test_the_warning_names_the_line_of_the_import() -> None:
    program = "from springtide.app.plan_rows import Plan\nfrom springtide.store import Folder\nprint(Plan.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "springtide.planning.plan"
    assert [line for line in done.stderr.splitlines() if "FutureWarning" in line] == [
        "<string>:1: FutureWarning: springtide.app is now springtide.api",
        "<string>:1: FutureWarning: springtide.app.plan_rows is now springtide.planning.plan",
        "<string>:2: FutureWarning: springtide.store is now springtide.storage",
    ]
