"""What an evaluation computes, on which rows, and how many forward passes it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from summed_loss import token_loss
from torch import nn

from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.distributed import alone
from springtide.errors import CorpusError
from springtide.events import Evaluated
from springtide.model import build
from springtide.shards import HELDOUT
from springtide.stream import Data, open_data
from springtide.training.evaluate import HeldoutRows, evaluate

HERE = alone(torch.device("cpu"))


@pytest.fixture
def several(tiny: Config, poems: str) -> Config:
    """A mixture of two, three to one and later one to one, and a third set that is evaluated on only."""
    tables = [{"shares": {"code": 3, "poems": 1}}, {"from_step": 4, "shares": {"code": 1, "poems": 1}}]
    mixture = {"code": tiny.shards.dataset, "poems": poems}
    return tiny.override({"stream.mixture": mixture, "stream.weights": tables, "stream.eval_datasets": {"only": poems}})


def evaluated(data: Data, tokens: int, micro_batch: int, step: int = 0) -> tuple[Evaluated, int]:
    """The result, and the number of forward passes."""
    beats: list[int] = []
    model = build(data_model, data.vocab_size, data.eos_id)
    found = evaluate(model, data, HERE, StepsDone(step), tokens, micro_batch, heartbeat=lambda: beats.append(1))
    return found, len(beats)


data_model = Config().model.model_copy(
    update={"num_layers": 1, "dim": 32, "ffn_dim": 64, "num_heads": 2, "num_kv_heads": 2}
)


def test_an_evaluation_calls_the_heartbeat_before_each_forward_pass(tiny: Config) -> None:
    found, beats = evaluated(open_data(tiny.data), 4 * 64, 1)
    assert beats == found.rows == 4
    assert found.tokens == 4 * 64


def test_forward_passes_do_not_grow_with_the_number_of_sets(tiny: Config, several: Config) -> None:
    for config in (tiny, several):
        found, beats = evaluated(open_data(config.data), 12 * 64, 4)
        assert (found.rows, beats) == (12, 3)


def test_each_set_has_its_loss_and_the_mixture_the_headline(several: Config) -> None:
    """Each set has its own loss and the headline is that of the mixture."""
    data = open_data(several.data)
    found, _ = evaluated(data, 12 * 64, 5)
    model = build(data_model, data.vocab_size, data.eos_id).eval()
    sizes = {}
    for name, reader, corpus in zip(data.eval_names, data.splits(HELDOUT), data.heldout, strict=True):
        there = corpus.manifest.splits[HELDOUT].rows
        rows = reader.read(np.arange(4) * there // 4)
        with torch.no_grad():
            nats = float(token_loss(model, torch.from_numpy(rows.tokens.astype(np.int64)))[1])
        sizes[name] = int(rows.num_bytes.sum()) / 256
        assert found.losses[name] == pytest.approx(nats / 256, abs=1e-5)
        assert found.corpora[name] == pytest.approx(nats / 256 / sizes[name] / math.log(2), abs=1e-5)
    assert found.corpora.keys() == found.losses.keys() == {"code", "poems", "only"}
    assert abs(found.losses["code"] - found.losses["poems"]) > 1e-4
    for step, (code, poems) in {0: (0.75, 0.25), 4: (0.75, 0.25), 5: (0.5, 0.5)}.items():
        one, _ = evaluated(data, 12 * 64, 5, step)
        loss = code * found.losses["code"] + poems * found.losses["poems"]
        assert one.heldout_loss == pytest.approx(loss, rel=1e-12)
        mixed = loss / math.log(2) / (code * sizes["code"] + poems * sizes["poems"])
        assert one.heldout_bits_per_byte == pytest.approx(mixed, rel=1e-12)


def test_a_model_of_ones_own_is_evaluated_row_by_row_too(several: Config) -> None:
    class Own(nn.Module):
        def __init__(self, vocab_size: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, vocab_size)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids)

    data = open_data(several.data)
    torch.manual_seed(0)
    model = Own(data.vocab_size)
    one, other = (evaluate(model, data, HERE, StepsDone(0), 12 * 64, size, padded=True) for size in (5, 12))
    assert one.losses == pytest.approx(other.losses, rel=1e-6)


def test_a_held_out_set_of_masked_rows_only_is_named(several: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(self: HeldoutRows, where: slice) -> tuple[np.ndarray, np.ndarray]:
        tokens, num_bytes = read(self, where)
        tokens[self.sets[where] == 1] = ~1
        return tokens, np.where(self.sets[where] == 1, 0, num_bytes)

    read = HeldoutRows.read
    monkeypatch.setattr(HeldoutRows, "read", masked)
    with pytest.raises(CorpusError, match=r"train\.eval_tokens = 768: .*'poems'"):
        evaluated(open_data(several.data), 12 * 64, 5)
