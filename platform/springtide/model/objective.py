"""The training objective (loss function) that a config names in place of next-token cross-entropy.

``objective.source`` names a built-in objective (``distill``, ``dpo``, ``orpo``), or a user's function,
``package.module:function``. The function is called for each micro-batch as ``function(outputs, rows, labels)``. If the config
names labels, it gets a fourth argument, ``columns``:

    outputs   the model's logits for the rows, (B, L, V), in the dtype that the model computes in
    rows      input ids, int64 (B, L)
    labels    target ids, int64 (B, L); -100 where nothing is predicted
    columns   another model's predictions for the rows (``objective.labels``), a dictionary. Either ``logprobs``, fp16
              (B, L, k), and ``ids``, int64 (B, L, k), of its k most likely next ids, or only ``logprobs``, fp32 (B, L), of the
              target ids. A teacher model that runs within the step (``objective.teacher``) gives the first form, in fp32

The function returns ``(sum, weight, parts)``. A step minimises the total of all ``sum`` divided by the total of all
``weight``, over all micro-batches and ranks. ``parts`` maps names to scalars, such as terms of the sum. Each part is totalled
and divided in the same way, and logged with the step as ``objective/NAME``. Every call returns the same names. Sum, weight and
parts are sums over tokens or rows, never means, so that neither the micro-batch nor the world size matters.

Held-out losses stay next-token cross-entropy, so that runs can be compared.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from springtide.config.code import find_code
from springtide.config.objective import OBJECTIVES, ObjectiveConfig
from springtide.errors import ConfigError, SpringtideError, TrainingFailed, explain, look_up
from springtide.model import IGNORE_INDEX, document_begins
from springtide.shards import LabelLayout

# Learning from pairs of answers, one chosen and one rejected, that are neighbouring documents of a row.
#
# row       [prompt, chosen] [prompt, rejected] [prompt, chosen] [prompt, rejected] [padding]
# document          0                 1                 2                 3           4, ...
#
# Both answers of a pair are in one row, so a pair is never split between micro-batches.
#
# Shape suffixes: B rows, L positions, V ids, P slots for the pairs of a row, most of them empty.

_NO_MORE = -(2.0**-24)
"""Upper limit of log-probabilities before odds are computed. Without the limit, an answer with log-probability 0 would have
infinite odds. Answers that are certain, and answers without tokens, have log-probability 0."""


class Pairs(NamedTuple):
    """For each pair of answers in each row: the sums of a value over the predicted tokens of the chosen and of the rejected
    answer. P is the number of slots for pairs in a row."""

    chosen: Tensor
    """Sum of the values over the chosen answer, (B, P)."""
    rejected: Tensor
    """Sum of the values over the rejected answer, (B, P)."""
    chosen_tokens: Tensor
    """Number of predicted tokens of the chosen answer, (B, P)."""
    rejected_tokens: Tensor
    """Number of predicted tokens of the rejected answer, (B, P)."""

    @property
    def exist(self) -> Tensor:
        """Mask of the slots that hold a pair, bool (B, P): True if both answers have predicted tokens."""
        return (self.chosen_tokens > 0) & (self.rejected_tokens > 0)


def dpo(beta: float, eos_id: int, bos_id: int, are_whole: bool) -> Callable[[Tensor, Tensor, Tensor, Columns], Found]:
    """Return the objective of direct preference optimization (Rafailov et al., 2023, equation 7), summed over pairs.

    ``beta``: the larger, the more it costs to depart from the reference model. The returned function gets the reference
    model's log-probabilities as its argument ``columns``.
    """

    def of_pairs(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor, columns: Columns) -> Found:
        gain_BL = token_log_probabilities(outputs_BLV, labels_BL) - columns["logprobs"]
        pairs = by_pair(gain_BL, rows_BL, labels_BL, eos_id, bos_id, are_whole)
        chosen_BP, rejected_BP = beta * pairs.chosen, beta * pairs.rejected
        margin_BP = chosen_BP - rejected_BP
        parts = {"accuracy": (margin_BP > 0).float(), "margin": margin_BP}
        parts |= {"chosen": chosen_BP, "rejected": rejected_BP}
        return _summed(-F.logsigmoid(margin_BP), parts, pairs.exist)

    return of_pairs


def orpo(beta: float, eos_id: int, bos_id: int, are_whole: bool) -> Callable[[Tensor, Tensor, Tensor], Found]:
    """Return the objective of odds ratio preference optimization (Hong et al., 2024, equations 3 to 7), summed over pairs.

    For a pair the loss is the mean cross-entropy of the chosen answer's tokens, plus ``beta`` (the paper's lambda) times the
    negative log-sigmoid of the log odds ratio of chosen to rejected answer. An answer's probability is the geometric mean of
    its tokens' probabilities. There is no reference model.
    """

    def of_pairs(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor) -> Found:
        pairs = by_pair(token_log_probabilities(outputs_BLV, labels_BL), rows_BL, labels_BL, eos_id, bos_id, are_whole)
        chosen_BP = pairs.chosen / pairs.chosen_tokens.clamp_min(1.0)
        rejected_BP = pairs.rejected / pairs.rejected_tokens.clamp_min(1.0)
        ratio_BP = log_odds(chosen_BP) - log_odds(rejected_BP)
        odds_BP = -F.logsigmoid(ratio_BP)
        parts = {"accuracy": (ratio_BP > 0).float(), "log_odds_ratio": ratio_BP}
        parts |= {"cross_entropy": -chosen_BP, "odds": odds_BP}
        return _summed(beta * odds_BP - chosen_BP, parts, pairs.exist)

    return of_pairs


def log_odds(log_probabilities: Tensor) -> Tensor:
    """Return the log odds log(p / (1 - p)), given log(p).

    Examples:
        >>> import torch
        >>> [f"{one:.4f}" for one in log_odds(torch.tensor([0.5, 0.8]).log()).tolist()]
        ['0.0000', '1.3863']
    """
    log_probabilities = log_probabilities.clamp_max(_NO_MORE)
    return log_probabilities - torch.log(-torch.expm1(log_probabilities))


def _summed(nats_BP: Tensor, parts: Mapping[str, Tensor], exist_BP: Tensor) -> Found:
    """Return the total of the losses ``nats_BP`` over all pairs that exist, the number of pairs, and the total of each part
    (named value for the log)."""

    def total(values_BP: Tensor) -> Tensor:
        return values_BP.masked_fill(~exist_BP, 0.0).sum()

    return total(nats_BP), exist_BP.sum(), {name: total(one.detach()) for name, one in parts.items()}


def token_log_probabilities(outputs_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the log-probability of each target token, fp32 (B, L). Where there is no target (-100) the value is arbitrary."""
    log_BLV = outputs_BLV.float().log_softmax(-1)
    return log_BLV.gather(-1, labels_BL.clamp_min(0)[..., None])[..., 0]


