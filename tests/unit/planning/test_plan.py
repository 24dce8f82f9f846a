"""What a plan says: which nodes fit, where each figure comes from, what a measured run changes, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.cli.main import main
from springtide.config import Config
from springtide.config.cluster_file import parse_cluster
from springtide.errors import ConfigError
from springtide.events import Saved, Started, StepDone
from springtide.planning.device_memory import usable_bytes
from springtide.planning.plan import _room, plan
from springtide.planning.spot import Market
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.tracking.journal import Journal

CLUSTER = """
node_types:
  - name: h100
    devices: 8
    device: H100
    host_memory: 2TB
    prices: {on_demand: 98.32, spot: 39.5}
    links: {inside: 450GB, between: 400GB}
    max_nodes: 4
    trace: trace.csv
  - name: l4
    device: L4
    host_memory: 64GB
    prices: {on_demand: 0.8}
    links: {between: 3GB}
    max_nodes: 2
storage_price: 0.02
"""
CONFIG = configs.recipes.gpu_1b()
STEP_S = 0.25


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    (tmp_path / "trace.csv").write_text("0,4\n1,3\n1.5,4\n3,2\n3.2,4\n10,4\n")
    (tmp_path / "nodes.yaml").write_text(CLUSTER)
    return str(tmp_path / "nodes.yaml")


def write_group(journal: Journal, done: int, steps: int, workers: int, step_s: float, peak: str) -> None:
    """What a worker group tells that trains on from step ``done``."""
    journal(
        Started(step=done, world_size=workers, num_parameters=1_439_270_912, peak_source=peak, time_s=1.0 + done)  # type: ignore[arg-type]
    )
    for step in range(1, steps + 1):
        told = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens": step, "step_tokens": 1, "mfu": 0.4}
        told |= {"data_wait_s": 0.0, "tokens_per_s": 1.0, "memory_bytes": 1, "world_size": workers}
        slow = 9.0 if step <= 3 else step_s + 0.01 * (step % 2)  # the first ones compile
        journal(StepDone(step=done + step, step_time_s=slow, digest="0" * 16, time_s=1.0 + done + step, **told))  # type: ignore[arg-type]


def with_run(
    folder: Path,
    config: Config,
    steps: int = 12,
    peak: str = "NVIDIA H100 80GB HBM3's data sheet",
    later: Sequence[tuple[int, int, float]] = (),
) -> str:
    """A run's folder, as a run of ``config`` on 8 workers leaves it. ``later`` groups: their steps, workers, time of a step."""
    config = config.override({"run.id": "measured", "run.root": str(folder / "runs")})
    run = Run(Folder(config.run.root) / "measured")
    run.write_config(config)
    with Journal(run.folder) as journal:
        write_group(journal, 0, steps, 8, STEP_S, peak)
        for times, workers, step_s in later:
            write_group(journal, steps, times, workers, step_s, peak)
            steps += times
        journal(Saved(step=steps, name="step", size_bytes=1, save_time_s=9.0, stall_s=0.7, time_s=99.0))  # type: ignore[arg-type]
    return str(folder / "runs" / "measured")


def test_the_cheapest_comes_first_and_misfits_last(cluster: str) -> None:
    """The cheapest comes first and what does not fit last with what would."""
    found = plan(CONFIG, cluster)
    assert [row.fits for row in found.rows] == [True] * 3 + [False] * 2
    assert [row.dollars for row in found.rows[:3]] == sorted(row.dollars for row in found.rows[:3])
    last = found.rows[-1]
    assert (last.node_type, last.world_size) == ("l4", 2)
    assert "train.micro_batch = 1 needs" in last.why


def test_dollars_are_hours_of_nodes(cluster: str) -> None:
    for row in plan(CONFIG, cluster).rows[:3]:
        assert row.on_demand_dollars == pytest.approx(row.days * 24 * row.nodes * 98.32)
        assert row.tokens_per_s == pytest.approx(CONFIG.tokens_per_step / row.step_s)
        assert row.days == pytest.approx(26e9 / row.tokens_per_s / 86400, rel=0.02)  # saves take the rest
        assert row.spot_days is not None
        assert row.of_ideal is not None
        assert row.spot_days > 0.99 * row.days
        assert 0.5 < row.of_ideal <= 1
        assert row.checkpoint_bytes == 12 * 1_439_270_912
        assert row.storage_dollars == pytest.approx(3 * row.checkpoint_bytes / 1e9 * 0.02)


