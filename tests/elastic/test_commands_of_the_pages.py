"""The commands of README and docs are run, in the order of their page, with a tiny config instead of the recipe they name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from springtide.cli.main import main
from springtide.config import Config
from springtide.config.files import dump

pytestmark = pytest.mark.cluster
REPOSITORY = Path(__file__).parents[2]
NOT_RUN = {
    "springtide drill": "clusters of its own: `make long SUBJECT=drills`",
    "springtide sweep": "minutes of trials: `make long SUBJECT=sweeps`",
    "springtide train --config runs/first/best.yaml": "of a sweep",
    **dict.fromkeys(
        (
            "springtide data prepare --config mine.yaml --corpus.source 'later",
            "springtide train --config mine.yaml --run.id RUN --resume --stream.mixture",
        ),
        "two batches of text and a run between them: tests/distributed/test_new_text.py",
    ),
    **dict.fromkeys(
        (f"springtide run {verb}" for verb in ("save", "resize", "pause", "continue", "stop")),
        "they steer a run that trains: test_run_control.py",
    ),
    **dict.fromkeys(
        (
            "springtide model import hf://Qwen",
            "springtide train --recipe sft --train.start-from runs/base",
            "springtide model generate runs/harbour",
            "springtide train --recipe lora --train.start-from runs/harbour",
            "springtide model export runs/tides",
        ),
        "a chat model: test_chat_tutorial.py",
    ),
    **dict.fromkeys(
        ("springtide init", "springtide train mine.yaml"), "tests/unit/cli: a config file, and its lengths"
    ),
    "transformers serve": "tests/unit/hf/test_served_export.py runs it",
    "vllm serve": "vLLM",
    "serve run": "vLLM",
    "springtide model evaluate runs/RUN --tasks": "data of the Hub: tests/unit/eval/test_tasks.py",
    "make": "this test is part of it",
    "ray job submit": "a bucket",
    "ray get-auth-token": "it writes a token into the home directory",
    "pip wheel": "a release",
    "duckdb": "another program",
    "torchrun": "tests/unit/training/test_without_ray.py runs it",
    "/tmp/try/bin/": "a fresh environment",
    "python3 -m venv": "a fresh environment",
    ".venv/bin/python -m": "pytest and pip",
}
"""The beginning of a command -> what it would need, or who runs it."""
RUN, NOT_RUN_COUNT = 73, 49
"""How many there are of each: whoever adds a command to a page sees here whether it is run."""
SLOW = (
    "springtide data prepare runs/RUN/config.yaml --label-by",
    "springtide data prepare --recipe dpo",
    "springtide train --recipe distill",
    "springtide train --recipe dpo",
    "springtide plan",
    "springtide model evaluate runs/RUN-average",
    "springtide model evaluate runs/RUN --step",
)
"""Those of them that take ten seconds or more: `make long SUBJECT=pages` runs them, with all training."""
REPLACED = {
    ".venv/bin/springtide": "springtide",
    "--recipe demo": "--config tiny.yaml",
    "runs/RUN": "runs/mine",
    "runs/TRUNK": "runs/mine",
    "runs/TEACHER": "runs/mine",
    "runs/FIRST": "runs/mine",
    "runs/A runs/B": "runs/mine runs/mine",
    "step-0000000100": "step-0000000060",
    "--step 100": "--step 60",
    "--trace FILE": "--trace trace.csv",
    "--deadline 8 --work 180": "--deadline 0.9 --work 1.2",
    "--train.total 2M": "--train.total 92160",
    "--train.total 4B --optim.decay 500M": "--train.total 92160 --optim.decay 15360",
    "datasets/DATASET": "DATASET",
}


def commands() -> list[tuple[str, str]]:
    """(page, command) of all console blocks, comments removed."""
    found = []
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        in_console = False
        for line in map(str.strip, page.read_text().splitlines()):
            if line.startswith("```"):
                in_console = line == "```console"
            elif in_console and line.startswith("$ "):
                found.append((page.name, line[2:].split(" #")[0].strip()))
    return found


def is_run(command: str) -> bool:
    """Whether this test runs ``command``."""
    return not command.startswith(tuple(NOT_RUN)) and not command.removeprefix(".venv/bin/").startswith(tuple(NOT_RUN))


def test_every_command_is_run_or_counted() -> None:
    known = commands()
    runs = [command for _, command in known if is_run(command)]
    assert all(command.removeprefix(".venv/bin/").startswith("springtide ") for command in runs), runs
    assert (len(runs), len(known) - len(runs)) == (RUN, NOT_RUN_COUNT)


@pytest.fixture
def folder(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where a reader does: with ``tiny.yaml``, some text and a trace."""
    monkeypatch.chdir(tmp_path)
    changes = {"run.root": "runs", "elastic.max_workers": 2, "shards.dataset": "", "optim.ema_half_life": 20_000}
    text = dump(tiny.override(changes))
    for name in ("tiny.yaml", "tuned.yaml", "long.yaml"):
        Path(name).write_text(text)
    Path("trace.csv").write_text("0,2\n0.5,1\n0.6,2\n1,2\n")
    Path("prompts.txt").write_text("def \nimport \n")
    Path("nodes.yaml").write_text(
        (REPOSITORY / "docs/how-to/plan.md").read_text().split("```yaml\n")[1].split("```")[0]
    )
    Path("chats.jsonl").write_text(
        "".join(f'{{"prompt": "{n} + 1?", "completion": "{n + 1}."}}\n' for n in range(3000))
    )
    Path("pairs.jsonl").write_text(
        "".join(f'{{"prompt": "{n}", "chosen": "{n + 1}", "rejected": "0"}}\n' for n in range(3000))
    )
    Path("folder").mkdir()
    for number in range(200):
        Path("folder", f"{number}.txt").write_text(f"{number} is a number.\n" * 300)


def words_of(command: str, dataset: str, new: str, dry: bool) -> list[str]:
    """The arguments of ``springtide``."""
    for named, ours in {**REPLACED, "datasets/NEW": new, "DATASET": dataset}.items():
        command = command.replace(named, ours)
    if dry and command.startswith("springtide train") and "--help" not in command:
        command += " --dry-run"
    return shlex.split(command)[1:]


@pytest.mark.parametrize(
    "dry",
    [True, pytest.param(False, marks=pytest.mark.timeout(3600))],
    ids=["trains_once", "trains"],
)
@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster", "folder")
def test_every_command_of_the_pages_ends_well(
    dry: bool, tiny: Config, poems: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", "tiny.yaml", "--run.id", "mine"]) == 0
    for page, command in commands():
        if not is_run(command) or (dry and command.startswith(SLOW)):
            continue
        words = words_of(command, tiny.shards.dataset, poems, dry)
        try:
            status = main(words)
        except SystemExit as ended:  # --help
            status = int(ended.code or 0)
        assert status == 0, f"{page}: {command}: as {words}: {capsys.readouterr().err}"
