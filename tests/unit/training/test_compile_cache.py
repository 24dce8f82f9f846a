"""Compiled code lies with its run, under a seal of the run's user, and reaches the next node's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stepping import done_step

from springtide.checkpoint import leases
from springtide.config import Config
from springtide.distributed import alone
from springtide.errors import RunExists
from springtide.storage import Folder
from springtide.training import compile_cache
from springtide.training.compile_cache import CompileCache, CompiledCode, key_of, padded_rows, sealed, unsealed
from springtide.training.group_lease import GroupLease

CPU = torch.device("cpu")
DONE = done_step()


@pytest.fixture
def compiled(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompileCache:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "node"))
    (tmp_path / "home").mkdir()
    run, config = Folder(tmp_path / "run"), tiny.override({"parallel.compile": True})
    return CompileCache(run, key_of(run, config), config)


def of_torch(monkeypatch: pytest.MonkeyPatch, artifacts: bytes | None = b"code") -> list[bytes]:
    """What torch has compiled, and what it is given to load from now on."""
    loaded: list[bytes] = []
    monkeypatch.setattr(compile_cache, "compiled_artifacts", lambda: artifacts)

    def load(data: bytes) -> bool:
        loaded.append(data)
        return True

    monkeypatch.setattr(compile_cache, "load_compiled", load)
    return loaded


def claimed(run: Folder) -> GroupLease:
    """A group of a run that it has claimed itself."""
    lease = GroupLease(run, "", "")
    lease.term = lease.claim()
    return lease


def test_only_what_is_under_the_users_seal_is_taken() -> None:
    data = sealed("compiled/a.bin", b"artifacts", "k1")
    assert unsealed("compiled/a.bin", data, "k1") == b"artifacts"
    assert unsealed("compiled/a.bin", data, "k2") is None
    assert unsealed("compiled/b.bin", data, "k1") is None  # of other shapes
    for other in (b"", data[:20], data[:-1], data + b"!", data[:-1] + b"?", b"X" + data[1:]):
        assert unsealed("compiled/a.bin", other, "k1") is None


def test_each_user_and_run_has_a_key_of_its_own(
    compiled: CompileCache, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each user and each run has a key of its own and a run that compiles nothing has none."""
    run, config = compiled.run, compiled.config
    assert key_of(run, config) == compiled.key != ""
    assert key_of(Folder(tmp_path / "copy"), config) not in ("", compiled.key)
    assert key_of(run, tiny) == ""
    with_gpus = {"shards.mask_across_documents": True, "elastic.gpus_per_worker": 1}
    assert key_of(run, tiny.override(with_gpus)) == compiled.key  # FlexAttention is compiled
    monkeypatch.setenv("HOME", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    assert key_of(run, config) not in ("", compiled.key)


def test_the_files_name_has_all_that_compiled_code_depends_on(compiled: CompileCache) -> None:
    def kind(**changes: Any) -> str:
        config = compiled.config.override({name.replace("__", "."): value for name, value in changes.items()})
        return CompileCache(compiled.run, compiled.key, config).kind(CPU)

    same = {kind(), kind(optim__peak_lr=0.5), kind(train__micro_batch=1), kind(elastic__max_workers=1)}
    others = {kind(parallel__recompute="full"), kind(model__num_layers=3), kind(shards__mask_across_documents=True)}
    assert len(same) == 1
    assert len(others - same) == 3
    assert compiled.name(CPU, 1) == f"{kind()}/{padded_rows(compiled.config, 1)}-alone.bin"
    assert compiled.name(CPU, 2) == f"{kind()}/{padded_rows(compiled.config, 2)}-group.bin"


def test_what_one_node_compiled_another_loads_once(
    compiled: CompileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = of_torch(monkeypatch)
    alone_name, group_name = compiled.name(CPU, 1), compiled.name(CPU, 2)
    lease = claimed(compiled.run)
    assert compiled.load(CPU) == 0  # there is nothing yet
    assert compiled.save(alone_name, lease, lease.term)
    assert not compiled.save(alone_name, lease, lease.term)  # it is there
    assert compiled.load(CPU) == 1
    assert compiled.save(group_name, lease, lease.term)
    compiled.run.write(f"{compiled.kind(CPU)}/.tmp-1-group.bin", b"half a file")
    assert compiled.load(CPU) == 1
    assert compiled.load(CPU) == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "another"))
    assert compiled.load(CPU) == 2
    assert loaded == [b"code"] * 4
    without = CompileCache(compiled.run, "", compiled.config)
    assert without.load(CPU) == 0


