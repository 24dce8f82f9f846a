"""What a sweep found: the trials in their order, and what they cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from springtide.sweep.space import Sweep
from springtide.sweep.trial import Outcome


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of all trials."""

    outcomes: tuple[Outcome, ...]
    """By number."""
    best: Outcome | None
    """Of those that came furthest, the best; None when no trial was evaluated."""
    worker_s: float
    dollars: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "best": self.best.name if self.best else None,
            "worker_s": self.worker_s,
            "dollars": self.dollars,
            "tokens": self.tokens,
            "trials": [{"name": one.name, "value": one.value, **dataclasses.asdict(one)} for one in self.outcomes],
        }


def judge(sweep: Sweep, outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict. A trial that was stopped early is compared with nobody who was trained longer."""
    valued = [one for one in outcomes if one.rungs and math.isfinite(one.value) and one.status != "failed"]
    furthest = max((one.rungs[-1].step for one in valued), default=0)
    finalists = [one for one in valued if one.rungs[-1].step == furthest]
    best = max(finalists, key=lambda one: (sweep.promise(one.value), -one.number)) if finalists else None
    return Verdict(
        tuple(sorted(outcomes, key=lambda one: one.number)),
        best,
        sum(one.worker_s for one in outcomes),
        sum(one.dollars for one in outcomes),
        sum(one.tokens for one in outcomes),
    )


def words(sweep: Sweep, verdict: Verdict) -> str:
    """The same for people."""
    rows = sorted(
        verdict.outcomes,
        key=lambda one: (-one.tokens, -sweep.promise(one.value) if math.isfinite(one.value) else math.inf),
    )
    lines = [f"{sweep.metric}, {sweep.mode}; {len(rows)} trials, {verdict.worker_s:.0f} worker-seconds"]
    if verdict.dollars:
        lines[0] += f", {verdict.dollars:.2f} $"
    for one in rows:
        point = ", ".join(f"{field.rpartition('.')[2]} {_short(value)}" for field, value in one.point.items())
        state = f"{one.status}: {one.reason}" if one.reason else one.status
        mark = "*" if verdict.best is not None and one.number == verdict.best.number else " "
        lines.append(
            f"{mark} {one.name}  {one.value:8.4f}  {one.tokens:>12,} tokens  {one.worker_s:7.0f} s  {point}  {state}"
        )
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