def by_pair(
    values_BL: Tensor, rows_BL: Tensor, labels_BL: Tensor, eos_id: int, bos_id: int, are_whole: bool = False
) -> Pairs:
    """Sum ``values_BL`` over the predicted tokens of both answers of each pair.

    Examples:
        >>> import torch
        >>> rows = torch.tensor([[9, 1, 2, 9, 9, 3, 9, 9]])  # 9 ends and begins a document
        >>> labels = torch.tensor([[-100, 2, 9, -100, -100, 9, -100, -100]])
        >>> values = torch.arange(8.0)[None]
        >>> found = by_pair(values, rows, labels, 9, 9)
        >>> found.chosen[0, 0].item(), found.rejected[0, 0].item(), found.exist.sum().item()
        (3.0, 5.0, 1)
    """
    B, L = rows_BL.shape
    # index of the document that contains a position. The position's target is in the same document, because the first token of
    # a document is never predicted
    document_BL = document_begins(rows_BL, eos_id, bos_id, are_whole).cumsum(1) - 1
    document_BL = document_BL.clamp_min(0)
    counts_BL = labels_BL != IGNORE_INDEX
    sums_BD = values_BL.new_zeros(B, L + L % 2).scatter_add(1, document_BL, values_BL.masked_fill(~counts_BL, 0.0))
    tokens_BD = torch.zeros_like(sums_BD).scatter_add(1, document_BL, counts_BL.to(sums_BD.dtype))
    return Pairs(sums_BD[:, 0::2], sums_BD[:, 1::2], tokens_BD[:, 0::2], tokens_BD[:, 1::2])


