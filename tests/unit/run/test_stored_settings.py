"""Runs and sweeps of earlier versions: old names of settings are read, and a run that cannot be read stops no other."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from springtide import config as configs
from springtide.api.sweep import SweepReader, plan_of, started_with
from springtide.checkpoint.branch import meta_of_start
from springtide.checkpoint.format import Manifest, Meta
from springtide.cli.main import main
from springtide.config import Config, renames
from springtide.config.renames import Retired
from springtide.errors import ConfigError
from springtide.events import Evaluated, Started
from springtide.run.find import find_run, lineage
from springtide.run.folder import Run
from springtide.run.run_status import overview
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.ledger import Prices
from springtide.tune import SweepFolder, member_config, name_of, read

LOST = Retired("", "prepare the new text, then resume with it in stream.mixture", changes_training=True)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table as later versions have it."""
    monkeypatch.setattr(
        renames, "RETIRED_SETTINGS", {"stream.inbox": LOST, "page.port": Retired(8080, "open report.html")}
    )
    monkeypatch.setattr(renames, "RENAMED_SETTINGS", {"optim.rate": "optim.peak_lr"})


def old(config: Config, inbox: str = "") -> dict[str, Any]:
    """A config as an earlier version stored it."""
    data: dict[str, Any] = yaml.safe_load(configs.dump(config))
    data["optim"]["rate"] = data["optim"].pop("peak_lr")
    data["stream"]["inbox"], data["page"] = inbox, {"port": 1}
    return data


def stored(config: Config, name: str, inbox: str = "") -> tuple[Config, Run]:
    """What a user gives now to resume the run, and the run of an earlier version."""
    config = config.override({"run.id": name})
    run = Run(Folder(config.run.root) / name)
    run.folder.write(configs.RUN_CONFIG, yaml.safe_dump(old(config, inbox)))
    return config, run


def test_a_run_of_an_earlier_version_resumes(tiny: Config, table: None) -> None:
    given, run = stored(tiny, "20260101-a")
    assert find_run(given, True, False)[1] == run
    assert find_run(tiny, True, False)[1] == run, "its fingerprint finds it, too"
    run.write_config(find_run(given, True, False)[0])
    assert "page" not in yaml.safe_load(run.folder.read(configs.RUN_CONFIG))


