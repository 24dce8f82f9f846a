"""What a sweep's trials have done, read from its folder and from the folders of their runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from springtide import config as configs
from springtide.checkpoint.branch import first_step
from springtide.checkpoint.format import name_of as step_name
from springtide.config import Config
from springtide.events import Event, Started, StepDone, Stopped
from springtide.run.find import config_or_problem
from springtide.run.folder import Run
from springtide.tracking.ledger import Prices, costs, ledger
from springtide.tune import Generation, Point, Rung, Sweep, SweepFolder, TrialOutcome


@dataclasses.dataclass(frozen=True)
class SweepReader:
    """Reads the outcomes of a sweep's trials."""

    folder: SweepFolder
    table: Sweep
    prices: Prices
    """Prices of a worker."""

    def outcomes(self) -> list[TrialOutcome]:
        """Return the outcomes of all trials that were started."""
        return [self._outcome(number, point) for number, point in self.folder.points().items()]

    def interrupted(self, outcomes: Sequence[TrialOutcome]) -> list[str]:
        """Return the names of trials that were interrupted and may be resumed. The driver records the end of a trial that must
        not continue: a run that failed without that was interrupted, as by a store that stayed away."""
        ended = self.folder.ended()
        return [one.name for one in outcomes if one.status != "finished" and one.number not in ended]

    def runs(self, number: int, point: Point) -> list[Run]:
        """Return the runs of a trial that have started and can be read, oldest first."""
        return [run for run in self._started(self.folder.lineage(number, point)) if config_or_problem(run)[0]]

    def begun(self) -> Config | None:
        """Return the config of the first trial's run that can be read; None if there is none. All trials have its
        datasets, unless the space says otherwise."""
        return next(
            (run.config for number, point in self.folder.points().items() for run in self.runs(number, point)), None
        )

    def last_settled_rung(self, members: Sequence[Point]) -> int:
        """Return the step of the last rung that all members of a population have reached and at least one has continued from:
        the takeovers at that rung are decided."""
        lineages = [self.folder.lineage(number, point) for number, point in enumerate(members)]
        started = [self._started(generations) for generations in lineages]
        started = [runs for runs in started if not self._problem(runs)]  # a trial that cannot be read settles nothing
        rungs = [[rung.step for rung in self._rungs(runs)] for runs in started]
        reached = min((max(steps, default=0) for steps in rungs), default=0)
        taken_over = any(one.of.endswith(step_name(reached)) for generations in lineages for one in generations)
        began = (event.step for runs in started for run in runs for event in run.events if isinstance(event, Started))
        if taken_over or any(step >= reached for step in began):
            return reached
        return max((step for steps in rungs for step in steps if step < reached), default=0)

    def _outcome(self, number: int, point: Point) -> TrialOutcome:
        generations = self.folder.lineage(number, point)
        runs = self._started(generations)
        if not runs:
            return TrialOutcome(number, point, "waiting", repeats=self._repeats(number))
        if problem := self._problem(runs):
            return TrialOutcome(
                number, point, "failed", reason=f"cannot be read: {problem}", repeats=self._repeats(number)
            )
        books = [ledger(run.events, self.prices) for run in runs]
        status, reason = self.folder.end_of(number) or _end(runs[-1].events)
        second = self.table.secondary
        return TrialOutcome(
            number,
            generations[-1].point,
            status,
            tuple(self._rungs(runs)),
            reason,
            sum(book.held for book in books),
            sum(sum(book.dollars.values()) for book in books),
            sum(len(book.restarts) for book in books),
            costs(step for run in runs for step in run.steps)[second.metric] if second else math.nan,
            self._repeats(number),
            tuple(one.of for one in generations[1:]),
        )

    def _repeats(self, number: int) -> int:
        """Return the number of the trial whose point trial ``number`` repeats with another seed; -1 if it repeats none."""
        chosen = self.folder.finalists(self.table.budget)
        return chosen.repeated_by(number) if chosen else -1

    def _started(self, generations: Sequence[Generation]) -> list[Run]:
        """Return the runs of ``generations`` that have started."""
        runs = [Run(self.folder.trials / one.run) for one in generations]
        return [run for run in runs if run.folder.exists(configs.RUN_CONFIG)]

    def _problem(self, runs: Sequence[Run]) -> str:
        """Return in one line why the runs of a trial cannot be read; empty if they can."""
        return next((problem for _, problem in map(config_or_problem, runs) if problem), "")

    def _rungs(self, runs: Sequence[Run]) -> list[Rung]:
        """Return the rungs in order of steps. Where a run took over another's state, later rungs of the runs before are
        ignored."""
        metric, rungs = self.table.metric, dict[int, Rung]()
        for run in runs:
            config, losses = run.config, {step.step: step.loss for step in run.steps}
            rungs = {step: rung for step, rung in rungs.items() if step <= first_step(config.train)}
            for one in run.evaluations:
                if one.step:
                    value = losses.get(one.step) if metric == "loss" else getattr(one, metric)
                    if value is not None:
                        rungs[one.step] = Rung(one.step, config.tokens_after(one.step), value)
        return [rungs[step] for step in sorted(rungs)]


def _end(events: Sequence[Event]) -> tuple[str, str]:
    """Return the status of a trial that nobody has ended, and the reason, from the events of its newest run."""
    last = events[-1] if events else None
    if isinstance(last, Stopped) and last.status in ("finished", "failed"):
        return last.status, last.reason
    step = max((event.step for event in events if isinstance(event, StepDone | Started)), default=0)
    return "stopped", f"interrupted at step {step:,}, can be resumed"