def test_each_figure_says_where_it_comes_from(cluster: str) -> None:
    found = plan(CONFIG, cluster)
    sources = found.cheapest.sources
    assert sources["tokens_per_s"] == "roofline x 0.62 assumed"
    assert sources["memory"] == "arithmetic"
    assert "simulated on trace.csv" in sources["spot"]
    text = found.describe()
    assert "R: roofline, not measured" in text
    assert " R " in text
    assert " m " not in text.splitlines()[2]
    assert "assumed efficiency of 0.62" in text
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["rows"][0]["fits"] is True


def test_a_notebook_shows_a_table_in_which_names_are_text(cluster: str) -> None:
    Path(cluster).write_text(CLUSTER.replace("name: h100", "name: <b>h100"))
    page = plan(CONFIG, cluster)._repr_html_()
    assert "&lt;b&gt;h100" in page
    assert "<b>" not in page
    assert page.count("<tr") == 1 + 5


def test_auto_takes_the_largest_micro_batch_that_fits(cluster: str) -> None:
    found = plan(CONFIG.override({"train.micro_batch": "auto"}), cluster)
    sizes = {(row.node_type, row.world_size): row.micro_batch for row in found.rows if row.fits}
    assert sizes["h100", 8] == 16
    assert sizes["l4", 2] == 2


def test_a_measured_run_is_told_as_measured_and_scales_the_rest(cluster: str, tmp_path: Path) -> None:
    found = plan(CONFIG, cluster, with_run(tmp_path, CONFIG))
    rows = {row.world_size: row for row in found.rows if row.fits}
    assert rows[8].sources["tokens_per_s"] == "measured in run measured"
    assert rows[8].step_s == pytest.approx(STEP_S, abs=0.011)
    assert math.isnan(rows[8].efficiency)
    assert rows[16].sources["tokens_per_s"].startswith("roofline x ")
    assert rows[16].efficiency == rows[32].efficiency
    assert "a save costs 0.70 s" in rows[8].save_reason
    assert "its cost measured in measured" in rows[8].save_reason
    assert any(" m " in line for line in found.describe().splitlines())


def test_steps_of_groups_of_other_sizes_do_not_count(cluster: str, tmp_path: Path) -> None:
    """Steps of groups of other sizes under the same driver do not count."""
    found = plan(CONFIG, cluster, with_run(tmp_path, CONFIG, 40, later=[(12, 16, 0.125)]))
    rows = {row.world_size: row for row in found.rows if row.fits}
    assert rows[16].sources["tokens_per_s"] == "measured in run measured"
    assert rows[16].step_s == pytest.approx(0.125, abs=0.011)
    assert rows[8].sources["tokens_per_s"].startswith("roofline x ")
    assert "16 workers on h100, median of 9 steps: 0.1" in found.calibration


def test_a_recent_restart_is_measured_by_the_group_before(cluster: str, tmp_path: Path) -> None:
    """A run that ended soon after a restart is measured by the group before."""
    found = plan(CONFIG, cluster, with_run(tmp_path, CONFIG, later=[(4, 16, 0.125)]))
    rows = {row.world_size: row for row in found.rows if row.fits}
    assert rows[8].sources["tokens_per_s"] == "measured in run measured"
    assert rows[8].step_s == pytest.approx(STEP_S, abs=0.011)


def test_a_run_of_other_steps_only_calibrates(cluster: str, tmp_path: Path) -> None:
    """A run of other steps calibrates and is not told as measured."""
    run = with_run(tmp_path, CONFIG.override({"train.micro_batch": 4}))
    assert all(
        row.sources["tokens_per_s"].startswith("roofline") for row in plan(CONFIG, cluster, run).rows if row.fits
    )