def test_only_training_on_is_refused_for_what_is_lost(
    tiny: Config, table: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given, run = stored(tiny, "mine", inbox="/text")
    with pytest.raises(ConfigError) as caught:
        find_run(given, True, False)
    assert str(caught.value) == (
        f"{run.folder.where('config.yaml')}: stream.inbox = '/text': changed the training and is retired; {LOST.instead}; "
        "or pass --accept-changes to train on without it"
    )
    assert find_run(given, True, True)[1] == run
    for command in (["run", "list", tiny.run.root], ["report", run.folder.url], ["inspect", run.folder.url]):
        assert main(command) == 0
    assert "mine" in capsys.readouterr().out


def test_torchrun_refuses_what_is_lost(
    tiny: Config, table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from springtide.training.__main__ import main as torchrun

    given, _ = stored(tiny, "mine", inbox="/text")
    (tmp_path / "given.yaml").write_text(configs.dump(given))
    monkeypatch.setattr("sys.argv", ["training", "--config", str(tmp_path / "given.yaml")])
    with pytest.raises(ConfigError, match=r"stream\.inbox = '/text': .*--accept-changes"):
        torchrun()


def test_a_checkpoints_config_is_read_through_the_table(tiny: Config, table: None) -> None:
    meta = Meta(step=5, tokens=0, world_size=1, order_identity="o", config_fingerprint="c")
    manifest = Manifest.model_construct(meta=meta, config=old(tiny))
    stage = tiny.train.model_copy(update={"start_with": "optimizer"})
    assert meta_of_start(stage, manifest).components == {"stages_before": {"tokens": 5 * tiny.tokens_per_step}}


BROKEN = {
    "not-yaml": b"model: [",
    "unknown": b"model: {num_layerz: 3, dimm: 1}\noptm: {}",
    "not-text": b"\xff\xfe",
    "a-list": b"- 1",
    "huge": b"# " * 2**20,
}


def break_some(root: Path) -> None:
    """Runs that cannot be read, newer than all others."""
    for name, content in BROKEN.items():
        (root / f"z-{name}").mkdir(parents=True)
        (root / f"z-{name}" / "config.yaml").write_bytes(content)
    (root / "z-folder" / "config.yaml").mkdir(parents=True)
    (root / "z-link").mkdir()
    (root / "z-link" / "config.yaml").symlink_to("config.yaml")


def test_runs_that_cannot_be_read_are_listed_beside_the_others(
    tiny: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(tiny.run.root)
    good = Run(Folder(root / "good"))
    good.write_config(tiny)
    with Journal(good.folder) as journal:
        journal(Started(step=0, world_size=1))
    break_some(root)
    odd = Run(Folder(root / "z-journal"))
    odd.write_config(tiny)
    odd.folder.write("journal", b"a file, where a folder should be")
    garbage = Run(Folder(root / "z-garbage"))
    garbage.write_config(tiny)
    garbage.folder.write("journal/0001-0000.jsonl", bytes(range(256)) * 40 + b"\n[[[[{\n")
    rows = {row.id: row.state for row in overview(str(root))}
    assert rows.pop("good") == "running or killed"
    assert rows.pop("z-garbage") == "not started"
    rows.pop("z-journal")
    assert rows.keys() == {f"z-{name}" for name in (*BROKEN, "folder", "link")}
    assert all(
        state.startswith("cannot be read: ") and "\n" not in state and len(state) < 400 for state in rows.values()
    )
    assert "model.num_layerz = 3: is not a setting; did you mean 'model.num_layers'?" in rows["z-unknown"]
    assert main(["run", "list", str(root)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) + 3


def test_a_reader_that_fails_on_one_run_lists_the_others(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "odd"):
        Run(Folder(tiny.run.root) / name).write_config(tiny)

    def read(run: Run) -> Config:
        if run.id == "odd":
            raise KeyError("of a bug")
        return tiny

    monkeypatch.setattr(Run, "config", property(read))
    assert {row.id: row.state for row in overview(tiny.run.root)} == {
        "good": "not started",
        "odd": "cannot be read: 'of a bug'",
    }


def test_a_run_that_cannot_be_read_stops_no_other_from_resuming(tiny: Config, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Folder(tiny.run.root) / "20260101-a")
    run.write_config(tiny.override({"run.id": "20260101-a"}))
    break_some(Path(tiny.run.root))
    with caplog.at_level(logging.WARNING):
        assert find_run(tiny, True, False)[1] == run
    assert len(caplog.messages) == len(BROKEN) + 1
    assert all("cannot be read" in one and "\n" not in one for one in caplog.messages)
    with pytest.raises(ConfigError, match="YAML"):
        find_run(tiny.override({"run.id": "z-not-yaml"}), True, False)


def test_a_store_that_is_away_starts_no_second_run(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--resume auto`` a run that is passed over is one that is not resumed."""
    Run(Folder(tiny.run.root) / "20260101-a").write_config(tiny)

    def away(folder: Folder, name: str) -> bytes:
        raise OSError("503 Slow Down")

    monkeypatch.setattr(Folder, "read", away)
    with pytest.raises(OSError, match="503"):
        find_run(tiny, "auto", False)


def test_descent_ends_at_a_run_that_cannot_be_read(tiny: Config) -> None:
    root = Folder(tiny.run.root)
    root.write("first/config.yaml", b"model: [")
    second = tiny.override({"train.start_from": f"{root.url}/first/checkpoints/step-0000000004"})
    Run(root / "second").write_config(second)
    third = tiny.override({"train.start_from": f"{root.url}/second"})
    assert [url.rpartition("/runs/")[2] for url in lineage(third)] == ["second", "first/checkpoints/step-0000000004"]


TINY = configs.recipes.tiny()
STEP = TINY.tokens_per_step
TABLE = {
    "SPACE": {"optim.peak_lr": ("uniform", 1e-4, 1e-1), "optim.warmup": ("uniform", 0, 10)},
    "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
    "BUDGET": {"trials": 4, "tokens_per_trial": 40 * STEP, "rungs": 4},
}


def old_sweep(folder: SweepFolder, base: Config, **more: Any) -> None:
    """A sweep as an earlier version stored it, with one point."""
    plan = json.loads(json.dumps(plan_of(base, read(TABLE, base), "random", 0)))
    plan["space"][0]["field"] = "optim.rate"
    folder.write_plan({**plan, "base": {**plan["base"], "page.port": 1, "stream.inbox": "", **more}})
    folder.write_point(0, {"optim.rate": 0.01, "optim.warmup": 3})


def test_a_sweep_of_an_earlier_version_resumes(tmp_path: Path, table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, space = SweepFolder(Folder(tmp_path) / "first"), read(TABLE, TINY)
    old_sweep(folder, TINY)
    plan = plan_of(TINY, space, "random", 0)
    assert started_with(folder, plan, True) == json.loads(json.dumps(plan))
    assert folder.points() == {0: {"optim.peak_lr": 0.01, "optim.warmup": 3}}
    assert folder.lineage(0, {})[0].point == folder.points()[0]
    other = TINY.override({"optim.decay": 768})
    with pytest.raises(ConfigError, match=r"optim\.decay was 0, is 768"):
        started_with(folder, plan_of(other, read(TABLE, other), "random", 0), True)
    monkeypatch.setitem(renames.ADDED_SETTINGS, "optim.eps", TINY.optim.eps / 2)
    old_plan = folder.plan() or {}
    folder.write_plan(
        {**old_plan, "base": {name: one for name, one in old_plan["base"].items() if name != "optim.eps"}}
    )
    with pytest.raises(ConfigError, match=r"optim\.eps was "):
        started_with(folder, plan, True)


def test_a_sweep_is_refused_only_for_what_is_lost(tmp_path: Path, table: None) -> None:
    folder = SweepFolder(Folder(tmp_path) / "first")
    old_sweep(folder, TINY, **{"stream.inbox": "/text"})
    with pytest.raises(ConfigError, match=r"^stream\.inbox = '/text': .*retired"):
        started_with(folder, plan_of(TINY, read(TABLE, TINY), "random", 0), True)
    assert folder.points(), "it is still read"


def test_one_trial_that_cannot_be_read_stops_no_sweep(tmp_path: Path) -> None:
    folder, space = SweepFolder(Folder(tmp_path) / "first"), read(TABLE, TINY)
    reader, points = (
        SweepReader(folder, space, Prices()),
        [{"optim.peak_lr": rate, "optim.warmup": 3} for rate in (0.01, 0.02)],
    )
    for number, point in enumerate(points):
        folder.write_point(number, point)
        run = folder.trials / name_of(number)
        run.write(configs.RUN_CONFIG, configs.dump(member_config(TINY, space.budget, name_of(number), point, "")))
        with Journal(run) as journal:
            for event in (
                Started(step=0, world_size=1),
                Evaluated(step=10, heldout_loss=2.0, heldout_bits_per_byte=1.0, rows=1),
            ):
                journal(event)
    (folder.trials / name_of(1)).write(configs.RUN_CONFIG, b"model: [")
    good, bad = reader.outcomes()
    assert (good.status, good.value) == ("stopped", 2.0)
    assert bad.status == "failed"
    assert bad.reason.startswith("cannot be read: config = ")
    assert [len(reader.runs(number, point)) for number, point in enumerate(points)] == [1, 0]
    assert reader.last_settled_rung(points) == 0
    with Journal(folder.trials / name_of(0)) as journal:
        journal(Started(step=11, world_size=1))
    assert reader.last_settled_rung(points) == 10
