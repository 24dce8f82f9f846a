"""What ``springtide queue`` and the settings of a queue refuse, before anything is connected or written."""

from __future__ import annotations

import pytest

from springtide import config as configs
from springtide.api.queue import QueueTable
from springtide.api.sweep import sweep
from springtide.cli.main import main
from springtide.errors import ConfigError
from springtide.ray.cluster.worker_queue import QueueRow


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "RAY_ADDRESS = '': names no cluster"),
        (["--quota", "research"], "--quota = 'research': is not a queue and a number"),
        (["--quota", "research=-1"], "is not a queue and a number"),
        (["--quota", "=4"], "is not a queue and a number"),
        (["--quota", "research=many"], "write research=8 or research=none"),
    ],
)
def test_bad_input_is_refused_by_name(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["queue", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_priority_needs_a_queue() -> None:
    with pytest.raises(ConfigError, match=r"run.priority.*run.queue is empty"):
        configs.recipes.tiny().override({"run.priority": 3})


def test_a_sweep_takes_no_queue(tmp_path: object) -> None:
    base = configs.recipes.tiny().override({"run.queue": "research", "run.root": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"run\.queue.*sweep"):
        sweep(base, "tune_spaces/lr_and_decay.py")


def test_the_table_is_one_line_a_run() -> None:
    rows = [
        QueueRow("big", "production", 10, 2, 2, 2, 2, ""),
        QueueRow("small", "research", 0, 1, 1, 1, 3, "'big' (priority 10) gets 2 workers"),
    ]
    assert QueueTable(rows, {"research": 8}).describe().splitlines() == [
        "run    queue       priority  workers  of      waits for",
        "big    production  10        2        2 to 2",
        "small  research    0         1        1 to 3  'big' (priority 10) gets 2 workers",
        "queue research: at most 8 workers",
    ]
