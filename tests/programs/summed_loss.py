"""The loss of rows as one number, for tests of models."""

from __future__ import annotations

from torch import Tensor, nn

from springtide.training.losses import row_losses


def token_loss(model: nn.Module, rows_BL: Tensor, z_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss and the cross-entropy in it, summed over the tokens of ``rows_BL`` (B, L + 1), fp32 scalars."""
    total, nats_B = row_losses(model, rows_BL, z_weight)
    return total, nats_B.sum().float()
