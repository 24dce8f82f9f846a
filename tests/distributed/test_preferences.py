"""Direct preference optimization: what plain torch says, and the same bits at any world size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paired as pairs
import pytest
import torch
import torch.nn.functional as F
from labelled import plain_log_probabilities
from loops import train
from paired import STEPS

from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import Event, StepDone
from springtide.shards import SplitReader, is_predicted, load_manifest
from springtide.storage import Folder
from springtide.stream import RankReader, load, open_data
from springtide.training.start_check import check_objective

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return pairs.paired(tmp_path_factory.mktemp("paired"))


def told(events: list[Event]) -> dict[int, tuple[float, dict[str, float]]]:
    return {one.step: (one.loss, one.extra) for one in events if isinstance(one, StepDone)}


def test_it_begins_at_the_reference_and_learns(paired: Config, ranks: Ranks) -> None:
    """Through a kill and a resize: tests/elastic/test_fine_tuning_killed.py."""
    expected = told(ranks(1, train, paired.override({"run.id": "whole"}))[0])
    first, last = expected[1], expected[STEPS]
    assert first[0] == pytest.approx(math.log(2), abs=1e-5), "the reference itself"
    assert first[1]["objective/margin"] == pytest.approx(0, abs=1e-4)
    assert last[0] < first[0]
    assert last[1]["objective/accuracy"] > 0.9
    margin = last[1]["objective/chosen"] - last[1]["objective/rejected"]
    assert last[1]["objective/margin"] == pytest.approx(margin, abs=1e-5)


def test_the_loss_is_what_plain_torch_says(paired: Config, ranks: Ranks) -> None:
    other = paired.override(
        {"run.id": "other", "train.start_from": "", "model.init_seed": 5, "train.total": 2 * paired.tokens_per_step}
    )
    (_, _), (loss, parts) = told(ranks(1, train, other.override({"checkpoint.every_steps": 1}))[0]).values()
    reader = RankReader(open_data(other.data), 0, 1)
    batch = next(iter(load(reader, reader.plan(1, 2, 2**20))))
    manifest = load_manifest(Folder(other.shards.dataset))
    tokens = (
        SplitReader(Folder(other.shards.dataset), manifest, "train")
        .read(np.arange(manifest.splits["train"].rows))
        .tokens
    )
    said = []
    for name, step in (("other", 1), ("reference", 2)):
        ids, log_TLV = plain_log_probabilities(other, f"{other.run.root}/{name}", "train", f"step-{step:010d}")
        said.append(log_TLV.gather(-1, torch.from_numpy(ids[:, 1:, None].astype(np.int64)))[..., 0])
    margins = []
    for row in batch.sample_ids.astype(np.int64):
        predicted = torch.from_numpy(is_predicted(tokens[row])[1:])
        # each answer is a run of predicted tokens
        runs = torch.cumsum((predicted & ~F.pad(predicted[:-1], (1, 0))).long(), 0)
        gains = [float((said[0] - said[1])[row][predicted & (runs == n)].sum()) for n in range(1, int(runs.max()) + 1)]
        margins += [0.5 * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
    assert loss == pytest.approx(-F.logsigmoid(torch.tensor(margins)).mean().item(), abs=1e-4)
    assert parts["objective/accuracy"] == pytest.approx(np.mean(np.array(margins) > 0))


def test_what_it_cannot_learn_from_is_told(paired: Config, tiny: Config) -> None:
    chats = tiny.override({"objective.source": "dpo", "objective.labels": "/none"})
    plain = open_data(tiny.data)
    with pytest.raises(ConfigError, match=r"learns from pairs of answers, and .* holds none"):
        check_objective(chats, plain)
    check_objective(paired, open_data(paired.data))
    alone = {"objective.source": "orpo", "objective.labels": ""}
    with pytest.raises(ConfigError, match=r"learns from pairs of answers, and .* holds none"):
        check_objective(tiny.override(alone), plain)
    check_objective(paired.override(alone), open_data(paired.override(alone).data))
