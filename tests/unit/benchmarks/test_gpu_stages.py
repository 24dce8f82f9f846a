"""``make gpu`` on a machine without a GPU: every stage ends and says what it skipped, a measured stage stands while its code is
the same, and a cell that fails, hangs or ends its process spoils no other."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
GPU = REPOSITORY / "benchmarks" / "gpu"
STAGES = ["smoke", "fp8", "fp8_rowwise", "whole_8b", "documents", "head_loss", "deterministic", "saves", "lora"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module ``keys`` and, as ``main``, the runner."""
    monkeypatch.syspath_prepend(str(GPU))
    spec = importlib.util.spec_from_file_location("gpu_main", GPU / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    main = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_main", main)  # dataclasses look their module up
    spec.loader.exec_module(main)
    yield main
    for name in ("keys",):
        sys.modules.pop(name, None)


def run(out: Path, *flags: str, status: int = 0) -> tuple[str, dict[str, Any]]:
    """What ``python benchmarks/gpu --quick`` prints, and its line of JSON."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(GPU), "--quick", "--json", "--out", str(out), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_every_stage_ends_without_a_gpu_and_says_what_it_skipped(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    _, found = run(out, "--seconds", "1400")
    assert found["quick"]
    assert list(found["stages"]) == STAGES
    assert not found["left_out"]
    for name, stage in found["stages"].items():
        assert stage["finished"], name
        assert stage["measured"], name
        assert stage.keys() <= {"finished", "measured", "skipped"}, name
        for why in stage.get("skipped", {}).values():
            assert "GPU" in why, (name, why)
    for claim in found["claims"]:
        assert claim.keys() == {"name", "value", "goal", "better", "holds", "detail"}
    holds = {claim["name"]: claim["holds"] for claim in found["claims"]}
    for name in ("loss falls by [nats]", "skipped steps", "deterministic runs are bit-equal"):
        assert holds[name], name
    stages = json.loads(out.read_text())
    saves = stages["saves"]["cells"]["tiny"]["values"]
    assert saves["saves"] + saves["skipped_saves"] == 3  # a save every 4 of 12 steps

    before = out.read_text()
    text, _ = run(out, "--only", "documents")
    assert "documents: stands: measured on" in text
    assert out.read_text() == before


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.slow
def test_several_gpus_are_one_page_on_two_cpus(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    command = [sys.executable, str(GPU / "several.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    cells = {row[0].strip("| "): row[1:] for row in rows}
    assert out.read_text() in done.stdout
    assert "not measured: needs 4 GPUs" in out.read_text()
    for what, workers in {"notice": "2 to 1", "growth": "1 to 2", "kill": "2 to 1"}.items():
        assert cells[what][2] == workers, out.read_text()
    assert cells["notice"][1] == "0"
    assert "verified: yes" in out.read_text()


@pytest.mark.processes
def test_a_stage_that_does_not_exist_is_named() -> None:
    done = subprocess.run([sys.executable, str(GPU), "--only", "sped"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no stage sped: there are smoke, fp8" in done.stderr


@pytest.mark.processes
def test_without_a_gpu_only_quick_measures(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(GPU), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "--quick" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_stage_starts_only_if_its_time_is_left(gpu: Any) -> None:
    """Time of this device before, else the estimate; less what its measured cells have taken."""
    stage = gpu.Stage(100)
    assert gpu.needed(stage, {}, "H200", False) == 100
    finished = {"device": "H200", "finished": True, "quick": False, "seconds": 61.0}
    assert gpu.needed(stage, finished, "H200", False) == 61
    assert gpu.needed(stage, finished, "H100", False) == 100
    assert gpu.needed(stage, finished | {"quick": True}, "H200", False) == 100
    begun = finished | {"finished": False, "seconds": 70.0}
    assert gpu.needed(stage, begun, "H200", True) == 30
    assert gpu.needed(stage, begun, "H200", False) == 100  # other code: its cells are measured again
    assert gpu.needed(stage, begun | {"seconds": 99.0}, "H200", True) == gpu.STARTING_S


def test_stages_fit_their_limit(gpu: Any) -> None:
    assert list(gpu.STAGES) == STAGES
    for name, stage in gpu.STAGES.items():
        assert stage.estimate_s <= gpu.LIMIT_S, name
        assert (GPU / f"{stage.file or name}.py").is_file(), name


class TestKey:
    """The key changes with the code that a stage imports, and with nothing else."""

    FILES = {  # noqa: RUF012 -- read only
        "stage.py": '"""A stage."""\nimport os\nfrom springtide.model import width\n\ndef measure():\n    return width() + 1\n',
        "springtide/__init__.py": "",
        "springtide/model.py": "from springtide.shape import SIZE\n"
        "def width():\n    return SIZE\n\ndef other():\n    return 2\n",
        "springtide/shape.py": "SIZE = 3\n",
        "springtide/unused.py": "SIZE = 4\n",
    }

    @pytest.fixture
    def key(self, gpu: Any, tmp_path: Path) -> Any:
        """A function: changed files (None takes one away) -> the key."""
        keys, count = sys.modules["keys"], iter(range(100))

        def of(changes: dict[str, str | None]) -> str:
            root = tmp_path / str(next(count))
            for name, text in {**self.FILES, **changes}.items():
                if text is not None:
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_text(text)
            found: str = keys.key_of(root / "stage.py", roots=(root,))
            return found

        return of

    def test_what_changes_no_figure_keeps_it(self, key: Any) -> None:
        usual = key({})
        model, shape = self.FILES["springtide/model.py"], self.FILES["springtide/shape.py"]
        assert key({"springtide/unused.py": "SIZE = 5\n"}) == usual
        assert key({"springtide/model.py": f'"""What it is."""\n# why\n{model}'}) == usual
        moved = model.replace("springtide.shape", "springtide.sizes.shape")
        away = {"springtide/shape.py": None, "springtide/sizes/shape.py": shape}
        assert key({"springtide/model.py": moved, **away}) == usual
        merged = model.replace("from springtide.shape import SIZE\n", shape)
        assert key({"springtide/model.py": merged, "springtide/shape.py": None}) == usual
        lazily = model.replace("    return 2", "    import json\n    return 2")
        assert key({"springtide/model.py": lazily}) == usual

    def test_changed_code_changes_it(self, key: Any) -> None:
        usual = key({})
        assert key({"springtide/shape.py": "SIZE = 4\n"}) != usual
        assert key({"stage.py": self.FILES["stage.py"].replace("+ 1", "+ 2")}) != usual
        assert key({"springtide/model.py": self.FILES["springtide/model.py"].replace("return 2", "return 3")}) != usual

    def test_what_a_stage_imports_in_a_function_counts(self, key: Any) -> None:
        lazily = "def measure():\n    from springtide.unused import SIZE\n    return SIZE\n"
        assert key({"stage.py": lazily}) != key({"stage.py": lazily, "springtide/unused.py": "SIZE = 5\n"})

    def test_stages_do_not_depend_on_the_whole_source(self, gpu: Any) -> None:
        """A stage of the step is measured again if the step changes, and not if a command does."""
        keys = sys.modules["keys"]
        found = keys.key_of(GPU / "eight_bits.py")
        assert len(found) == 16
        loaded = {
            path.relative_to(REPOSITORY / "platform").as_posix()
            for path in keys.files_of(GPU / "eight_bits.py")
            if "platform" in path.parts
        }
        assert "springtide/training/step.py" in loaded
        assert not [name for name in loaded if name.startswith(("springtide/cli/", "springtide/ray/"))]


def test_clocks_that_are_held_down_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    from measure import held_down

    assert held_down(1400.0, 1980.0, []) == ""
    assert held_down(None, 0.0, ["rows of its memory wait to be remapped"]) == ""
    assert "345 of 1980 MHz" in held_down(345.0, 1980.0, [])
    assert held_down(1900.0, 1980.0, ["its clocks are lowered by heat (hardware): look at cooling"]).startswith(
        "its clocks"
    )


STAGE = """
import os, sys
sys.path[:0] = [{benchmarks!r}, {gpu!r}]
from pathlib import Path
from measure import Book, NotHere
def fails():
    raise ValueError("not this one")
def is_not_here():
    raise NotHere("takes about 200 GB, and 140 GB of this device can be used")
def dies():
    os._exit(9)
def counts():
    print("measured")
    return {{"s": 1.0}}
file = Path(sys.argv[1]) / "gpu.json"
Book("none", "key", file, True, 0.0).cell("first", counts)
book = Book("stage", sys.argv[2], file, True, 60.0)
book.cell("first", counts)
book.cell("fails", fails)
book.cell("small", is_not_here)
book.cell("wheel", counts, "needs torchao")
if "die" in sys.argv:
    book.cell("dies", dies)
book.cell("last", counts)
sys.exit(book.end([]))
"""


@pytest.mark.processes
@pytest.mark.full
def test_cells_are_kept_and_one_that_spoils_its_process_is_tried_twice(tmp_path: Path) -> None:
    program = STAGE.format(benchmarks=str(GPU.parent), gpu=str(GPU))

    def stage(key: str, *flags: str) -> tuple[int, int, dict[str, Any]]:
        command = [sys.executable, "-c", program, str(tmp_path), key, *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads((tmp_path / "gpu.json").read_text())
        assert found["none"]["cells"]["first"]["status"] == "left out"  # one file, a section for each stage
        return done.returncode, done.stdout.splitlines().count("measured"), found["stage"]["cells"]

    status, measured, cells = stage("a", "die")
    assert (status, measured) == (9, 1)
    assert cells["fails"]["why"] == "ValueError: not this one"
    assert cells["small"]["status"] == cells["wheel"]["status"] == "skipped"
    assert cells["wheel"]["why"] == "needs torchao"
    status, measured, _ = stage("a", "die")
    assert (status, measured) == (9, 0)  # the first is kept; the one that died is tried once more
    status, measured, cells = stage("a", "die")  # and then no more
    assert (status, measured) == (1, 1)
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "first": "measured",
        "fails": "failed",
        "small": "skipped",
        "wheel": "skipped",
        "dies": "failed",
        "last": "measured",
    }
    status, measured, cells = stage("b")  # other code: everything is measured again
    assert (status, measured) == (1, 2)
    assert "dies" not in cells