def test_foreign_damaged_or_large_code_is_not_loaded(
    compiled: CompileCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code of others damaged code and too much code are not loaded."""
    loaded = of_torch(monkeypatch)
    name = compiled.name(CPU, 1)
    compiled.run.write(name, sealed(name, b"evil", "another's key"))
    assert compiled.load(CPU) == 0
    assert "seal" in caplog.text
    other = compiled.name(CPU, 2)
    compiled.run.write(name, sealed(other, b"of other shapes", compiled.key))
    assert compiled.load(CPU) == 0
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 50)
    compiled.run.write(name, sealed(name, b"much", compiled.key))
    assert compiled.load(CPU) == 0
    assert "limit of 50" in caplog.text
    lease = claimed(compiled.run)
    assert not compiled.save(name, lease, lease.term)
    assert not loaded


def test_a_group_that_was_fenced_off_writes_nothing(compiled: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch(monkeypatch)
    name, mine = compiled.name(CPU, 1), claimed(compiled.run)
    leases.claim(compiled.run, "another")
    with pytest.raises(RunExists):
        compiled.save(name, mine, mine.term)
    assert not compiled.run.exists(name)


def test_rank_0_saves_beside_the_steps_after_more_compilation(
    compiled: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 saves beside the steps and again when more was compiled."""
    of_torch(monkeypatch)
    graphs, gate, written = [3], threading.Event(), []

    def save(*_: Any) -> bool:
        gate.wait(10)
        written.append(threading.current_thread() is not threading.main_thread())
        return True

    monkeypatch.setattr(CompileCache, "save", save)
    monkeypatch.setattr(compile_cache, "num_compiled", lambda: graphs[0])
    hook = CompiledCode(compiled, alone(CPU), claimed(compiled.run))
    for _ in range(3):
        assert list(hook.after_step(DONE)) == []  # the first is still being saved
    gate.set()
    hook.wait()
    assert written == [True]
    assert not list(hook.after_step(DONE))
    hook.wait()
    assert written == [True]
    graphs[0] += 1  # evaluation
    assert not list(hook.after_step(DONE))
    hook.wait()
    assert written == [True, True]


PROGRAM = """
import sys, torch
from torch._dynamo.utils import counters
from springtide import config as configs
from springtide.distributed.compiled import compile_block
from springtide.storage import Folder
from springtide.training.compile_cache import CompileCache, key_of
from springtide.training.group_lease import GroupLease
run = Folder(sys.argv[1])
config = configs.recipes.tiny().override({"parallel.compile": True})
compiled, device = CompileCache(run, key_of(run, config), config), torch.device("cpu")
loaded = compiled.load(device)
class Block(torch.nn.Linear):
    def forward(self, x):  # torch's own modules are not compiled so
        return torch.nn.functional.gelu(super().forward(x))
block = Block(8, 8)
compile_block(block)
block(torch.ones(2, 8)).sum().backward()
lease = GroupLease(run, "", "")
lease.term = lease.claim()
saved = compiled.save(compiled.name(device, 1), lease, lease.term)

hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(loaded, saved, hits > 0)
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_second_node_compiles_nothing_again(tmp_path: Path) -> None:
    """Two nodes are two folders of compiled code, and the run's folder in common."""
    found = []
    for node in ("first", "second"):
        here = {"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / node)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
            env=os.environ | here,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0] == ["0", "True", "False"]
    assert found[1][0] == "1"
    assert found[1][2] == "True"
