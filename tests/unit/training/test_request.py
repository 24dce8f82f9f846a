"""A request that comes while a step is computed is known to all ranks after that very step."""

from __future__ import annotations

import torch
from ranks import run_here

from springtide.config import Config
from springtide.distributed import World
from springtide.elastic import GroupRequest
from springtide.model import build
from springtide.training.part import Part, StepResult, Work
from springtide.training.requests import Requests
from springtide.training.step import StepSetup, train_step

SHAPE = {"model.num_layers": 1, "model.dim": 8, "model.num_heads": 1, "model.num_kv_heads": 1, "model.ffn_dim": 8}


def test_what_a_rank_is_asked_for_is_read_between_backward_and_the_update() -> None:
    seen = list[str]()

    def step(world: World) -> StepResult:
        torch.manual_seed(17)
        model = build(Config().override(SHAPE).model, 11)
        weights = list(model.parameters())

        def asked() -> GroupRequest:
            assert all(weight.grad is not None for weight in weights)  # all is computed
            seen.append("asked")
            return GroupRequest.LEAVE

        class Updates(Part):
            def before_update(self) -> None:
                seen.append("update")

        requests = Requests()
        requests.ask(GroupRequest.SAVE)
        requests.from_outside = asked
        parts = [requests, Updates()]
        setup = StepSetup(model, torch.optim.SGD(weights, 0.1), world, clip_norm=1.0, parts=parts)
        return train_step(setup, Work(torch.randint(11, (2, 9)), [slice(0, 2)], 16))

    result = run_here(step)
    assert seen == ["asked", "update"]
    assert result.requests == {GroupRequest.SAVE, GroupRequest.LEAVE}
