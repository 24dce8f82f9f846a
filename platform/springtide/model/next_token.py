"""The cross-entropy of next tokens, as a function."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from springtide.model import IGNORE_INDEX


def next_token(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The cross-entropy of next tokens, as an objective of one's own would compute it.

    Examples:
        >>> import torch
        >>> logits, ids = torch.zeros(1, 3, 8, requires_grad=True), torch.tensor([[1, 2, 3]])
        >>> total, weight, parts = next_token(logits, ids, torch.tensor([[2, 3, -100]]))
        >>> f"{total / weight:.4f}", int(weight), sorted(parts)
        ('2.0794', 2, ['accuracy'])
    """
    logits_NV, wanted_N = outputs_BLV.flatten(0, 1).float(), labels_BL.flatten()
    total = F.cross_entropy(logits_NV, wanted_N, ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (wanted_N != IGNORE_INDEX).sum(), {"accuracy": (logits_NV.argmax(-1) == wanted_N).sum()}
