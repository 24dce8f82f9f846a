"""The examples in docstrings run, all in one folder with a trained run; those of public functions list each argument."""

from __future__ import annotations

import doctest
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import springtide as st
from springtide.distributed import world
from springtide.storage import Folder
from springtide.stream import load, open_data
from springtide.tracking.journal import Journal
from springtide.training import TrainLoop

pytestmark = pytest.mark.processes

SOURCE = Path(st.__file__).parent
MODULES = sorted(
    ".".join(("springtide", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for file in SOURCE.rglob("*.py")
    if ">>> " in file.read_text()
)
"""The modules with examples."""
NOT_RUN = {
    "train",
    "resolve",
    "sweep",
    "drill",
    "label",
    "queue",
    "save",
    "pause",
    "unpause",
    "resize",
    "stop",
    "name_of",
}
"""Functions whose examples need a Ray cluster, and minutes, or a run that trains. tests/elastic calls them. ``name_of`` returns
another name each time."""
PUBLIC = {
    *(name for name in st.__all__ if isinstance(getattr(st, name), types.FunctionType)),
    *(
        "batches",
        "drill",
        "simulate_trace",
        "simulate_failures",
        "simulate_deadline",
        "estimate_memory",
        "estimate_evenness",
        "verify",
        "ledger",
        "export_model",
        "import_model",
        "label",
        "write_fisher",
    ),
}


def examples() -> list[doctest.DocTest]:
    """The docstrings that have an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [one for name in MODULES for one in finder.find(importlib.import_module(name))]
    return [one for one in found if one.examples]


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, the public methods of ``Run``, and ``Config.override``."""
    for name in MODULES:
        module = importlib.import_module(name)
        for one in vars(module).values():
            if inspect.isfunction(one) and one.__module__ == name and one.__name__ in PUBLIC:
                yield f"{name}.{one.__name__}", one
    for name, one in vars(st.Run).items():
        if inspect.isfunction(one) and not name.startswith("_"):
            yield f"Run.{name}", one
    yield "Config.override", st.Config.override


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, datasets: Path) -> Path:
    """A folder with ``runs/mine``, a run of 8 steps; ``datasets``; ``trace.csv``, a record of spot capacity; and
    ``nodes.yaml``, a cluster file."""
    here = tmp_path_factory.mktemp("examples")
    (here / "datasets").symlink_to(datasets)
    (here / "trace.csv").write_text("0,add,a\n0,add,b\n1800000,remove,a\n3600000\n")
    page = Path(__file__).parents[2] / "docs/how-to/plan.md"
    (here / "nodes.yaml").write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    tiny = st.recipes.tiny()
    changes = {
        "run.id": "mine",
        "run.root": str(here / "runs"),
        "shards.root": str(here / "datasets"),
        "optim.warmup": 0,
        "train.total": 8 * tiny.tokens_per_step,
        "checkpoint.every_steps": 4,
    }
    config = st.prepare(tiny.override(changes))
    run = st.Run(Folder(config.run.root) / config.run.id)
    run.write_config(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loop = TrainLoop(config, world("cpu"), open_data(config.data), run.folder)
        with Journal(run.folder) as journal:
            for event in loop.events(lambda reader, step: load(reader, reader.plan(step, 8, 2**22)), lambda: None):
                journal(event)
    finally:
        dist.destroy_process_group()
    return here


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name.removeprefix("springtide."))
def test_an_example_shows_what_comes_out(
    example: doctest.DocTest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    example.globs.update(st=st, torch=torch)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_only_examples_that_need_a_cluster_are_not_run() -> None:
    skipped = {one.name for one in examples() if any(doctest.SKIP in line.options for line in one.examples)}
    assert {name.rpartition(".")[2] for name in skipped} <= NOT_RUN


def test_every_public_function_has_an_example_and_lists_its_arguments() -> None:
    missing = []
    for name, function in functions():
        text = inspect.getdoc(function) or ""
        names = [one for one in inspect.signature(function).parameters if one != "self"]
        missing += [f"{name}: {one}" for one in names if f"\n    {one}: " not in text]
        if "\nExamples:\n" not in text:
            missing.append(f"{name} has no example")
    assert not missing
