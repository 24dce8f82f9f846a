"""What a run takes from the run of the model that it starts from: facts about the model, and nothing else."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest

from springtide import config as configs
from springtide.cli.main import main
from springtide.config import Config
from springtide.config.fields import fields
from springtide.config.inherit import INHERITED, is_named, left_behind
from springtide.config.recipes import FINE_TUNING
from springtide.errors import ConfigError
from springtide.run.folder import Run
from springtide.storage import Folder

BASE = configs.recipes.tiny().override({"shards.dataset": "data", "stream.global_batch": 8})
OTHER: dict[str, Any] = {
    "run.queue": "q",
    "elastic.env": {"LD_PRELOAD": "/tmp/evil.so", "NCCL_DEBUG": "INFO"},
    "elastic.metadata_url": "http://evil.example",
    "track.mlflow_uri": "http://evil.example",
    "feed.cache": "/tmp/evil",
    "checkpoint.stage": "/tmp/evil",
    "track.listener": "evil:listen",
    "parallel.recompute": "full",
}
"""Settings of a stranger that the rule below does not find another value for."""


def _another(value: Any) -> Any:
    """Another value of the type of ``value``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value}x" if isinstance(value, str) else None


def _changed(name: str) -> Config | None:
    """``BASE`` with another value of one setting; None if no valid one is found."""
    section, field = name.split(".")
    leaf = BASE.model_dump(mode="json")[section][field]
    literals = re.findall(r"'([a-z0-9_]+)'", str(fields()[name].annotation))
    for value in (OTHER.get(name), _another(leaf), *literals):
        try:
            if value is not None and value != leaf:
                return BASE.override({name: value})
        except ConfigError:
            pass
    return None


def test_no_other_setting_of_a_strangers_run_matters() -> None:
    """Each setting is changed in the model's run; only those of the table change what a recipe returns."""
    tried = 0
    for name in fields():
        if (base := _changed(name)) is None:
            continue
        tried += 1
        is_taken = any(fnmatch.fnmatch(name, one) for one in INHERITED)
        for recipe, make in FINE_TUNING.items():
            if not is_taken and name not in ("shards.dataset", "stream.mixture"):
                assert make(base, "runs/a") == make(BASE, "runs/a"), f"{recipe} takes {name}"
    assert tried > 140
    assert _changed("elastic.env") is not None


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "SECURITY.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.*]+)` \| (.*?) \|$", page, re.MULTILINE))
    assert rows == INHERITED


def test_a_line_for_each_setting_that_is_not_taken() -> None:
    env = {"elastic.env": {"NCCL_DEBUG": "INFO"}, "run.root": "s3://theirs/it's", "elastic.max_workers": 4}
    found = left_behind(BASE.override(env), FINE_TUNING["sft"](BASE, "runs/a"))
    assert found["elastic.max_workers"].endswith(": --elastic.max_workers 4")
    assert found["elastic.env"].endswith("""--elastic.env '{"NCCL_DEBUG": "INFO"}'""")
    assert found["run.root"].endswith("""--run.root 's3://theirs/it'"'"'s'""")
    assert "shards.packing" not in found, "was never taken"
    evil = BASE.override({"elastic.env": {"LD_PRELOAD": "evil.so"}})
    assert "run code" in left_behind(evil, FINE_TUNING["sft"](evil, "runs/a"))["elastic.env"]


def test_the_command_line_prints_them_unless_they_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, dataset = str(tmp_path / "theirs"), str(tmp_path / "data")
    Run(Folder(str(tmp_path / "a"))).write_config(
        BASE.override({"run.root": root, "track.price": 2.0, "shards.dataset": dataset, "run.id": "a"})
    )
    words = ["train", "--recipe", "sft", "--train.start-from", str(tmp_path / "a"), "--track.price", "3"]
    assert main([*words, "--run.root", str(tmp_path / "mine"), "--resume"]) == 2
    said = capsys.readouterr().err
    assert (
        "checkpoint.every_steps is not taken from the model's run; to repeat its value: --checkpoint.every_steps 20"
        in said
    )
    assert "note: checkpoint.keep_last" not in said, "has the default"
    assert "note: track.price" not in said
    assert f"no run of this config is under {tmp_path}/mine" in said
    assert f"or search where the model's run is: --run.root {root}" in said
    assert not Path(root).exists()


def test_a_host_that_the_user_did_not_name_is_not_contacted(tmp_path: Path) -> None:
    base = BASE.override({"shards.dataset": "s3://evil/data"})
    make = configs.recipes.continued
    with pytest.raises(ConfigError, match=r"s3://evil/data.*--stream\.mixture"):
        make(base, "s3://mine/runs/a")
    assert make(base, "s3://evil/runs/a").stream.mixture["old"] == "s3://evil/data"
    assert make(base, "runs/a", ["s3://evil/more"]).stream.mixture["old"] == "s3://evil/data"
    assert not is_named("simplecache::s3://mine/a", "s3://mine/b")
    assert not is_named("file://host/a", "runs/b")
