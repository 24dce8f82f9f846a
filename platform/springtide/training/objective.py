"""The objective that a config names: what is minimised in place of the cross-entropy of next tokens.

``objective.source`` names a user's function, ``package.module:function``, called for each micro-batch as ``function(outputs,
rows, labels)`` with

    outputs   what the model returns for the rows: logits (B, L, V) in the type that it computes in
    rows      the ids that it was given, int64 (B, L)
    labels    the ids that follow them, int64 (B, L); -100 where nothing is predicted

It returns ``(sum, weight, parts)``. A step minimises the sum of all ``sum`` over the sum of all ``weight``, over all
micro-batches and ranks. ``parts`` maps names to scalars, such as terms of the sum; each is summed and divided likewise, and
told with the step as ``objective/NAME``. All of them are sums over tokens or rows, never means: then neither the micro-batch
nor the world size matters. The names are always the same.

Held-out losses stay the cross-entropy of next tokens, so that runs can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from springtide.config.code import find_code
from springtide.errors import ConfigError, SpringtideError, TrainingFailed, explain
from springtide.model import IGNORE_INDEX

_FIELD = "objective.source"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MOST_PARTS = 32
_ROWS, _LENGTH = 2, 3
"""Size of the micro-batch of zeros that the function is called with first."""


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


class Objective:
    """A user's objective, called once with logits of zero to learn the names of its parts."""

    def __init__(self, source: str, vocab_size: int, device: torch.device) -> None:
        """Raises ConfigError if ``source`` cannot be found, or does not return what it should."""
        self.source = source
        self._function: Callable[..., Any] = find_code(_FIELD, source)
        ids_BL = torch.zeros(_ROWS, _LENGTH, dtype=torch.int64, device=device)
        outputs_BLV = torch.zeros(_ROWS, _LENGTH, vocab_size, device=device, requires_grad=True)
        try:
            parts = self._call(outputs_BLV, ids_BL, ids_BL)[2]
        except SpringtideError as error:
            raise ConfigError(explain(_FIELD, source, str(error), "see springtide.training.objective")) from None
        except Exception as error:
            what = f"raises {type(error).__name__}: {error}, called with {_ROWS} rows of {_LENGTH} tokens"
            raise ConfigError(explain(_FIELD, source, what, "see springtide.training.objective")) from error
        self.names = tuple(sorted(parts))
        """Names of the parts."""
        bad = [name for name in self.names if not _NAME.fullmatch(name)]
        if bad or len(self.names) > _MOST_PARTS:
            what = f"names a part {bad[0]!r}" if bad else f"names {len(self.names)} parts"
            remedy = f"at most {_MOST_PARTS} names of letters, digits, _, . and -"
            raise ConfigError(explain(_FIELD, source, what, remedy))

    @property
    def size(self) -> int:
        """Sums that it returns."""
        return 2 + len(self.names)

    def __call__(self, outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum to minimise, and sum, weight and parts as float64 (size,) without gradient. Raises TrainingFailed if
        the function returns anything else."""
        if not len(rows_BL):
            # a rank without rows runs the model all the same
            return outputs_BLV.sum() * 0.0, torch.zeros(self.size, dtype=torch.float64, device=outputs_BLV.device)
        total, weight, parts = self._call(outputs_BLV, rows_BL, labels_BL)
        if parts.keys() != set(self.names):
            raise TrainingFailed(f"{self.source} returned the parts {sorted(parts)}, before: {list(self.names)}")
        values = [total.detach(), weight, *(parts[name] for name in self.names)]
        doubles = [
            torch.as_tensor(value, dtype=torch.float64, device=total.device).detach().reshape(()) for value in values
        ]
        return total, torch.stack(doubles)

    def checked_weight(self, sums: list[float]) -> float:
        """Return the weight of a step, from its ``sums`` over all ranks: loss, tokens, square of the gradient norm, weight,
        parts. Raises TrainingFailed if it is not above 0."""
        if not sums[3] > 0:
            raise TrainingFailed(f"the weight of {self.source} is {sums[3]} in all rows of a step; it must be above 0")
        return sums[3]

    def told(self, sums: list[float]) -> dict[str, float]:
        """Return the parts per weight, from ``sums`` as in ``checked_weight``."""
        return {f"objective/{name}": value / sums[3] for name, value in zip(self.names, sums[4:], strict=False)}

    def _call(self, outputs_BLV: Tensor, rows_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Any, Mapping[str, Any]]:
        found = self._function(outputs_BLV, rows_BL, labels_BL)
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], Mapping):
            shown = type(found).__name__ if not isinstance(found, tuple) else f"{len(found)} values"
            raise TrainingFailed(f"returned {shown}; return (sum, weight, parts), parts a dictionary")
        total, weight, parts = found
        if (
            not isinstance(total, Tensor)
            or total.numel() != 1
            or not (total.requires_grad or not torch.is_grad_enabled())
        ):
            raise TrainingFailed(
                "returned a sum that is no scalar tensor with a gradient; sum over what the model returned"
            )
        for name, value in (("weight", weight), *parts.items()):
            if not isinstance(name, str) or not (
                value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
            ):
                what = str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
                raise TrainingFailed(f"returned {what} as {name!r}; return a scalar")
        return total.reshape(()), weight, parts
