"""A run on three sources with weights and caps: what is told before it is what it did, source by source, at any world size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import train_and_write
from prepared import prepare, write_corpus

from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.events import Evaluated, StepDone
from springtide.run.folder import open_run
from springtide.stream import digest, open_data
from springtide.stream.chain import corpus_and_row

pytestmark = pytest.mark.distributed
WEIGHTS = {"web": 2, "wiki": 1, "code": 3}
CAP = 0.5


@pytest.fixture
def three(tiny: Config, tmp_path: Path) -> Config:
    """Sources of other texts, the heaviest of which is the smallest and is capped; sums are exact."""
    for seed, (name, documents) in enumerate({"web": 150, "wiki": 90, "code": 30}.items()):
        write_corpus(tmp_path / name, documents, seed)
    changes = {
        "shards.dataset": "",
        "corpus.max_files": 0,
        "corpus.sources": {name: str(tmp_path / name) for name in WEIGHTS},
        "stream.weights": [{"shares": WEIGHTS}],
        "stream.epoch_caps": {"code": CAP},
        "parallel.reduction": "fp64",
        "train.micro_batch": 2,
        "train.total": 40 * 12 * 64,
        "optim.warmup": 0,
    }
    return prepare(tiny.override(changes))


def figures(event: StepDone, kind: str) -> dict[str, float]:
    return {name.partition("/")[2]: one for name, one in event.extra.items() if name.startswith(f"{kind}/")}


@pytest.mark.full
def test_epochs_told_before_are_those_counted_from_the_chain_of_ids(
    three: Config, ranks: Callable[..., list[Any]]
) -> None:
    config = three.override({"run.id": "resized"})
    data, steps = open_data(config.data), config.num_steps
    told = data.drawn(steps)
    free = open_data(config.override({"stream.epoch_caps": {}}).data).drawn(steps)
    assert told["code"].epochs <= CAP < free["code"].epochs
    stop = random.Random(0).randint(10, 30)
    found: dict[int, StepDone] = {}
    events = [*ranks(2, train_and_write, config, stop)[0], *ranks(3, train_and_write, config)[0]]
    for event in events:
        if isinstance(event, StepDone):
            found[event.step] = event
    assert sorted(found) == list(range(1, steps + 1))

    proof = open_run(f"{config.run.root}/resized").verify()
    assert proof.ok
    assert proof.steps_proven_by_chain == steps
    counted = np.zeros(len(data.corpora), dtype=np.int64)
    rows = np.array([corpus.rows for corpus in data.corpora])
    for done in range(steps):
        ids, event = data.order.batch(data.order.step_after(StepsDone(done))), found[done + 1]
        assert event.digest == f"{digest(ids):016x}", "the ids that the ranks consumed"
        here = np.bincount(corpus_and_row(ids)[0], minlength=len(counted))
        counted += here
        epochs, tokens, losses = (figures(event, kind) for kind in ("epochs", "step_tokens", "loss"))
        assert tokens == dict(zip(data.names, (here * 64).tolist(), strict=True))
        assert epochs == pytest.approx(dict(zip(data.names, counted / rows, strict=True)), abs=1e-6)
        assert losses.keys() == {name for name, many in tokens.items() if many}
        weighed = math.fsum(loss * tokens[name] for name, loss in losses.items())
        assert weighed / event.step_tokens == pytest.approx(event.loss, rel=1e-12)
    assert {name: one.rows for name, one in told.items()} == dict(zip(data.names, counted.tolist(), strict=True))
    assert {name: one.epochs for name, one in proof.corpora.items()} == {name: one.epochs for name, one in told.items()}
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert all(one.losses.keys() == set(WEIGHTS) for one in evaluated)

    [alone] = ranks(1, train_and_write, three.override({"run.id": "alone"}))
    for event in alone:
        if isinstance(event, StepDone):
            assert event.extra == found[event.step].extra, "the same bits, resized or not"
