"""What a student learns from a teacher: from stored labels, from the teacher online, and alone.

A text of made-up words, each followed by one of a few others, in tokens of 512 ids. A teacher learns it from seven eighths of
the text. A student of a quarter of its width and half its depth has the other eighth, and learns with the same steps, rows and
schedule each way: from the text alone, from the teacher's 64 likeliest ids that were stored beside it, from 64 ids computed in
the step, and from all ids computed in the step. Told are the loss on text that neither has seen [nats/token] and tokens per
second, of the median step, for seeds 17, 18 and 19, which were fixed before: a seed makes the text, the weights and the order.
The seconds that the labels took are told apart: they are written once.

    python benchmarks/distill.py [--quick] [--json] [--steps 200]
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
import torch
import torch.distributed as dist
from continual import write_text

import springtide as st
from springtide.api.label import label
from springtide.api.prepare import prepare
from springtide.distributed import world
from springtide.events import Evaluated, StepDone
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import load, open_data
from springtide.training import TrainLoop

SEEDS = (17, 18, 19)
FEW = 15
"""Files of text that the student reads; the teacher reads the others."""
K, LENGTH, ROWS = 64, 64, 16
TEACHER = {"model.num_layers": 4, "model.dim": 128, "model.num_heads": 4, "model.num_kv_heads": 4, "model.ffn_dim": 344}
STUDENT = {"model.num_layers": 2, "model.dim": 32, "model.num_heads": 4, "model.num_kv_heads": 4, "model.ffn_dim": 88}


@dataclasses.dataclass
class Place:
    """The text of one seed, prepared, its teacher, and what that says of the student's text."""

    root: Path
    seed: int
    steps: int
    rows: int
    """Rows of each evaluation."""

    def __post_init__(self) -> None:
        write_text(self.root / "all", f"distill {self.seed}")
        (self.root / "few").mkdir()
        for number in range(FEW):
            (self.root / "all" / f"{number}.txt").rename(self.root / "few" / f"{number}.txt")
        made = {"corpus.tokenizer": "bpe", "corpus.vocab_size": 512, "corpus.source": str(self.root / "all")}
        self.all = prepare(self._config("all", **made)).shards.dataset
        same = {"corpus.tokenizer": f"{self.all}/tokenizer.json", "corpus.source": str(self.root / "few")}
        self.few = prepare(self._config("few", **same)).shards.dataset
        self.taught = self._train("teacher", **{**TEACHER, "shards.dataset": self.all})
        begin = time.perf_counter()
        self.labels = label(self.few, f"{self.root}/runs/teacher", "topk", str(self.root / "labels"), k=K)
        self.labels_s = time.perf_counter() - begin

    def ways(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each way to learn."""
        distill = {"objective.source": "distill"}
        online = {**distill, "objective.teacher": f"{self.root}/runs/teacher"}
        return {
            "alone": {},
            "stored": {**distill, "objective.labels": self.labels},
            "online": {**online, "objective.teacher_k": K},
            "online_all": {**online, "objective.teacher_k": 0},
        }

    def student(self, name: str, **changes: Any) -> dict[str, float]:
        """Return the loss on the teacher's held-out text, and the speed."""
        return self._train(name, **{**STUDENT, "shards.dataset": self.few, **changes})

    def _config(self, name: str, **changes: Any) -> st.Config:
        fixed = {
            "run.id": name,
            "run.root": str(self.root / "runs"),
            "shards.root": str(self.root / "datasets"),
            "corpus.near_duplicates": False,
            "shards.heldout_fraction": 0.1,
            "shards.sequence_length": LENGTH,
            "stream.global_batch": ROWS,
            "stream.seed": self.seed,
            "stream.max_epochs": 100,
            "model.init_seed": self.seed,
            "train.total": self.steps * ROWS * LENGTH,
            "train.micro_batch": ROWS,
            "train.eval_tokens": self.rows * LENGTH,
            "train.sample_tokens": 0,
            "optim.peak_lr": 3e-3,
            "optim.warmup": self.steps // 10 * ROWS * LENGTH,
            "checkpoint.every_steps": 0,
            "checkpoint.stage": "",
            "elastic.compare": 0,
            "elastic.recheck": 0,
            "elastic.max_workers": 1,
            "track.mlflow_uri": "off",
        }
        return st.recipes.tiny().override({**fixed, **changes})

    def _train(self, name: str, **changes: Any) -> dict[str, float]:
        evals = {} if changes["shards.dataset"] == self.all else {"stream.eval_datasets": {"all": self.all}}
        config = self._config(name, **{**evals, **changes})
        run = Run(Folder(config.run.root) / config.run.id)
        run.write_config(config)
        loop, steps = TrainLoop(config, world("cpu"), open_data(config.data), run.folder), config.num_steps
        events = list(loop.events(lambda reader, step: load(reader, reader.plan(step, steps, 2**22)), lambda: None))
        last = [event for event in events if isinstance(event, Evaluated)][-1]
        times = [event.step_time_s for event in events if isinstance(event, StepDone)]
        loss = last.losses.get("all", last.heldout_loss)
        return {"loss": loss, "tokens_per_s": ROWS * LENGTH / statistics.median(times)}


def main() -> None:
    options = claims.options(__doc__, len(SEEDS), steps=(200, 4))
    torch.set_num_threads(1)
    seeds = SEEDS[: 1 if options.quick else options.rounds]
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        for seed in seeds:
            place = Place(Path(folder) / str(seed), seed, int(options.steps), 8 if options.quick else 400)
            print(f"seed {seed}: teacher {place.taught['loss']:.4f}, labels in {place.labels_s:.1f} s", flush=True)
            found.setdefault("teacher", []).append(place.taught)
            for way, changes in place.ways().items():
                one = place.student(way, **changes)
                found.setdefault(way, []).append(one)
                print(f"seed {seed}, {way}: {one['loss']:.4f}, {one['tokens_per_s']:.0f} tokens/s", flush=True)
    means = {way: {name: statistics.mean(one[name] for one in each) for name in each[0]} for way, each in found.items()}
    losses, rates = ({way: one[name] for way, one in means.items()} for name in ("loss", "tokens_per_s"))
    detail = {"means": means, "seeds": seeds}
    made = [
        claims.claim("distilled_vs_alone_loss", losses["stored"] / losses["alone"], 1.0, "lower", detail),
        claims.claim("stored_vs_online_loss", losses["stored"] / losses["online"], 1.001, "lower", detail),
        claims.claim("stored_vs_online_all_loss", losses["stored"] / losses["online_all"], 1.01, "lower", detail),
        claims.claim("stored_vs_online_tokens_per_s", rates["stored"] / rates["online"], 1.0, "higher", detail),
    ]
    claims.show(options, made)


if __name__ == "__main__":
    main()
