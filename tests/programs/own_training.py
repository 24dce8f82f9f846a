"""Objectives and optimizers of a user's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.config.engine import OptimConfig
from springtide.model.objective import next_token

Parameters = list[tuple[str, nn.Parameter]]
Parts = dict[str, Any]


def entropy(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Parts]:
    """The cross-entropy less a part of the entropy, each row weighing the same."""
    log_BLV = outputs.float().log_softmax(-1)
    counts_BL = labels >= 0
    length_B = counts_BL.sum(1).clamp_min(1)
    entropy_B = -(log_BLV.exp() * log_BLV).sum(-1).masked_fill(~counts_BL, 0.0).sum(1) / length_B
    nats_BL = F.cross_entropy(log_BLV.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    nats_B = nats_BL.sum(1) / length_B
    return (nats_B - 0.1 * entropy_B).sum(), torch.tensor(len(rows)), {"nats": nats_B.sum(), "entropy": entropy_B.sum()}


def looks_at_values(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, float, Parts]:
    total, weight, _ = next_token(outputs, rows, labels)
    return total, float(weight), {"constant": float(weight)}


def changes_its_names(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Parts]:
    total, weight, _ = next_token(outputs, rows, labels)
    return total, weight, {f"of_{rows.size(1)}": weight}


def weighs_nothing(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, float, Parts]:
    return outputs.sum(), 0.0, {}


def a_mean(outputs: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    return outputs.mean()


def no_gradient(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, int, Parts]:
    return outputs.detach().sum(), 1, {}


def a_vector(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, int, Parts]:
    return outputs.sum(), 1, {"each": outputs.sum(0)}


def spaces(outputs: Tensor, rows: Tensor, labels: Tensor) -> tuple[Tensor, int, Parts]:
    return outputs.sum(), 1, {"a name": 1}


def raises(outputs: Tensor, rows: Tensor, labels: Tensor) -> None:
    raise KeyError("teacher")


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (2023)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                    one.sub_(torch.sign(momentum * 0.9 + one.grad * 0.1) * group["lr"])
                    momentum.mul_(0.99).add_(one.grad * 0.01)


def lion(named: Parameters, config: OptimConfig) -> torch.optim.Optimizer:
    """Vectors learn at half of the rate."""
    matrices = [one for _, one in named if one.dim() >= 2]
    vectors = [one for _, one in named if one.dim() < 2]
    rate = config.peak_lr / 3
    return Lion([{"params": matrices, "lr": rate}, {"params": vectors, "lr": rate / 2}], {})


class Forgets(Lion):
    """Keeps in its state what no other world size can use."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["sum"] = torch.zeros(3)


def forgets(named: Parameters, config: OptimConfig) -> torch.optim.Optimizer:
    return Forgets([one for _, one in named], {"lr": config.peak_lr})


def a_few(named: Parameters, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for _, one in named[1:]], lr=config.peak_lr)


def others(named: Parameters, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD([*(one for _, one in named), nn.Parameter(torch.zeros(1))], lr=config.peak_lr)


def none(named: Parameters, config: OptimConfig) -> None:
    return None


def reads_labels(
    outputs: Tensor, rows: Tensor, labels: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, int, Parts]:
    """How much worse than the reference the model is."""
    counts_BL = labels >= 0
    nats, weight, _ = next_token(outputs, rows, labels)
    reference = -columns["logprobs"].masked_fill(~counts_BL, 0.0).sum()
    return nats - reference, int(weight), {"nats": nats, "reference": reference}
