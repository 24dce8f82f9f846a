"""What a run that continues on new text forgets of the old one: alone, with replay, with L2-SP and with EWC.

Two texts of made-up words over one alphabet, each with words of its own, and its own rule which word follows which. A small
decoder learns the old text. Each way continues from these weights on the new one, with the same steps, rows and schedule;
replay gives a quarter of its rows to the old text. Told are held-out losses [nats/token] after that, for seeds 17, 18 and 19,
which were fixed before: a seed makes the texts, the weights and the order. The weights of the anchors are tried on seed 16
alone, and the one with the smallest sum of both losses is taken.

    python benchmarks/continual.py [--quick] [--json] [--steps 300]
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import claims
import torch.distributed as dist

import springtide as st
from springtide.api.prepare import prepare
from springtide.distributed import world
from springtide.events import Evaluated
from springtide.run.fisher import write_fisher
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import load, open_data
from springtide.training import TrainLoop

SEEDS, TUNED_ON = (17, 18, 19), 16
WEIGHTS = {"l2sp": (0.01, 0.1, 1.0, 10.0), "ewc": (1.0, 10.0, 100.0, 1000.0)}
LETTERS = "abcdefghijklmnopqrst"
WORDS, FOLLOWERS, FILES, WORDS_PER_FILE = 120, 4, 120, 600
LENGTH, ROWS = 64, 16


def write_text(folder: Path, seed: str) -> None:
    """Write files of sentences in which each word is followed by one of a few others."""
    rng = random.Random(seed)
    words = sorted({"".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 6))) for _ in range(WORDS)})
    after = {word: rng.sample(words, FOLLOWERS) for word in words}
    folder.mkdir(parents=True)
    for number in range(FILES):
        word, found = rng.choice(words), []
        for _ in range(WORDS_PER_FILE):
            found.append(word)
            word = rng.choice(after[word]) if rng.random() < 0.95 else rng.choice(words)
        (folder / f"{number}.txt").write_text(" ".join(found))


@dataclasses.dataclass
class Place:
    """The texts of one seed, prepared, and the run that has learned the old one."""

    root: Path
    seed: int
    steps: int
    rows: int
    """Rows of the Fisher, and of each evaluation."""

    def __post_init__(self) -> None:
        self.datasets = {}
        for name in ("old", "new"):
            write_text(self.root / name, f"{name} {self.seed}")
            config = self._config(name, **{"corpus.source": str(self.root / name)})
            self.datasets[name] = prepare(config).shards.dataset
        before = self._config("before", **{"shards.dataset": self.datasets["old"], "optim.peak_lr": 3e-3})
        self._train(before)
        write_fisher(Run(Folder(self.root / "runs" / "before")), str(self.root / "fisher"), tokens=self.rows * LENGTH)

    def continued(self, name: str, **changes: Any) -> dict[str, float]:
        """Return the held-out losses of both texts after continuing, and before."""
        evals = {"old": self.datasets["old"]} if "stream.mixture" not in changes else {}
        begins = {
            "shards.dataset": self.datasets["new"],
            "stream.eval_datasets": evals,
            "train.start_from": f"{self.root}/runs/before/checkpoints/step-{self.steps:010d}",
            "train.start_with": "weights",
            "optim.peak_lr": 1e-3,
        }
        events = self._train(self._config(name, **{**begins, **changes}))
        found = [event for event in events if isinstance(event, Evaluated)]
        old = "old"
        new = next(key for key in found[-1].losses if key != old)
        return {"old_before": found[0].losses[old], "old": found[-1].losses[old], "new": found[-1].losses[new]}

    def ways(self, chosen: dict[str, float]) -> dict[str, dict[str, Any]]:
        """Return the settings of each way to continue."""
        mixture = {"old": self.datasets["old"], "new": self.datasets["new"]}
        return {
            "alone": {},
            "replay": {"stream.mixture": mixture, "stream.weights": [{"shares": {"old": 1, "new": 3}}]},
            "l2sp": self.anchor("l2sp", chosen["l2sp"]),
            "ewc": self.anchor("ewc", chosen["ewc"]),
        }

    def anchor(self, kind: str, weight: float) -> dict[str, Any]:
        """Return the settings of an anchor; without decay, which would pull elsewhere."""
        url = "l2sp" if kind == "l2sp" else str(self.root / "fisher")
        return {"objective.anchor": url, "objective.anchor_weight": weight, "optim.weight_decay": 0.0}

    def _config(self, name: str, **changes: Any) -> st.Config:
        fixed = {
            "run.id": name,
            "run.root": str(self.root / "runs"),
            "shards.root": str(self.root / "datasets"),
            "corpus.tokenizer": "bytes",
            "corpus.near_duplicates": False,
            "shards.heldout_fraction": 0.1,
            "shards.sequence_length": LENGTH,
            "stream.global_batch": ROWS,
            "stream.seed": self.seed,
            "model.init_seed": self.seed,
            "train.total": self.steps * ROWS * LENGTH,
            "train.micro_batch": ROWS,
            "train.eval_tokens": self.rows * LENGTH,
            "train.sample_tokens": 0,
            "stream.max_epochs": 100,
            "optim.warmup": self.steps // 10 * ROWS * LENGTH,
            "checkpoint.every_steps": 0,
            "checkpoint.stage": "",
            "elastic.compare": 0,
            "elastic.recheck": 0,
            "track.mlflow_uri": "off",
            "elastic.max_workers": 1,
        }
        return st.recipes.tiny().override({**fixed, **changes})

    def _train(self, config: st.Config) -> list[Any]:
        run = Run(Folder(config.run.root) / config.run.id)
        run.write_config(config)
        loop = TrainLoop(config, world("cpu"), open_data(config.data), run.folder)
        steps = config.num_steps
        return list(loop.events(lambda reader, step: load(reader, reader.plan(step, steps, 2**22)), lambda: None))


def tuned(place: Place, weights: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """Return the weight of each anchor with the smallest sum of both losses."""
    chosen = {}
    for kind, tried in weights.items():
        sums = {}
        for weight in tried:
            found = place.continued(f"{kind}-{weight:g}", **place.anchor(kind, weight))
            sums[weight] = found["old"] + found["new"]
            print(f"seed {place.seed}, {kind} {weight:g}: old {found['old']:.3f}, new {found['new']:.3f}", flush=True)
        chosen[kind] = min(sums, key=lambda weight: sums[weight])
    return chosen


def main() -> None:
    options = claims.options(__doc__, len(SEEDS), steps=(300, 6))
    rows = 8 if options.quick else 400
    seeds = SEEDS[: 1 if options.quick else options.rounds]
    weights = {kind: tried[1:2] for kind, tried in WEIGHTS.items()} if options.quick else WEIGHTS
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        places = {seed: Place(Path(folder) / str(seed), seed, int(options.steps), rows) for seed in seeds}
        first = places[seeds[0]] if options.quick else Place(Path(folder) / "tuned", TUNED_ON, int(options.steps), rows)
        chosen = {kind: tried[0] for kind, tried in weights.items()} if options.quick else tuned(first, weights)
        for seed, place in places.items():
            for way, changes in place.ways(chosen).items():
                losses = place.continued(f"{way}-{seed}", **changes)
                found.setdefault(way, []).append(losses)
                told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
                print(f"seed {seed}, {way}: {told}", flush=True)
    means = {way: {name: statistics.mean(one[name] for one in each) for name in each[0]} for way, each in found.items()}
    forgotten = {way: one["old"] - one["old_before"] for way, one in means.items()}
    detail = {"means": means, "weights": chosen, "seeds": seeds}
    made = []
    for way in ("replay", "l2sp", "ewc"):
        made.append(
            claims.claim(f"forgetting_{way}_vs_alone", forgotten[way] / forgotten["alone"], 0.5, "lower", detail)
        )
        made.append(
            claims.claim(f"new_loss_{way}_vs_alone", means[way]["new"] / means["alone"]["new"], 1.05, "lower", detail)
        )
    claims.show(options, made)


if __name__ == "__main__":
    main()
