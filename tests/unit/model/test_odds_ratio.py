"""Odds ratio preference optimization: its value and gradient are those of the paper's formula, pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from springtide.config.objective import ObjectiveConfig
from springtide.errors import ConfigError
from springtide.model import IGNORE_INDEX
from springtide.model.objective import Objective

END, VOCABULARY, BETA = 9, 12, 0.3
ANSWERS = [
    [([1, 2], [3, 4, 5]), ([1, 2], [6])],
    [([7], [8]), ([7], [1, 1, 2, 3])],
]
"""One pair a row: (prompt, answer) of the chosen and the rejected one. Below, a row has two pairs, and one has half a pair."""


def row_of(*chats: tuple[list[int], list[int]], length: int = 26) -> tuple[list[int], list[int]]:
    """Return ids and labels of a row of chats; only answers and their ends are predicted."""
    ids, predicted = [], []
    for prompt, answer in chats:
        ids += [END, *prompt, *answer, END]
        predicted += [False] * (1 + len(prompt)) + [True] * (len(answer) + 1)
    ids += [END] * (length + 1 - len(ids))
    predicted += [False] * (length + 1 - len(predicted))
    labels = [one if counts else IGNORE_INDEX for one, counts in zip(ids[1:], predicted[1:], strict=True)]
    return ids[:-1], labels


def batch() -> tuple[Tensor, Tensor]:
    """Three rows: two pairs, one pair, and a chosen answer whose rejected one is missing."""
    rows = [row_of(*ANSWERS[0], *ANSWERS[1]), row_of(*ANSWERS[1]), row_of(ANSWERS[0][0])]
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([labels for _, labels in rows])


def paper(logits_BLV: Tensor, labels_BL: Tensor, beta: float) -> Tensor:
    """The formula, answer by answer: each is a run of predicted tokens of a row."""
    total = logits_BLV.new_zeros(())
    for logits_LV, labels_L in zip(logits_BLV, labels_BL, strict=True):
        means: list[Tensor] = []
        run: list[Tensor] = []
        for place, wanted in enumerate([*labels_L.tolist(), IGNORE_INDEX]):
            if wanted != IGNORE_INDEX:
                run.append(logits_LV[place].log_softmax(-1)[wanted])
            elif run:
                means.append(sum(run[1:], run[0]) / len(run))
                run = []
        for chosen, rejected in zip(means[0::2], means[1::2], strict=False):
            odds = [one.exp() / (1 - one.exp()) for one in (chosen, rejected)]
            total = total - chosen - beta * (odds[0] / odds[1]).log().sigmoid().log()
    return total


def objective() -> Objective:
    return Objective("orpo", VOCABULARY, torch.device("cpu"), None, ObjectiveConfig(source="orpo", beta=BETA), END)


def test_value_and_gradient_are_those_of_the_paper() -> None:
    rows_BL, labels_BL = batch()
    torch.manual_seed(17)
    logits_BLV = (2 * torch.randn(*rows_BL.shape, VOCABULARY, dtype=torch.float64)).requires_grad_()
    expected = paper(logits_BLV, labels_BL, BETA)
    [wanted] = torch.autograd.grad(expected, logits_BLV)
    total, sums = objective()(logits_BLV, rows_BL, labels_BL, {})
    [found] = torch.autograd.grad(total, logits_BLV)
    assert sums[0].item() == pytest.approx(expected.item(), rel=1e-6)
    assert sums[1] == 3, "half a pair is none"
    assert torch.allclose(found, wanted, atol=1e-6)
    parts = dict(zip(objective().names, sums[2:].tolist(), strict=True))
    assert sums[0].item() == pytest.approx(parts["cross_entropy"] + BETA * parts["odds"], abs=1e-5)


def test_rows_may_be_computed_apart() -> None:
    rows_BL, labels_BL = batch()
    torch.manual_seed(18)
    logits_BLV = torch.randn(*rows_BL.shape, VOCABULARY, requires_grad=True)
    whole, sums = objective()(logits_BLV, rows_BL, labels_BL, {})
    whole.backward()
    gradient, logits_BLV.grad = logits_BLV.grad, None
    apart = torch.zeros_like(sums)
    for part in (slice(0, 1), slice(1, 1), slice(1, 3)):
        total, found = objective()(logits_BLV[part], rows_BL[part], labels_BL[part], {})
        total.backward()
        apart += found
    assert torch.allclose(apart, sums, atol=1e-6)
    assert gradient is not None
    assert torch.equal(gradient, logits_BLV.grad)


def test_an_answer_that_is_certain_has_a_finite_loss() -> None:
    rows_BL, labels_BL = batch()
    logits_BLV = torch.zeros(*rows_BL.shape, VOCABULARY)
    logits_BLV.scatter_(-1, labels_BL.clamp_min(0)[..., None], 100.0).requires_grad_()
    total, sums = objective()(logits_BLV, rows_BL, labels_BL, {})
    total.backward()
    assert bool(sums.isfinite().all())
    assert logits_BLV.grad is not None
    assert bool(logits_BLV.grad.isfinite().all())


def test_what_it_cannot_learn_from_is_told() -> None:
    with pytest.raises(ValueError, match=r"objective\.labels = 'labels/x'"):
        ObjectiveConfig(source="orpo", labels="labels/x")
    one = ObjectiveConfig(source="orpo")
    with pytest.raises(ConfigError, match=r"pairs .*masked"):
        Objective("orpo", VOCABULARY, torch.device("cpu"), None, one)