# Distillation: learn a teacher's next-token distribution (Hinton et al., "Distilling the knowledge in a neural network",
# 2015).
#
# Labels hold the teacher's k largest probabilities. All other ids together count as one more outcome, for the teacher and for
# the student. So the divergence compares two distributions over k + 1 outcomes. It never exceeds the divergence over all ids,
# and is zero where teacher and student agree. If the k probabilities were renormalised to 1, the teacher would seem surer than
# it is, and the student would become too sure (see Anshumann et al., "Sparse logit sampling: accelerating knowledge
# distillation in LLMs", 2025, on the bias of cached top-k).
#
# Shape suffixes: B rows, L positions, V ids, K stored ids.

Found = tuple[Tensor, Tensor, dict[str, Tensor]]


def distillation(cross_entropy: float) -> Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Found]:
    """Return the objective of distillation: (1 - ``cross_entropy``) times the divergence from the teacher, plus
    ``cross_entropy`` times the cross-entropy of next tokens, summed over the tokens that are predicted."""

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

    ``log_BLV``: the student's log-probabilities; ``teacher_BLK``: the teacher's log-probabilities of ``ids_BLK``, fp32.

    Examples:
        >>> import torch
        >>> log_probabilities = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]]).log()
        >>> ids = torch.tensor([[[0, 1]]])
        >>> divergence(log_probabilities, ids, log_probabilities[..., :2]).item()
        0.0
        >>> f"{divergence(log_probabilities, ids, torch.tensor([[[0.25, 0.25]]]).log()).item():.4f}"  # 0.5 of the rest
        '0.1733'
    """
    # limit the sum to 1: stored probabilities are rounded, so they may add up to a little more
    mass_BL1 = teacher_BLK.exp().sum(-1, keepdim=True)
    teacher_BLK = teacher_BLK - mass_BL1.clamp_min(1.0).log()
    kl_BL = (teacher_BLK.exp() * (teacher_BLK - log_BLV.gather(-1, ids_BLK))).sum(-1)
    if ids_BLK.shape[-1] == log_BLV.shape[-1]:
        return kl_BL
    rest_BL = (1.0 - mass_BL1[..., 0]).clamp_min(0.0)
    student_BL = log_BLV.scatter(-1, ids_BLK, -torch.inf).logsumexp(-1)
    return kl_BL + torch.xlogy(rest_BL, rest_BL) - rest_BL * student_BL


Columns = Mapping[str, Tensor]
_FIELD = "objective.source"
_LEARNS_FROM = {"distill": "topk", "dpo": "logprob"}
_BUILT_IN: dict[str, Callable[..., Any]] = {"distill": distillation, "dpo": dpo, "orpo": orpo}
"""Value of ``objective.source`` -> function that makes the objective. All objectives but ``distill`` learn from pairs of
answers."""
_PER_UNIT = 2.0**24
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MOST_PARTS = 32
_ROWS, _LENGTH = 2, 3
"""Number of rows, and their length, of the micro-batch of zeros with which the constructor of ``Objective`` tries the
function."""


class Objective:
    """A training objective (loss function). The constructor calls the function once, with zero logits, to learn the names of
    its parts (values that it returns for the log)."""

    def __init__(
        self,
        source: str,
        vocab_size: int,
        device: torch.device,
        layout: LabelLayout | None = None,
        settings: ObjectiveConfig | None = None,
        eos_id: int | None = None,
        bos_id: int | None = None,
        whole_documents: bool = False,
        teacher: Callable[[Tensor], Columns] | None = None,
    ) -> None:
        """``layout``: names, dtypes and shapes of label columns, None without labels; ``settings``: options of built-in
        objectives; ``eos_id``, ``bos_id``, ``whole_documents``: as for ``Decoder``; ``teacher``: computes the label columns
        from ids (B, L), in place of stored labels.

        Raises:
            ConfigError: ``source`` cannot be found, returns something invalid, or does not fit the labels.
        """
        self.source, self._is_built_in = source, source in OBJECTIVES
        self._function: Callable[..., Any] = (
            _built_in(settings or ObjectiveConfig(), source, eos_id, bos_id, whole_documents)
            if self._is_built_in
            else find_code(_FIELD, source)
        )
        self._teacher = teacher
        self._takes_columns = _takes_columns(source, self._function, layout)
        ids_BL = torch.zeros(_ROWS, _LENGTH, dtype=torch.int64, device=device)
        outputs_BLV = torch.zeros(_ROWS, _LENGTH, vocab_size, device=device, requires_grad=True)
        columns = zeros(layout, _ROWS, device, _LENGTH)
        try:
            parts = self._call(outputs_BLV, ids_BL, ids_BL, columns)[2]
        except SpringtideError as error:
            raise ConfigError(explain(_FIELD, source, str(error), "see springtide.model.objective")) from None
        except Exception as error:
            what = f"raises {type(error).__name__}: {error}, called with {_ROWS} rows of {_LENGTH} tokens"
            raise ConfigError(explain(_FIELD, source, what, "see springtide.model.objective")) from error
        self.names = tuple(sorted(parts))
        """Sorted names of the parts: values that the objective returns for the log."""
        bad = [name for name in self.names if not _NAME.fullmatch(name)]
        if bad or len(self.names) > _MOST_PARTS:
            what = f"names a part {bad[0]!r}" if bad else f"names {len(self.names)} parts"
            remedy = f"at most {_MOST_PARTS} names of letters, digits, _, . and -"
            raise ConfigError(explain(_FIELD, source, what, remedy))

    @property
    def size(self) -> int:
        """Length of the vector of sums that a call returns: sum, weight, and one sum per part."""
        return 2 + len(self.names)

    def __call__(
        self, outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor, columns: Columns
    ) -> tuple[Tensor, Tensor]:
        """Return the sum to minimise, and a vector of sum, weight and parts (values for the log), float64 (size,), without
        gradient. Raises TrainingFailed if the function returns something invalid, or parts with other names than in the
        constructor."""
        if not len(rows_BL):
            # a rank without rows must take part in the collectives of backward: return a zero loss that depends on the model's
            # output
            return outputs_BLV.sum() * 0.0, torch.zeros(self.size, dtype=torch.float64, device=outputs_BLV.device)
        columns = self._teacher(rows_BL) if self._teacher else columns
        total, weight, parts = self._call(outputs_BLV, rows_BL, labels_BL, columns)
        if parts.keys() != set(self.names):
            raise TrainingFailed(f"{self.source} returned the parts {sorted(parts)}, before: {list(self.names)}")
        values = [total.detach(), weight, *(parts[name] for name in self.names)]
        doubles = [
            torch.as_tensor(value, dtype=torch.float64, device=total.device).detach().reshape(()) for value in values
        ]
        found = torch.stack(doubles)
        # round a built-in objective's sums to multiples of 2**-24, as ``row_losses`` does: then sums over ranks are exact. A
        # user's objective may have any magnitude, so its sums are not rounded
        return total, torch.round(found * _PER_UNIT) / _PER_UNIT if self._is_built_in else found

    def checked_weight(self, sums: Sequence[float]) -> float:
        """Return the total weight of a step. ``sums``: the vectors of ``__call__``, summed over the step and all ranks. Raises
        TrainingFailed if the weight is not above 0."""
        if not sums[1] > 0:
            raise TrainingFailed(f"the weight of {self.source} is {sums[1]} in all rows of a step; it must be above 0")
        return sums[1]

    def metrics_from_sums(self, sums: Sequence[float]) -> dict[str, float]:
        """Return name -> value of each part: its sum divided by the total weight. ``sums``: as in ``checked_weight``."""
        return {f"objective/{name}": value / sums[1] for name, value in zip(self.names, sums[2:], strict=True)}

    def _call(
        self, outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor, columns: Columns
    ) -> tuple[Tensor, Any, Mapping[str, Any]]:
        given = {name: one if one.is_floating_point() else one.long() for name, one in columns.items()}
        found = self._function(outputs_BLV, rows_BL, labels_BL, *[given] * self._takes_columns)
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], Mapping):
            # report a FakeTensor, a subclass of torch's, as Tensor
            kind = "Tensor" if isinstance(found, Tensor) else type(found).__name__
            shown = f"{len(found)} values" if isinstance(found, tuple) else kind
            raise TrainingFailed(f"returned {shown}; return (sum, weight, parts), parts a dictionary")
        total, weight, parts = found
        if (
            not isinstance(total, Tensor)
            or total.numel() != 1
            or not (total.requires_grad or not torch.is_grad_enabled())
        ):
            raise TrainingFailed(
                "returned a sum that is no scalar tensor with a gradient; compute the sum from the model's outputs"
            )
        for name, value in (("weight", weight), *parts.items()):
            if not isinstance(name, str) or not (
                value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
            ):
                what = str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
                raise TrainingFailed(f"returned {what} as {name!r}; return a scalar")
        return total.reshape(()), weight, parts


def zeros(layout: LabelLayout | None, rows: int, device: torch.device, length: int = 0) -> dict[str, Tensor]:
    """Return label columns of zeros, in the dtypes that label columns have on a device; an empty dict without a layout.
    ``length``: row length L; 0: the layout's."""
    if layout is None:
        return {}
    columns = layout._replace(sequence_length=length or layout.sequence_length).columns(rows)
    types = {"float16": torch.float16, "float32": torch.float32}
    return {
        name: torch.zeros(shape, dtype=types.get(kind, torch.int32), device=device)
        for name, (kind, shape) in columns.items()
    }


