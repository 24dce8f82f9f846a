"""Compare two runs: their settings, samples, losses and costs.

samples    digest of each step: equal if both runs read the same rows
losses     loss of each step, compared bit for bit; and both loss curves at equal numbers of tokens
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

from springtide import config as configs
from springtide.config import Config
from springtide.config.files import changes_the_run
from springtide.errors import redacted
from springtide.events import Evaluated, StepDone
from springtide.run.folder import Run
from springtide.tracking.journal import last_steps
from springtide.tracking.ledger import Prices, ledger

_PLACES = 10
"""Number of points of each compared loss curve, at equal distances in tokens."""
_AROUND = 50
"""Each point of a loss curve is the mean loss of the last 1/50 of the steps up to it, because single losses are noisy."""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """Figures of one of the two runs that are compared."""

    id: str
    last_step: int
    tokens: int
    """Tokens that the run has trained on."""
    loss: float | None
    """Training loss of the last step [nats/token]."""
    heldout_loss: float | None
    """Loss on held-out rows in the newest evaluation [nats/token]; None without one."""
    worker_seconds: float
    goodput: float
    dollars: float
    energy_kwh: float
    """Energy that the run's workers measured [kWh]; 0 if they measured none."""
    starts: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and where they differ."""

    runs: tuple[RunSummary, RunSummary]
    settings: dict[str, tuple[Any, Any]]
    """Name of each setting that differs between the runs -> (its value in the first run, its value in the second run)."""
    changes_training: list[str]
    """Names of the settings in ``settings`` that change what the model learns; the others change only speed or reports."""
    common_steps: int
    """Number of steps that both runs have trained."""
    same_steps: bool
    """True if both runs have trained the same set of steps."""
    first_other_samples: int | None
    """First step of both runs at which they read different samples; None if there is no such step."""
    first_other_loss: int | None
    """First step of both runs at which their losses are not equal bit for bit; None if there is no such step."""
    curves: list[tuple[int, float, float]]
    """Points of both loss curves: (number of tokens, loss of the first run, loss of the second run)."""

    @property
    def identical(self) -> bool:
        """True if both runs trained the same steps (at least one) on the same samples, and all losses are equal bit for bit."""
        return (
            bool(self.common_steps)
            and self.same_steps
            and self.first_other_samples is None
            and self.first_other_loss is None
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, as ``springtide run compare --json`` prints it."""
        return {"identical": self.identical, **dataclasses.asdict(self)}


def compare_runs(one: Run, other: Run) -> Comparison:
    """Compare settings, samples, losses and costs of two runs. Reads both journals once.

    Args:
        one: the first run.
        other: the second run.

    Raises:
        DamagedFile: a config or a journal cannot be read.

    Examples:
        >>> run = st.open_run("runs/mine")
        >>> found = compare_runs(run, run)
        >>> found.identical, found.common_steps, found.settings
        (True, 8, {})
    """
    events = (one.events, other.events)
    steps = (last_steps(events[0]), last_steps(events[1]))
    settings_of = (one.config, other.config)
    changed = configs.difference(*settings_of)
    settings = {name: (_shown(a), _shown(b)) for name, (a, b) in changed.items()}
    by_step = ({step.step: step for step in steps[0]}, {step.step: step for step in steps[1]})
    common = sorted(by_step[0].keys() & by_step[1].keys())
    pairs = [(by_step[0][step], by_step[1][step]) for step in common]
    samples = next((a.step for a, b in pairs if (a.digest, a.step_tokens) != (b.digest, b.step_tokens)), None)
    losses = next((a.step for a, b in pairs if a.loss != b.loss and not (a.loss != a.loss and b.loss != b.loss)), None)
    return Comparison(
        runs=(
            _summary(one.id, settings_of[0], events[0], steps[0]),
            _summary(other.id, settings_of[1], events[1], steps[1]),
        ),
        settings=settings,
        changes_training=sorted(changes_the_run(changed)),
        common_steps=len(common),
        same_steps=by_step[0].keys() == by_step[1].keys(),
        first_other_samples=samples,
        first_other_loss=losses,
        curves=_curves(steps[0], steps[1]),
    )


def _shown(value: Any) -> Any:
    return redacted(value) if isinstance(value, str) else value


def _summary(name: str, config: Config, events: Sequence[Any], steps: Sequence[StepDone]) -> RunSummary:
    book = ledger(events, Prices.set_in(config.track))
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    return RunSummary(
        id=name,
        last_step=steps[-1].step if steps else 0,
        tokens=steps[-1].tokens if steps else 0,
        loss=steps[-1].loss if steps else None,
        heldout_loss=evaluated[-1].heldout_loss if evaluated else None,
        worker_seconds=round(book.held, 3),
        goodput=round(book.goodput, 6),
        dollars=round(book.total_dollars, 6),
        energy_kwh=round(book.total_kwh, 9),
        starts=sum(event.kind == "started" for event in events),
    )


def _curves(one: Sequence[StepDone], other: Sequence[StepDone]) -> list[tuple[int, float, float]]:
    """Return (tokens, loss of ``one``, loss of ``other``) at 10 points, at equal distances in tokens, up to the end of the run
    with fewer tokens."""
    if not one or not other:
        return []
    end = min(one[-1].tokens, other[-1].tokens)
    tokens = ([step.tokens for step in one], [step.tokens for step in other])
    found = []
    for place in range(1, _PLACES + 1):
        at = end * place // _PLACES
        ends = [bisect.bisect_right(of, at) for of in tokens]
        if all(ends):
            found.append((at, _mean(one[: ends[0]]), _mean(other[: ends[1]])))
    return found


def _mean(steps: Sequence[StepDone]) -> float:
    late = steps[-max(1, len(steps) // _AROUND) :]
    return sum(step.loss for step in late) / len(late)
