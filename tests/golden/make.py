"""Make the golden folder: runs, datasets and a sweep as commit 0ba2dd87 wrote them. ``python make.py CHECKOUT``

CHECKOUT is an untouched checkout of that commit; its dependencies must be installed for this Python. The folder is made at
``FOLDER`` and packed into ``golden.tar.xz`` beside this script, which takes six minutes on two cores. ``golden.py`` of
tests/programs unpacks it to the same place: configs hold absolute paths, and datasets the times of their sources' files.

    text/, chats.jsonl          sources: two of plain text and JSON lines, and one of chats
    project/                    a user's working folder: configs, a sweep's space, a model, a listener, a copied jobs/train.py
    datasets/                   a dataset of two sources
    runs/finished               2 workers, resized to 1 while it trained, with a note and samples, finished
    runs/unfinished             2 workers, Ctrl-C; with MLflow
    runs/own                    own model and listener, started by the copied jobs/train.py; its driver was killed
    runs/sweep                  two trials; Ctrl-C while the second trained
    following/                  text that arrived in two batches, their datasets, and runs/followed, which took up the second
    elsewhere/                  runs/base, its dataset and its own roots; runs/tuned: LoRA on chats from it, Ctrl-C
    made.json                   commands of the runs, losses of the uninterrupted runs, and what commands printed at that commit
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

COMMIT = "0ba2dd87"
FOLDER = Path("/tmp/springtide-golden")
ARCHIVE = Path(__file__).with_name("golden.tar.xz")
TIME_S = 1_700_000_000
"""Last change of every source file. Datasets hold it, and archives keep whole seconds."""
PATIENCE_S = 600.0
LENGTH, BATCH = 32, 12
"""Tokens in a row, rows in a step."""
TOTAL = 120
"""Steps of a run."""
LONGER = 240
"""Steps of the run that gets commands while it trains."""

SPRINGTIDE = "import sys; sys.argv[0] = 'springtide'; from springtide.cli.main import main; sys.exit(main())"
TAKE_UP = f"from springtide.app import take_up; take_up.LOOK_S = 0.2; {SPRINGTIDE}"
"""As ``springtide``, which looks for new datasets once a minute."""

MODEL = '''"""A user's own model: a causal convolution."""

import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Module):
    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([nn.Conv1d(width, width, 4)])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BDL = self.embedding(ids_BL).transpose(1, 2)
        for block in self.blocks:
            x_BDL = x_BDL + F.gelu(block(F.pad(x_BDL, (3, 0))))
        return self.head(x_BDL.transpose(1, 2))


def build(config, vocab_size, eos_id, bos_id):
    return Convolution(config.dim, vocab_size)
'''
LISTENER = '''"""A user's own listener: one line per event in the run's folder."""

from pathlib import Path

from springtide.events import StepDone


def listen(run):
    file = Path(run.folder.where("heard.txt"))

    def hear(event):
        with file.open("a") as lines:
            lines.write(f"{type(event).__name__} {event.step if isinstance(event, StepDone) else ''}\\n")

    return hear
'''
SPACE = f'''"""Two learning rates."""