def _built_in(
    settings: ObjectiveConfig, source: str, eos_id: int | None, bos_id: int | None, whole_documents: bool
) -> Callable[..., Any]:
    make = look_up(_BUILT_IN, _FIELD, source)
    if make is distillation:
        return make(settings.cross_entropy)
    if eos_id is None:
        problem = "learns from pairs of answers, and documents of a row are not masked from each other here"
        raise ConfigError(explain(_FIELD, source, problem, "prepare a dataset of answer pairs"))
    return make(settings.beta, eos_id, eos_id if bos_id is None else bos_id, whole_documents)


def _takes_columns(source: str, function: Callable[..., Any], layout: LabelLayout | None) -> bool:
    """Return True if the function takes label columns (another model's predictions). Raises ConfigError if the function needs
    labels but the config names none, or the config names labels but the function takes none."""
    field = "objective.labels"
    wanted = _LEARNS_FROM.get(source)
    if wanted and (layout is None or layout.what != wanted):
        holds = "names none" if layout is None else f"holds {layout.what}"
        remedy = f"write labels with `springtide data prepare --label-what {wanted}`"
        remedy += ", or name an objective.teacher" * (source == "distill")
        raise ConfigError(explain(_FIELD, source, f"learns from {wanted}, and {field} {holds}", remedy))
    try:
        names = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables implemented in C have no signature
        names = []
    fourth = [one for one in names if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][3:4]
    if layout is None and fourth and fourth[0].default is inspect.Parameter.empty:
        raise ConfigError(explain(_FIELD, source, f"takes labels, and {field} names none", f"set {field}"))
    if layout is not None and not fourth:
        problem = f"are read by nobody: {source} takes three arguments"
        raise ConfigError(explain(field, layout.what, problem, "add a fourth argument, or unset objective.labels"))
    return layout is not None


# The cross-entropy of next tokens, as a function that a user may copy.


def next_token(outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return sum, weight and parts of next-token cross-entropy, as an example of a user's objective.

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
