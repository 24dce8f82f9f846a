"""Dynamic loss scaling for fp16 (Micikevicius et al., "Mixed precision training", 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIRST = 2.0**16
_MOST = 2.0**24
_PATIENCE = 2000
"""Steps without overflow before a larger scale is tried."""


class LossScale:
    """Factor of the loss before backward, so that small gradients do not vanish in fp16. All ranks see the same overflows,
    so they keep the same scale."""

    def __init__(self, enabled: bool) -> None:
        """Without ``enabled`` it stays 1."""
        self.enabled, self.value, self._good = enabled, _FIRST if enabled else 1.0, 0

    def after(self, overflowed: bool) -> None:
        """Adapt the scale after a step that was taken, or skipped because a gradient was not finite."""
        if not self.enabled:
            return
        if overflowed:
            self.value, self._good = max(1.0, self.value / 2), 0
        else:
            self._good += 1
            if self._good == _PATIENCE:
                self.value, self._good = min(_MOST, self.value * 2), 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good": self._good} if self.enabled else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; an empty one changes nothing."""
        if self.enabled and state:
            self.value, self._good = float(state["value"]), int(state["good"])
