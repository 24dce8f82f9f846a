"""What a person types: the command line, the cluster file, the jobs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from springtide import config as configs
from springtide.cli.main import main
from springtide.cli.train import _how_it_goes_on as how_it_goes_on
from springtide.config import Config
from springtide.config.fields import USUAL, fields
from springtide.events import Stopped
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal

REPOSITORY = Path(__file__).parents[3]


def test_help_shows_the_usual_fields_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    usual = capsys.readouterr().out
    assert "springtide train --recipe demo --resume" in usual
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    text = capsys.readouterr().out
    for name in fields():
        option = re.compile(rf"--{re.escape(name.replace('_', '-'))}(?![\w.-])")
        assert option.search(text)
        assert bool(option.search(usual)) == (name in USUAL), name
    assert fields().keys() > {*USUAL}
    assert len(USUAL) == 30
    said = " ".join(text.split())
    assert "default 3, free)" in said  # checkpoint.keep_last may change at a resume
    assert "default (), ahead)" in said  # stream.skip, for the steps to come


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--recipe", "dmeo"], ["did you mean 'demo'"]),
        (["--recipe", "demo", "--train.total", "2Q"], ["train.total = '2Q'", "k, M, B, G, T"]),
        (["--recipe", "demo", "--elastic.max-workers", "99"], ["elastic.max_workers = 99", "stream.global_batch"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml", "cannot be read"]),
        (["--recipe", "demo", "--stream.mixture", "{a: b"], ["{a: b", "is not YAML"]),
        (["--recipe", "demo", "--stream.mixture", "[" * 100_000], ["is not YAML"]),
        (["--recipe", "demo", "--run.id", "\x1b[31mred"], ["run.id", "[31mred"]),
    ],
)
def test_a_bad_setting_ends_with_status_two_and_one_line(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("springtide: ")
    assert "Traceback" not in text
    assert "\x1b" not in text
    assert len(text) < 5000
    for part in parts:
        assert part in text


def test_a_value_that_is_not_yaml_names_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{a: b", "[2001-99-01]", "[" * 100_000):
        assert main(["plan", "--recipe", "tiny", "--stream.mixture", text]) == 2
        assert "stream.mixture = " in (said := capsys.readouterr().err)
        assert "is not YAML" in said


def test_an_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "demo", "--optim.peek-lr", "1"]) == 2
    assert "'--optim.peak-lr'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --recipe demo --lr 1", "did you mean --optim.peak-lr"),
        ("train --recipe demo --seed 1", "did you mean --stream.seed or "),
        ("train --recipe demo --qqq 1", "see --help for all of them"),
        ("trian --recipe demo", "command = 'trian': is not one of init, data, inspect, train"),
        ("trian --recipe demo", "did you mean springtide train?"),
        ("runs", "did you mean springtide run?"),
        ("evaluate runs/a", "did you mean springtide model evaluate?"),
        ("run lst", "command = 'run lst': is not one of status"),
        ("run lst", "did you mean springtide run list?"),
        ("help", "see springtide --help"),
    ],
)
def test_an_unknown_word_is_answered_by_a_known_one(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in (told := capsys.readouterr().err)
    assert len(told.splitlines()) == 1


def test_both_spellings_lists_and_flags_are_read(tiny: Config, tmp_path: Path) -> None:
    saved = tmp_path / "saved.yaml"
    options = ["--shards.root", tiny.shards.root, "--optim.betas", "[0.8, 0.99]", "--model.tied_head", "false"]
    options += ["--shards.dataset", ""]
    assert (
        main(
            ["data", "prepare", "--recipe", "tiny", *options, "--stream.skip", "[3, 4]", "--save", str(saved), "--json"]
        )
        == 0
    )
    config = configs.load_config(saved)
    assert config.optim.betas == (0.8, 0.99)
    assert config.model.tied_head is False
    assert config.stream.skip == (3, 4)
    assert config.shards.dataset == tiny.shards.dataset


@pytest.mark.parametrize("new", [True, False])
def test_prepare_shows_the_dataset_it_made_for_a_mixture(
    new: bool, tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The corpus fills the empty place of a mixture; a mixture without one has nothing to prepare and is shown."""
    old = tiny.shards.dataset
    mixture = json.dumps({"old": old, "again": "" if new else old})
    options = ["--recipe", "tiny", "--shards.root", str(tmp_path), "--stream.mixture", mixture]
    assert main(["data", "prepare", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dataset"] in ([*map(str, tmp_path.iterdir())] if new else [old])


def test_inspect_shows_a_dataset_and_finds_a_changed_byte(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    assert main(["inspect", tiny.shards.dataset]) == 0
    assert "row 0: " in capsys.readouterr().out
    copy = tmp_path / "copy"
    shutil.copytree(tiny.shards.dataset, copy)
    assert main(["inspect", str(copy), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["rows"] > 0
    shard = copy / "heldout-00000.parquet"
    shard.write_bytes(shard.read_bytes().replace(b"PAR1", b"PAR2", 1))
    assert main(["inspect", str(copy), "--verify"]) == 1
    assert "heldout-00000.parquet" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2
    assert "checkpoint" in capsys.readouterr().err


def test_inspect_says_what_a_folder_is_and_which_command_shows_it(
    tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "root" / "first").mkdir(parents=True)
    (tmp_path / "root" / "first" / "config.yaml").write_text("")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for path, parts in {
        tmp_path / "root": ("is a folder of runs", "springtide run list", "springtide inspect", "root/first"),
        tmp_path / "sweep": ("is a sweep", "springtide run list", "sweep.html"),
        tmp_path / "nothing": ("is empty or does not exist", "<root>/<run id>"),
    }.items():
        assert main(["inspect", str(path)]) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in parts), said


def test_the_cluster_file_is_valid_for_ray() -> None:
    import jsonschema
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    cluster = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    validate_config(prepare_config(cluster))  # with Ray's defaults


def test_the_cluster_file_opens_nothing_to_the_internet() -> None:
    """The cluster file opens nothing to the internet and runs what was built here."""
    cluster = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    profiles = set()
    for node in cluster["available_node_types"].values():
        settings = node["node_config"]
        assert settings["MetadataOptions"]["HttpTokens"] == "required"
        assert settings["SecurityGroupIds"], "Ray's own lets everyone to port 22"
        assert settings["ImageId"], "Ray's own is at its end of life"
        profiles.add(settings["IamInstanceProfile"]["Name"])
    assert profiles == {"springtide-head", "springtide-worker"}, "Ray's own has all rights on EC2 and S3"
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    starts = [cluster[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")]
    assert all(re.search(r"RAY_AUTH_MODE=token( \w+=\d+)* ray start", start) for start in starts)
    assert all("RAY_gcs_rpc_server_reconnect_timeout_s=300" in start for start in starts), (
        "a head may be away for minutes"
    )
    assert "--dashboard-host=127.0.0.1" in starts[0]
    for command in (*cluster["setup_commands"], *cluster["head_setup_commands"]):
        assert "://" not in command, "whoever owns a name elsewhere would own every node"
        assert "pip install" not in command or "-c " in command
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert f"dist/springtide-{version}-py3-none-any.whl" in cluster["file_mounts"].values()
    page = (REPOSITORY / "docs" / "how-to" / "aws.md").read_text()
    worker, head = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    for policy in (worker, head):
        for statement in policy["Statement"]:
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not [action for action in actions if "*" in action]
    assert all("BUCKET" in statement["Resource"] for statement in worker["Statement"])


@pytest.mark.processes
def test_platform_is_the_standard_librarys_from_the_repository_root() -> None:
    program = "import platform, springtide, uuid; print(platform.system())"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Linux"


def test_plan_says_what_a_record_of_capacity_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n1800000,remove,a\n3600000\n")
    assert main(["plan", "--trace", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hours"], found["most_nodes"], found["springtide"]["restarts"]) == (1.0, 2, 1)
    assert found["springtide"]["of_ideal"] > found["checkpoint_restart"]["of_ideal"]
    assert found["tuned"]["of_ideal"] > found["checkpoint_restart"]["of_ideal"]
    dear = ["--copies", "2", "--store-every", "60", "--save", "1", "--lanes", "3", "--notice", "0"]
    assert main(["plan", "--trace", str(trace), "--replica-shards", "1", *dear]) == 0
    assert "at springtide's time per restart" in capsys.readouterr().out
    given = ["--trace", str(trace)]
    for options, said in (
        ([*given, "--times", "0"], "--times = 0: is not a number of at least 1"),
        ([*given, "--store-every", "nan"], "--store-every = nan: is not a number"),
        ([*given, "--lanes", "1"], "--lanes = 1: is less than the 2 nodes"),
        ([*given, "--mttf", "3"], "--mttf, too"),
        (["--days", "3"], "--days = 3.0: is for recorded spot capacity"),
        ([*given, "--recipe", "tiny"], "simulates a run by its figures alone"),
        (["--recipe", "tiny", "--measured", "runs/a"], "give --cluster, too"),
        (["--recipe", "tiny", "--cluster", "nodes.yaml", "--workers", "3"], "--workers = 3: is the plan's to choose"),
        (["--trace", str(tmp_path / "none")], "cannot be read"),
        (["--mttf", "3"], "--nodes = 0: is not a number of at least 1"),
        (["--mttf", "1e-9", "--nodes", "8"], "--mttf = 1e-09: is not a number of at least 0.001"),
        (["--mttf", "0.01", "--nodes", "8", "--days", "1e9"], "--days over --mttf, in failures"),
        (["--mttf", "3", "--nodes", "8", "--hangs", "0.6", "--racks", "0.6"], "--hangs and --racks together = 1.2"),
    ):
        assert main(["plan", *options]) == 2
        assert said in capsys.readouterr().err
    trace.write_text("what is this")
    assert main(["plan", *given]) == 2


def test_plan_prices_a_deadline_or_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what a deadline costs and refuses one that cannot be met."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n3600000,remove,a\n7200000\n")
    market = ["plan", "--trace", str(trace), "--work", "2.9", "--price", "3", "--spot-price", "1"]
    assert main([*market, "--deadline", "1.9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["workers"], found["spot"]["in_time"], found["uniform_progress"]["in_time"]) == (2, False, True)
    assert found["spot"]["dollars"] < found["uniform_progress"]["dollars"] < found["on_demand"]["dollars"]
    assert main([*market, "--deadline", "1.9"]) == 0
    assert "TOO LATE" in capsys.readouterr().out
    for options, said in (
        (["--deadline", "1.2"], "take 1.51 h; give at least 1.51 (9.03 dollars), or --nodes 3 (10.80 dollars)"),
        (["--deadline", "3"], "--deadline = 3.0: is later than the end of the record, after 2 h"),
        (["--deadline", "nan"], "--deadline = nan: is not a number"),
        (["--deadline", "1.9", "--price", "0"], "--price = 0.0: is missing"),
        (["--deadline", "1.9", "--spot-price", "4"], "--spot-price = 4.0: is not less than --price (3)"),
        (
            ["--deadline", "1.9", "--nodes", "8", "--lanes", "4"],
            "--nodes = 8: is not from --min-workers (1) to --lanes (4)",
        ),
    ):
        assert main([*market, *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "--mttf", "3", "--nodes", "8", "--deadline", "3"]) == 2
    assert "spot capacity" in capsys.readouterr().err


def test_plan_says_what_a_reliable_cluster_loses(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--mttf", "8", "--nodes", "32", "--days", "10", "--lanes", "256", "--hangs", "0.2", "--racks", "0.1"]
    assert main(["plan", *cluster, "--restart", "20", "--hang", "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hours"], found["most_nodes"]) == (240.0, 32)
    assert found["springtide"]["hanging"] > 0
    assert found["springtide"]["of_ideal"] > 0.97


def test_a_notice_is_left_where_nodes_look(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    assert main(["notice", "--in", "25", "--file", str(file)]) == 0
    assert file.read_text() == "25"
    assert list(tmp_path.iterdir()) == [file]
    assert main(["notice", "--in", "-1", "--file", str(file)]) == 2


def test_what_the_output_cannot_encode_ends_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Folder(tmp_path / "日本"))
    run.write_config(configs.recipe("demo"))
    with Journal(run.folder) as journal:
        journal(Stopped(step=0, status="failed", reason="a \ufffd"))
    for encoding in ("latin-1", "ascii"):
        for words in (
            ["run", "list", str(tmp_path)],
            ["run", "status", run.folder.url],
            ["report", run.folder.url],
        ):
            out = io.TextIOWrapper(io.BytesIO(), encoding)
            monkeypatch.setattr(sys, "stdout", out)
            assert main(words) == 0
            out.flush()
            assert b"??" in out.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("last", "checkpoints", "said"),
    [
        (300, ["step-0000000300"], "stopped at step 300 of 60; the same command with --resume continues from there"),
        (
            304,
            ["step-0000000300"],
            "stopped at step 304 of 60; step 300 is the newest that is saved, and the same command",
        ),
        (4, [], "stopped at step 4 of 60, before its first checkpoint; the same command with --resume begins again"),
    ],
)
def test_a_stopped_run_says_from_which_step_it_resumes(last: int, checkpoints: list[str], said: str) -> None:
    """A driver that was killed has saved less than it trained."""
    run: Any = SimpleNamespace(last_step=last, checkpoints=checkpoints, config=configs.recipes.tiny())
    assert how_it_goes_on(run).startswith(said)
