"""Distillation: learn what a teacher says comes next (Hinton et al., "Distilling the knowledge in a neural network", 2015).

Labels hold the teacher's k largest probabilities. The rest of its mass is one more outcome, and so is the student's mass on
all other ids: the divergence is that of two distributions over k + 1 outcomes. It is never above that over all ids, and zero
where both agree. Renormalised to the k ids, the teacher would seem surer than it is, and the student would learn that (see
Anshumann et al., "Sparse logit sampling: accelerating knowledge distillation in LLMs", 2025, on the bias of cached top-k).

Shape suffixes: B rows, L positions, V ids, K the ids that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from springtide.model import IGNORE_INDEX

Found = tuple[Tensor, Tensor, dict[str, Tensor]]


def distillation(cross_entropy: float) -> Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Found]:
    """Return the objective: (1 - ``cross_entropy``) times the divergence from the teacher, plus ``cross_entropy`` times the
    cross-entropy of next tokens, summed over the tokens that are predicted."""

    def distill(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor, columns: Mapping[str, Tensor]) -> Found:
        log_BLV = outputs_BLV.float().log_softmax(-1)
        counts_BL = labels_BL != IGNORE_INDEX
        kl = divergence(log_BLV, columns["ids"], columns["logprobs"].float()).masked_fill(~counts_BL, 0.0).sum()
        wanted_N = labels_BL.flatten()
        nats = F.nll_loss(log_BLV.flatten(0, 1), wanted_N, ignore_index=IGNORE_INDEX, reduction="sum")
        total = (1.0 - cross_entropy) * kl + cross_entropy * nats
        return total, counts_BL.sum(), {"kl": kl.detach(), "cross_entropy": nats.detach()}

    return distill


def divergence(log_BLV: Tensor, ids_BLK: Tensor, teacher_BLK: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from the teacher at each position, (B, L).

    ``log_BLV``: log-probabilities of the student; ``teacher_BLK``: those of the teacher for ``ids_BLK``, fp32.

    Examples:
        >>> import torch
        >>> log_probabilities = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]]).log()
        >>> ids = torch.tensor([[[0, 1]]])
        >>> divergence(log_probabilities, ids, log_probabilities[..., :2]).item()
        0.0
        >>> f"{divergence(log_probabilities, ids, torch.tensor([[[0.25, 0.25]]]).log()).item():.4f}"  # 0.5 of the rest
        '0.1733'
    """
    # rounded when they were stored, they may add up to a little more than one
    mass_BL1 = teacher_BLK.exp().sum(-1, keepdim=True)
    teacher_BLK = teacher_BLK - mass_BL1.clamp_min(1.0).log()
    kl_BL = (teacher_BLK.exp() * (teacher_BLK - log_BLV.gather(-1, ids_BLK))).sum(-1)
    if ids_BLK.shape[-1] == log_BLV.shape[-1]:
        return kl_BL
    rest_BL = (1.0 - mass_BL1[..., 0]).clamp_min(0.0)
    student_BL = log_BLV.scatter(-1, ids_BLK, -torch.inf).logsumexp(-1)
    return kl_BL + torch.xlogy(rest_BL, rest_BL) - rest_BL * student_BL
