"""Parts of training called as a step of one rank calls them, without a process group."""

from __future__ import annotations

from typing import Any

import torch

from springtide.config.steps import StepsDone
from springtide.distributed import World, alone
from springtide.training.message import Agreed, StepMessage, _read
from springtide.training.part import DoneStep, Part, Share, StepResult, Verdict, Work

ALONE = alone(torch.device("cpu"))


def work_of(step: int = 0, **fields: Any) -> Work:
    """The work of the step after ``step``, without rows."""
    rows = torch.zeros(0, 1, dtype=torch.int64)
    return Work(**{"rows": rows, "micro_batches": [], "tokens_per_step": 1, "step": StepsDone(step), **fields})


def contributed(*parts: Part, step: int = 0, world: World = ALONE, **work: Any) -> Agreed:
    """What the message of the step after ``step`` has of these parts, if other ranks add nothing to it."""
    empty = torch.zeros(0, dtype=torch.float64)
    message = StepMessage(world)
    for part in parts:
        part.contribute(message, Share(work_of(step, **work), empty, None, empty, [], 1.0))
    fields = tuple((name, *rest) for name, rest in message._fields.items())
    return Agreed(_read(fields, [*torch.cat([empty, *message._on_device]).tolist(), *message._on_host]))


def result_of(agreed: dict[str, Any] | None = None, **fields: Any) -> StepResult:
    """A result of a step in which the ranks agreed on ``agreed``."""
    plain: dict[str, Any] = {"loss": 2.0, "grad_norm": 1.0, "tokens": 1, "digest": 0}
    return StepResult(**plain | {"agreed": Agreed(agreed or {})} | fields)


def done_step(step: int = 3, result: StepResult | None = None, verdict: Verdict = Verdict.CONTINUE) -> DoneStep:
    """A step that is done, of a second."""
    return DoneStep(StepsDone(step), result or result_of(), 1e-3, 1.0, 0.0, verdict)
