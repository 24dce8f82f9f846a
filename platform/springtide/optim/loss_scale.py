"""Dynamic loss scaling for fp16 (Micikevicius et al., "Mixed precision training", 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIRST = 2.0**16
_MOST = 2.0**32
_PATIENCE = 2000
"""Number of steps in a row without overflow after which the scale doubles. Before the first overflow each step doubles it."""


class LossScale:
    """Factor by which the loss is multiplied before backward, so that small gradients do not vanish in fp16. All ranks observe
    the same overflows, so they keep the same scale.

    The loss is divided by the tokens of all ranks before backward, so the right scale grows with the global batch. The scale
    doubles after every step until the first overflow, so finding it costs a few steps. From then on it adapts slowly."""

    def __init__(self, enabled: bool) -> None:
        """Without ``enabled`` the scale stays 1."""
        self.enabled = enabled
        self.begin({})

    def begin(self, state: Mapping[str, Any]) -> None:
        """Restore the scale from the checkpoint's ``state``; reset the scale if ``state`` is empty."""
        self.value, self._good = _FIRST if self.enabled else 1.0, 0
        self._searching = True
        """True until the first overflow: the scale doubles after every step."""
        if self.enabled and state:
            self.value, self._good = float(state["value"]), int(state["good"])
            self._searching = bool(state["searching"])

    def after(self, overflowed: bool) -> None:
        """Adapt the scale after a step. ``overflowed``: the step was skipped because a gradient was not finite."""
        if not self.enabled:
            return
        if overflowed:
            self.value, self._good, self._searching = max(1.0, self.value / 2), 0, False
        else:
            self._good += 1
            if self._searching or self._good == _PATIENCE:
                self.value, self._good = max(self.value, min(_MOST, self.value * 2)), 0

    def state(self) -> dict[str, float]:
        """Return the scale's state for a checkpoint; ``begin`` restores it."""
        found = {"value": self.value, "good": self._good, "searching": self._searching}
        return found if self.enabled else {}
