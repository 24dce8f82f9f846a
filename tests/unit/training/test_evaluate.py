"""An evaluation that lasts says that the group is alive."""

from __future__ import annotations

import torch

from springtide.config import Config
from springtide.dist import alone
from springtide.model import whole
from springtide.stream import open_data
from springtide.training.evaluate import evaluate


def test_an_evaluation_calls_the_heartbeat_before_each_forward_pass(tiny: Config) -> None:
    data, beats = open_data(tiny.data), list[int]()
    model = whole(tiny.model, data.vocab_size, data.eos_id)
    found = evaluate(model, data, alone(torch.device("cpu")), 0, 4, 1, heartbeat=lambda: beats.append(1))
    assert len(beats) == found.rows == 4