@pytest.mark.parametrize(
    ("peak", "on", "steps", "said"),
    [
        ("cpu", "", 12, "does not say on which of h100, l4 it ran .cpu.; add --measured-on NODE_TYPE"),
        (
            "cpu",
            "h10",
            12,
            "measured-on = 'h10': is not a node type of the cluster file: h100, l4; did you mean 'h100'",
        ),
        ("cpu", "h100", 5, "has 2 steps after the first 3 of its last worker group, and 5 are needed; train it longer"),
    ],
)
def test_a_run_that_cannot_calibrate_is_refused(
    cluster: str, tmp_path: Path, peak: str, on: str, steps: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(CONFIG, cluster, with_run(tmp_path, CONFIG, steps, peak), on)


def test_a_recipe_that_fits_nothing_is_refused_with_the_smallest_changes(cluster: str) -> None:
    with pytest.raises(ConfigError) as told:
        plan(configs.recipes.llama3_8b().override({"parallel.recompute": "none", "train.micro_batch": 2}), cluster)
    said = str(told.value)
    assert "8,030.3M parameters" in said
    assert "2 node types" in said
    assert "  h100, 32 workers: " in said
    assert "parallel.recompute = " in said
    assert "a node type of 32 workers with a B200" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.adapter": "lora"}, "model.adapter = 'lora': is not known to a plan"),
        ({"optim.source": "mine:optimizer"}, "optim.source = 'mine:optimizer': is not known to a plan"),
    ],
)
def test_what_arithmetic_does_not_know_is_refused(cluster: str, changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(CONFIG.override(changes), cluster)


def test_a_group_that_lanes_forbid_is_a_row_with_its_reason(cluster: str) -> None:
    """A group that lanes or shards do not allow is a row that says so."""
    few = CONFIG.override({"stream.global_batch": 16, "elastic.max_workers": 8})
    said = [row.why for row in plan(few, cluster).rows if row.node_type == "h100" and not row.fits]
    assert said == ["stream.lanes = 16 are fewer than 32 workers; raise stream.global_batch"]
    odd = CONFIG.override({"parallel.shard_workers": 16, "elastic.min_workers": 16, "elastic.max_workers": 16})
    said = [row.why for row in plan(odd, cluster).rows if row.world_size == 8]
    assert said == ["8 workers are not a multiple of parallel.shard_workers = 16; change it, or use 0"]


def test_a_save_that_no_node_can_stage_is_told(cluster: str) -> None:
    small = CLUSTER.replace("host_memory: 64GB", "host_memory: 8GB")
    Path(cluster).write_text(small)
    said = [row.why for row in plan(CONFIG, cluster).rows if row.node_type == "l4"]
    assert said[0].startswith("a save stages 17.3 GB")


def test_without_a_record_spot_is_told_as_if_none_were_lost(cluster: str) -> None:
    Path(cluster).write_text(CLUSTER.replace("    trace: trace.csv\n", ""))
    row = plan(CONFIG, cluster).cheapest
    assert row.of_ideal is None
    assert row.sources["spot"] == "no record for h100: as if no spot node were ever lost"


def test_an_unreadable_record_is_refused_with_its_node_type(cluster: str) -> None:
    """A record that cannot be read is refused with its node type."""
    Path(cluster).with_name("trace.csv").unlink()
    with pytest.raises(ConfigError, match=r"nodes\.yaml.*h100.*trace\.csv"):
        plan(CONFIG, cluster)


def test_a_long_record_is_cut_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("".join(f"{hour},{1 + hour % 2}\n" for hour in range(1000)))
    text = CLUSTER.replace("trace.csv", str(tmp_path / "long.csv"))
    market = Market.of(parse_cluster(text.encode(), "c.yaml").node_types[0])
    assert market.trace is not None
    assert len(market.trace.changes) == 300
    assert market.describe() == "long.csv, its first 300 of 999 hours"


def test_a_save_interval_that_is_auto_follows_the_record(cluster: str) -> None:
    auto = plan(CONFIG, cluster).cheapest
    fixed = plan(CONFIG.override({"checkpoint.every_steps": 100}), cluster).cheapest
    assert "losses from trace.csv" in auto.save_reason
    assert fixed.save_every_s == pytest.approx(100 * fixed.step_s)
    ends = plan(CONFIG.override({"checkpoint.every_steps": 0}), cluster)
    assert math.isinf(ends.cheapest.save_every_s)
    assert "at the end" in ends.describe()


def test_the_command_prints_the_table_or_one_object(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "gpu_1b", "--cluster", cluster]) == 0
    assert "cheapest first" in capsys.readouterr().out
    assert main(["plan", "--recipe", "gpu_1b", "--cluster", cluster, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["node_type"] == "h100"
    assert main(["plan", "--recipe", "gpu_1b", "--cluster", "nowhere.yaml"]) == 2
    assert "cluster = 'nowhere.yaml': " in capsys.readouterr().err


def test_no_plan_promises_what_training_refuses() -> None:
    l4 = parse_cluster(CLUSTER.encode(), "c.yaml").node_types[1]
    config = configs.recipes.gpu_1b().override(
        {"elastic.min_workers": 8, "elastic.max_workers": 16, "parallel.shard_workers": 8}
    )
    assert _room(config, l4) == usable_bytes(config, l4.device.memory) < 0.9 * l4.device.memory
    alone = {"elastic.min_workers": 1, "elastic.max_workers": 1, "parallel.shard_workers": 0}
    assert _room(config.override(alone), l4) == 0.9 * l4.device.memory