SPACE = {{"optim.peak_lr": ("choice", 0.01, 0.001)}}
OBJECTIVE = {{"metric": "heldout_loss", "mode": "min"}}
BUDGET = {{"trials": 2, "tokens_per_trial": {TOTAL * LENGTH * BATCH}, "rungs": 2}}
'''
SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "dim": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 16},
    "shards": {"sequence_length": LENGTH, "rows_per_group": 64, "groups_per_shard": 8, "heldout_fraction": 0.1},
    "stream": {"global_batch": BATCH, "lanes": 4, "max_epochs": 100.0},
    "parallel": {"reduction": "fp64", "threads": 1},
    "optim": {"peak_lr": 0.01, "warmup": 10 * BATCH * LENGTH},
    "corpus": {"max_files": 0},
    "train": {"total": TOTAL * BATCH * LENGTH, "eval_every": 60, "eval_tokens": 512, "sample_tokens": 0},
    "checkpoint": {"every_steps": 20, "keep_last": 2, "when_busy": "queue"},
    "elastic": {"notices": "off"},
    "track": {"mlflow_uri": "off"},
}
TEXTS: dict[str, dict[str, Any]] = {
    "corpus": {
        "tokenizer": "bytes",
        "sources": {
            "plain": f"{FOLDER}/text/plain",
            "records": {"source": f"{FOLDER}/text/records.jsonl", "field": "body"},
        },
    },
    "stream": {"weights": [{"shares": {"plain": 2.0, "records": 1.0}}]},
}


def merged(*tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return sections of settings; later tables win."""
    found: dict[str, dict[str, Any]] = {}
    for table in tables:
        for section, settings in table.items():
            found[section] = {**found.get(section, {}), **settings}
    return found


def options(*tables: dict[str, dict[str, Any]]) -> list[str]:
    """Return settings as options of the command line."""
    found = []
    for section, settings in merged(*tables).items():
        for name, value in settings.items():
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            found += [f"--{section}.{name.replace('_', '-')}", text]
    return found


def words(rng: random.Random, known: Sequence[str]) -> str:
    return " ".join(rng.choices(known, k=rng.randint(40, 120)))


def dated(path: Path, text: str) -> None:
    """Write a source file with a whole second as its last change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (TIME_S, TIME_S))


def write_sources() -> None:
    """Write texts, chats and the user's working folder."""
    rng = random.Random(0)
    known = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(200)]
    for number in range(40):
        dated(FOLDER / "text" / "plain" / f"{number:02d}.txt", words(rng, known))
    records = (json.dumps({"id": number, "body": words(rng, known)}) for number in range(40))
    dated(FOLDER / "text" / "records.jsonl", "".join(f"{line}\n" for line in records))
    chats = []
    for _ in range(60):
        question, answer = rng.choice(known), rng.choice(known)
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    dated(FOLDER / "chats.jsonl", "".join(f"{json.dumps({'messages': one})}\n" for one in chats))
    for batch in range(2):
        for number in range(20):
            name = f"batch-{batch}/{number:02d}.txt"
            dated(FOLDER / "following" / "later" / name, words(rng, known))
    project = FOLDER / "project"
    dated(project / "golden_model.py", MODEL)
    dated(project / "golden_listener.py", LISTENER)
    dated(project / "space.py", SPACE)
    # JSON is YAML, too
    given = merged(SETTINGS, TEXTS, {"run": {"id": "unfinished", "root": f"{FOLDER}/runs"}})
    given = merged(given, {"shards": {"root": f"{FOLDER}/datasets"}, "track": {"mlflow_uri": ""}})
    dated(project / "unfinished.yaml", json.dumps(given, indent=2))


def arrive(batch: int) -> None:
    """Let a batch of text arrive in the folder that is followed."""
    text = FOLDER / "following" / "text"
    text.mkdir(exist_ok=True)
    (FOLDER / "following" / "later" / f"batch-{batch}").rename(text / f"batch-{batch}")


class Maker:
    """Runs commands of the checkout in the user's working folder."""

    def __init__(self, code: Path, home: str) -> None:
        """``code``: a folder with the checkout's ``platform``. ``home``: with the key that seals trust in the user's code."""
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))
        }
        self.environment |= {
            "PYTHONPATH": str(code / "platform"),
            "HOME": home,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.said: dict[str, Any] = {}

    @contextlib.contextmanager
    def start(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command of Python; kill it if it still runs at the end of the block."""
        print(f"{time.strftime('%X')} {' '.join(command[-6:])}", flush=True)
        project = FOLDER / "project"
        with subprocess.Popen([sys.executable, *command], cwd=project, env=self.environment, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *words: str) -> None:
        """Run a command of springtide to its end."""
        with self.start("-c", SPRINGTIDE, *words) as process:
            if status := process.wait(PATIENCE_S):
                raise SystemExit(f"springtide {' '.join(words)} ended with {status}")

    def answer(self, *words: str) -> Any:
        """Return what a command of springtide prints with --json."""
        command = [sys.executable, "-c", SPRINGTIDE, *words, "--json"]
        done = subprocess.run(
            command, cwd=FOLDER / "project", env=self.environment, text=True, check=True, stdout=subprocess.PIPE
        )
        return json.loads(done.stdout)

    def interrupt(self, run: Path, how: signal.Signals, *command: str) -> None:
        """Start a run, or its sweep; send a signal to its driver a few steps after a checkpoint."""

        def reached() -> bool:
            return bool(saved := checkpoints_of(run)) and steps_of(run) > max(saved) + 4

        with self.start(*command) as process:
            wait_for(process, reached)
            process.send_signal(how)
            process.wait(PATIENCE_S)

    def alone(self, file: Path) -> None:
        """Train the config in ``file`` without Ray."""
        group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29719"}
        command = [sys.executable, "-m", "springtide.training", "--config", str(file), "--trust-code"]
        environment = self.environment | group
        subprocess.run(command, cwd=FOLDER / "project", env=environment, check=True, stdout=subprocess.DEVNULL)


def journal_of(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run's journal, without a line that is being written."""
    lines = [line for file in sorted((run / "journal").glob("*.jsonl")) for line in file.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def steps_of(run: Path) -> int:
    """Return the last step of a run."""
    return max((event["step"] for event in journal_of(run) if event.get("kind") == "step"), default=0)


def losses_of(run: Path) -> dict[str, float]:
    """Return step -> loss; of steps that were trained again the last."""
    return {str(event["step"]): event["loss"] for event in journal_of(run) if event.get("kind") == "step"}


def checkpoints_of(run: Path) -> list[int]:
    """Return the steps of a run's committed checkpoints."""
    return [int(path.parent.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*/COMMITTED")]


def wait_for(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until ``reached``; raises SystemExit if the process ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} ended too early, or never got there")
        time.sleep(0.05)


def make_on_texts(maker: Maker) -> dict[str, list[str]]:
    """Make the dataset of two sources, and the runs and the sweep that train on it; return their commands."""
    runs, project = FOLDER / "runs", FOLDER / "project"
    roots: dict[str, dict[str, Any]] = {"run": {"root": str(runs)}, "shards": {"root": f"{FOLDER}/datasets"}}
    longer: dict[str, dict[str, Any]] = {"run": {"id": "finished"}}
    longer["train"] = {"total": LONGER * BATCH * LENGTH, "sample_tokens": 16}
    commands = {
        "finished": ["train", "--recipe", "tiny", *options(SETTINGS, TEXTS, roots, longer)],
        "unfinished": ["train", "--config", f"{project}/unfinished.yaml"],
        "own": [
            *(
                "--recipe",
                "tiny",
                *options(SETTINGS, TEXTS, roots, {"run": {"id": "own"}, "checkpoint": {"every_steps": 50}}),
            ),
            *("--model.source", "golden_model:build", "--track.listener", "golden_listener:listen"),
        ],
        "sweep": [
            *("sweep", "--space", f"{project}/space.py", "--name", "sweep", "--search", "grid", "--scheduler", "none"),
            *("--concurrent", "1", "--recipe", "tiny", *options(SETTINGS, TEXTS, roots)),
        ],
    }
    maker.run("data", "prepare", *commands["finished"][1:])
    with maker.start("-c", SPRINGTIDE, *commands["finished"]) as process:
        wait_for(process, lambda: steps_of(runs / "finished") >= 5)
        maker.run("run", "resize", str(runs / "finished"), "1")
        maker.run("run", "note", str(runs / "finished"), "one worker from here on")
        if process.wait(PATIENCE_S):
            raise SystemExit("the run that was resized failed")
    maker.interrupt(runs / "unfinished", signal.SIGINT, "-c", SPRINGTIDE, *commands["unfinished"])
    maker.interrupt(runs / "own", signal.SIGKILL, str(project / "jobs" / "train.py"), *commands["own"])
    second = runs / "sweep" / "trials" / "trial-0001"
    maker.interrupt(second, signal.SIGINT, "-c", SPRINGTIDE, *commands["sweep"])
    return commands


def make_followed(maker: Maker) -> dict[str, list[str]]:
    """Make a run that takes up a second batch of text while it trains; return its command."""
    following = FOLDER / "following"
    run = following / "runs" / "followed"
    text: dict[str, dict[str, Any]] = {"corpus": {"source": f"{following}/text", "tokenizer": "bytes"}}
    follow = ["--recipe", "tiny", *options(SETTINGS, text, {"shards": {"root": f"{following}/datasets"}})]
    follow = ["data", "prepare", "--follow", "--once", "--every", "0.1", "--at-least", "1", *follow]
    taken: dict[str, dict[str, Any]] = {"run": {"id": "followed", "root": f"{following}/runs"}}
    taken["stream"] = {"follow": f"{following}/datasets"}
    command = ["train", "--recipe", "tiny", *options(SETTINGS, text, taken)]
    arrive(0)
    maker.run(*follow)
    with maker.start("-c", TAKE_UP, *command) as process:
        wait_for(process, lambda: steps_of(run) >= 20)
        arrive(1)
        maker.run(*follow)
        wait_for(process, lambda: (run / "followed" / "0001.json").exists())
        at = json.loads((run / "followed" / "0001.json").read_text())["from_step"]
        wait_for(process, lambda: steps_of(run) >= at + 10)
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
    (following / "later").rmdir()
    return {"followed": command}


def make_tuned(maker: Maker) -> dict[str, list[str]]:
    """Make a base with roots of its own, and a LoRA run on chats, which has the same roots; return their commands."""
    elsewhere, project = FOLDER / "elsewhere", FOLDER / "project"
    own: dict[str, dict[str, Any]] = {"run": {"id": "base", "root": f"{elsewhere}/runs"}}
    own |= {"shards": {"root": f"{elsewhere}/datasets"}, "feed": {"cache": f"{elsewhere}/cache"}}
    own |= {"corpus": {"source": f"{FOLDER}/text/plain", "special_tokens": ["<|im_start|>", "<|im_end|>"]}}
    own |= {"checkpoint": {"stage": ""}, "train": {"total": 60 * BATCH * LENGTH}}
    base = ["train", "--recipe", "tiny", *options(SETTINGS, own)]
    maker.run("data", "prepare", *base[1:], "--save", f"{project}/base.yaml")
    maker.alone(project / "base.yaml")
    tuned = [
        *("train", "--recipe", "lora", "--train.start-from", f"{elsewhere}/runs/base", "--run.id", "tuned"),
        *("--corpus.source", f"{FOLDER}/chats.jsonl", "--corpus.chat-template", "chatml", "--model.adapter-rank", "2"),
        *options({"train": {"total": TOTAL * BATCH * LENGTH}, "stream": {"max_epochs": 1000.0, "lanes": 4}}),
    ]
    maker.interrupt(elsewhere / "runs" / "tuned", signal.SIGINT, "-c", SPRINGTIDE, *tuned)
    return {"base": base, "tuned": tuned}


RUNS = {
    "finished": "runs/finished",
    "unfinished": "runs/unfinished",
    "own": "runs/own",
    "trial-0000": "runs/sweep/trials/trial-0000",
    "trial-0001": "runs/sweep/trials/trial-0001",
    "followed": "following/runs/followed",
    "base": "elsewhere/runs/base",
    "tuned": "elsewhere/runs/tuned",
}
"""Run -> its folder below ``FOLDER``."""


def uninterrupted(maker: Maker, place: Path) -> dict[str, dict[str, float]]:
    """Train each run in one go, without Ray and away from the golden folder; return the losses of their steps."""
    found = {}
    for name, where in RUNS.items():
        config = yaml.safe_load((FOLDER / where / "config.yaml").read_text())
        config["run"]["root"], config["stream"]["follow"] = str(place), ""
        for dataset in list(config["stream"]["mixture"].values())[:1]:
            config["shards"]["dataset"] = dataset  # the loop without Ray wants one, and reads the mixture
        (place / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        maker.alone(place / f"{name}.yaml")
        found[name] = losses_of(place / name)
    return found


def answers(maker: Maker, place: Path) -> dict[str, Any]:
    """Return what commands print on the runs at that commit."""
    models = {name: where for name, where in RUNS.items() if name != "own"}
    roots = ("runs", "following/runs", "elsewhere/runs", "runs/sweep/trials")
    return {
        "verify": {name: maker.answer("verify", str(FOLDER / where)) for name, where in RUNS.items()},
        "report": {name: maker.answer("report", str(FOLDER / where)) for name, where in RUNS.items()},
        "list": {where: maker.answer("run", "list", str(FOLDER / where)) for where in roots},
        "evaluate": {name: maker.answer("model", "evaluate", str(FOLDER / where)) for name, where in models.items()},
        "export": {name: export(maker, FOLDER / where, place / f"{name}-export") for name, where in models.items()},
    }


def export(maker: Maker, run: Path, out: Path) -> dict[str, Any]:
    """Export a run's model; return its architecture, and of each tensor the shape and the sum of all magnitudes."""
    found = maker.answer("model", "export", str(run), "--out", str(out))
    tensors = load_file(out / "model.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    sums = {name: float(abs(tensor.astype("float64")).sum()) for name, tensor in tensors.items()}
    return {"architecture": found["architecture"], "checkpoint": found["checkpoint"], "shapes": shapes, "sums": sums}


def pack(folder: Path) -> None:
    """Write the archive of a folder: whole seconds, no names of users, files of one kind beside each other."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = int(member.mtime), 0, 0, "", ""
        return member

    found = sorted(folder.rglob("*"), key=lambda path: (path.is_file(), path.suffix, path.name, str(path)))
    with tarfile.open(ARCHIVE, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as archive:
        for path in found:
            archive.add(path, str(path.relative_to(folder)), recursive=False, filter=plain)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes, {len(found)} files and folders")


def main(checkout: str) -> None:
    """Make the folder, pack it and remove it. Tests that want to unpack the archive wait meanwhile."""
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    if not head.stdout.startswith(COMMIT):
        raise SystemExit(f"{checkout} is at {head.stdout.strip()}, not at {COMMIT}")
    with tempfile.TemporaryDirectory(prefix="springtide-make-") as place, open(f"{FOLDER}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FOLDER, ignore_errors=True)
        code = Path(place) / "code"
        for name in ("platform", "jobs"):  # runs hold the paths of their code in a few places
            shutil.copytree(Path(checkout) / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
        FOLDER.mkdir()
        write_sources()
        shutil.copytree(
            code / "jobs", FOLDER / "project" / "jobs", ignore=shutil.ignore_patterns("[!t]*", "__pycache__")
        )
        maker = Maker(code, place)
        commands = {**make_on_texts(maker), **make_followed(maker), **make_tuned(maker)}
        whole, twins = Path(place) / "whole", Path(place) / "twins"
        shutil.copytree(FOLDER, whole)  # what follows may write into runs
        twins.mkdir()
        found = {"commit": COMMIT, "commands": commands, "losses": uninterrupted(maker, twins), **answers(maker, twins)}
        (whole / "made.json").write_text(json.dumps(found, indent=1))
        pack(whole)
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main(sys.argv[1])
