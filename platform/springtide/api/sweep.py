"""A sweep: many runs of one recipe, to find the best. ``tuning.folder`` draws its folder."""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from springtide import config as configs
from springtide.api.sweep_plan import check_finalists, plan_of, started_with
from springtide.api.sweep_reader import SweepReader
from springtide.config import Config
from springtide.config.code import BESIDE_THE_MODEL, find_code
from springtide.config.schema import NAME
from springtide.errors import ConfigError, explain
from springtide.ray.tune.held_sweep import HeldSweep, hold_sweep
from springtide.run.folder import REPORT, Run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.tracking.ledger import Prices
from springtide.tracking.mlflow_client import OFF, SweepSink, default_uri
from springtide.tune import (
    Chosen,
    Point,
    PointList,
    Search,
    Sweep,
    SweepFolder,
    SweepResult,
    TrialOutcome,
    finalists,
    name_of,
    other_seed,
    rank_trials,
    read,
    read_file,
    search_of,
    trial_config,
    words,
)

if TYPE_CHECKING:  # Ray loads only when needed
    import threading

    from springtide.ray.tune.messages import TrialJob
    from springtide.ray.tune.schedulers import TrialScheduler
    from springtide.ray.tune.worker_pool import WorkerPoolHandle


_OF_TAKEOVER = ("train.start_from", "train.start_with")
"""Settings of a member of a population that continues from another's state."""


def sweep(
    base: Config,
    space: str | Mapping[str, Any],
    *,
    name: str = "",
    search: str = "random",
    scheduler: str = "asha",
    seed: int = 0,
    concurrent: int = 0,
    resume: bool | Literal["auto"] = False,
    say: Callable[[str], None] = print,
    dashboard: bool = True,
) -> SweepResult:
    """Try points of a space in parallel, and rank them.

    Trials share the workers of the cluster: each has from ``elastic.min_workers`` to ``elastic.max_workers`` of them. A trial
    that fails is marked and does not end the sweep. At Ctrl-C or SIGTERM trials save their state, and the sweep ends with its
    result so far; a second one ends it at once, and resumed trials continue from their newest checkpoints.

    Args:
        base: config of every trial, before the values of its point.
        space: a table as in tune_spaces/, or the path of its file.
        name: name of the sweep and of its folder; generated if empty.
        search: how points are chosen: random, grid or tpe.
        scheduler: which trials are stopped early: none, asha, hyperband, median, pbt or pb2.
        seed: seed of the points.
        concurrent: number of trials at a time; 0: all that fit the cluster.
        resume: continue the sweep ``name``; "auto" starts it if there is none.
        say: receives lines of text on the sweep's course.
        dashboard: start Ray's dashboard with a private cluster.

    Returns:
        Every trial with its point, values and costs, and which is best.

    Raises:
        ConfigError: the space or a setting cannot work, or a resumed sweep was started with others; before anything starts.
        RunExists: the sweep exists and ``resume`` is not set, or another driver holds it.

    Examples:
        >>> found = st.sweep(st.recipes.tiny(), "tune_spaces/lr_and_decay.py")  # doctest: +SKIP
        >>> sorted(found.best.point)  # doctest: +SKIP
        ['optim.peak_lr', 'optim.weight_decay']
    """
    from springtide.api.prepare import as_begun, prepare
    from springtide.api.resolve import absolute
    from springtide.api.tracking_server import mlflow_uri
    from springtide.ray.cluster.session import check_resources, cluster, worker_speed
    from springtide.ray.cluster.stop_signals import stop_signals
    from springtide.ray.tune.schedulers import POPULATIONS, scheduler_of
    from springtide.ray.tune.worker_pool import open_worker_pool

    table = read_file(space, base) if isinstance(space, str) else read(space, base)
    _check(base, name, scheduler)
    base = absolute(base)  # trials have their drivers in other processes
    uri = mlflow_uri(base)
    judges = scheduler_of(scheduler, table)
    root = Folder(base.run.root)
    folder = SweepFolder(root / (name or time.strftime("sweep-%Y%m%d-%H%M%S-") + secrets.token_hex(2)))
    plan, points = started_with(folder, plan_of(base, table, search, seed), resume), folder.points()
    check_finalists(folder, table.budget)
    with hold_sweep(folder) as held:  # a refused driver has written nothing
        known, distinct = list(points.values())[: table.budget.trials], plan.get("distinct") is True
        asked = search_of(search, table, base, seed, known, distinct)
        members = _members(folder, table, asked, search, scheduler) if scheduler in POPULATIONS else []
        folder.write_plan(plan)
        if not any(one.field.startswith(("corpus.", "shards.")) for one in table.space):
            base, remarks = as_begun(base, SweepReader(folder, table, Prices.set_in(base.track)).begun() or base)
            for remark in remarks:
                say(remark)
            base = prepare(base)
        sink = SweepSink(configs.flatten(configs.redact(base)), folder.root, uri) if uri != OFF else None
        # a URI from the environment may have a password: trials get it through ``tracking_uri``, not in their config
        own = uri if uri == default_uri(root) else base.track.mlflow_uri
        changes = {"run.root": folder.trials.url, "track.progress": False, "track.mlflow_uri": own}
        base = base.override({**changes, "track.parent": sink.id if sink else ""})
        driver = SweepDriver(held, table, base, root.url, uri, concurrent, say)
        say(driver.plan())

        about = {
            "springtide.sweep": folder.root.name,
            "springtide.folder": folder.root.url,
            "springtide.run.report": folder.page,
        }
        shared = cluster(base, dashboard=dashboard, metadata=about)
        with shared, open_worker_pool(_worker(base), folder.root.name) as pool:
            check_resources(base)
            if any(Prices.set_in(base.track)) and base.shards.dataset and not base.sources.keys() - BESIDE_THE_MODEL:
                say(driver.projected_cost(worker_speed(base, open_data(base.data).vocab_size)))
            with stop_signals() as interrupted:  # Ray, when it starts, handles SIGTERM itself
                limit = driver.try_all(pool, asked, judges, members, interrupted)
        held.check()
        if limit:
            say(limit)
        return driver.finish(sink)


@dataclasses.dataclass(frozen=True)
class SweepDriver:
    """Drives a sweep that it holds: tries all points, then ranks the trials."""

    held: HeldSweep
    table: Sweep
    base: Config
    """The config of the trials, without a point."""
    root: str
    """URL of the folder of the sweep and of other runs."""
    tracking_uri: str
    """The MLflow URI, which may have a password."""
    concurrent: int
    """Number of trials at a time; 0: all that fit the cluster."""
    say: Callable[[str], None]

    @property
    def folder(self) -> SweepFolder:
        return self.held.folder

    @property
    def reader(self) -> SweepReader:
        return SweepReader(self.folder, self.table, Prices.set_in(self.base.track))

    def plan(self) -> str:
        """Return, as text, how much is tried at most."""
        budget = self.table.budget
        most = budget.trials * budget.tokens_per_trial
        most = min(most, int(budget.tokens)) if budget.tokens else most
        return (
            f"{self.folder.name}: {budget.trials} trials of {budget.tokens_per_trial:,} tokens, evaluated {budget.rungs} "
            f"times by {self.table.metric}; at most {most:,} tokens in all"
        )

    def projected_cost(self, tokens_per_s: float) -> str:
        """Return the cost, as text, if no trial is stopped. ``tokens_per_s``: of one worker that trains the base recipe."""
        budget, track = self.table.budget, self.base.track
        trials = budget.trials + budget.finalists * (budget.seeds - 1)
        tokens = trials * budget.tokens_per_trial
        hours = (min(tokens, int(budget.tokens)) if budget.tokens else tokens) / tokens_per_s / 3600.0
        prices = sorted({price for price in (track.price, track.spot_price) if price})
        dollars = " to ".join(f"{hours * price:.3g}" for price in prices)
        limits = [f"{getattr(budget, kind):g} {kind}" for kind in ("worker_hours", "dollars") if getattr(budget, kind)]
        speed = f"a worker trains {tokens_per_s:,.0f} tokens/s of this recipe"
        said = f"{speed}: {hours:.3g} worker-hours, {dollars} $, and start-up"
        return f"{said}; the sweep ends at {' or '.join(limits)}" if limits else said

    def try_all(
        self,
        pool: WorkerPoolHandle,
        search: Search,
        scheduler: TrialScheduler,
        members: Sequence[Point],
        interrupted: threading.Event,
    ) -> str:
        """Try every point, then the best again with other seeds; returns why it ended early, or "".

        Args:
            members: the points at which a population's trials start; empty for other schedulers.
            interrupted: set when all trials are to save their state and end.
        """
        from springtide.ray.tune.schedulers import scheduler_of
        from springtide.ray.tune.tuner import TrialTuner

        for number, point in enumerate(members):
            self.held.begin_trial(number, point)
        tuner = TrialTuner(self._job(pool, members), self.concurrent, self.say, interrupted)
        limit = tuner.run(search, scheduler, members, before=self.reader.outcomes())
        self.held.check()
        outcomes = self.reader.outcomes()
        if limit or not self.table.budget.finalists or self.reader.interrupted(outcomes):
            return limit
        chosen = self._finalists(outcomes)
        points = self._reseeded(chosen)
        budget = dataclasses.replace(self.table.budget, trials=len(points), min_improvement_per_dollar=0.0)
        job = dataclasses.replace(
            tuner.job, sweep=dataclasses.replace(tuner.job.sweep, budget=budget), population=False
        )
        self.say(f"{', '.join(map(name_of, chosen))} are trained again with other seeds")
        again = PointList(points, self.table.budget.trials)
        return dataclasses.replace(tuner, job=job).run(again, scheduler_of("none", job.sweep), before=outcomes)

    def finish(self, sink: SweepSink | None) -> SweepResult:
        """Rank the trials; write the result, say it and return it."""
        verdict = rank_trials(self.table, self.reader.outcomes(), self._chosen())
        self._write(verdict)
        best = verdict.best
        if sink:
            figures = {"worker_s": verdict.worker_s, "dollars": verdict.dollars}
            figures |= {self.table.metric: best.value} if best else {}
            sink.end({"trial": best.name, **best.point} if best else {}, figures)
        self.say(words(self.table, verdict))
        self.say(f"page: {self.folder.page}")
        if left := self.reader.interrupted(verdict.outcomes):
            names, again = ", ".join(left), f"--resume --name {self.folder.name}"
            self.say(f"{names} can be resumed: use the same command with {again}")
        return verdict

    def _job(self, pool: WorkerPoolHandle, members: Sequence[Point]) -> TrialJob:
        from springtide.api.train import train
        from springtide.ray.tune.messages import TrialJob

        return TrialJob(
            base=self.base,
            sweep=dataclasses.replace(self.table, where=None),
            held=self.held,
            pool=pool,
            train=functools.partial(train, tracking_uri=self.tracking_uri),
            report=_report,
            decided=self.folder.ended(),
            population=bool(members),
            settled_step=self.reader.last_settled_rung(members),
        )

    def _finalists(self, outcomes: Sequence[TrialOutcome]) -> list[int]:
        """Return the numbers of the finalists; those of an earlier start, if it had chosen them."""
        budget = self.table.budget
        if self.folder.finalists(budget) is None:
            best = finalists(self.table, outcomes)[: budget.finalists]
            self.folder.write_finalists(Chosen([one.number for one in best], budget.trials, budget.seeds))
        return self._chosen()

    def _chosen(self) -> list[int]:
        """Return the numbers of the finalists; empty before they are chosen."""
        chosen = self.folder.finalists(self.table.budget)
        return chosen.numbers if chosen else []

    def _reseeded(self, chosen: Sequence[int]) -> list[Point]:
        """Return the points of the finalists ``chosen``, each with other seeds."""
        points = [self.folder.lineage(number, {})[-1].point for number in chosen]
        return [other_seed(self.base, point, seed) for point in points for seed in range(1, self.table.budget.seeds)]

    def _write(self, verdict: SweepResult) -> None:
        """Write the result, the page, and the config of the best trial."""
        from springtide.run.report.sweep_page import render
        from springtide.tune.study import importance

        self.folder.write_result(verdict)
        mattered = importance(self.table, [one for one in verdict.outcomes if one.repeats < 0])
        pages = {}
        for one in verdict.outcomes:  # a killed driver may not have written all reports
            for run in self.reader.runs(one.number, one.point):
                pages[one.number] = f"{self.folder.trials.name}/{run.id}/{REPORT}"
                if not run.folder.exists(REPORT):
                    run.write_report()
        self.folder.write_page(render(self.folder.name, self.table, verdict, mattered, pages))
        if (best := verdict.best) is not None:
            self.folder.write_best(self._best_config(best))

    def _best_config(self, best: TrialOutcome) -> Config:
        """Return the config of the best trial as a run of its own: this start's base, with what the trial was trained with."""
        config = trial_config(self.base, self.table.budget, best.name, best.point)
        ran = configs.difference(config, self.reader.runs(best.number, best.point)[-1].config)
        own = {name: value for name, (_, value) in configs.changes_the_run(ran).items() if name not in _OF_TAKEOVER}
        return config.override({**own, "run.id": "", "run.root": self.root, "track.parent": "", "track.progress": True})


def _report(run: Folder) -> None:
    Run(run).write_report()


def _check(base: Config, name: str, scheduler: str) -> None:
    from springtide.ray.tune.schedulers import POPULATIONS

    for field in BESIDE_THE_MODEL & base.sources.keys():  # each trial would fail
        find_code(field, base.sources[field])
    if not re.fullmatch(NAME, name):
        limit = "is not the name of a folder below run.root"
        raise ConfigError(explain("--name", name, limit, "begin with a letter or digit; use these, '.', '_' and '-'"))
    if base.elastic.deadline.is_set:
        limit = "is of one run: trials share the sweep's workers"
        raise ConfigError(explain("elastic.deadline", str(base.elastic.deadline), limit, "leave it at 0"))
    if base.run.queue:
        problem = "a sweep has the whole cluster, and shares it between its trials"
        raise ConfigError(
            explain("run.queue", base.run.queue, problem, "leave it empty, and sweep on a cluster of its own")
        )
    if not base.train.eval_tokens:
        problem = "evaluates nothing, but trials are compared on held-out rows"
        raise ConfigError(explain("train.eval_tokens", 0, problem, "set it to 100k or so"))
    if base.objective.anchor and scheduler in POPULATIONS:
        problem = (
            f"pulls to the weights that a run starts from, and with --scheduler {scheduler} trials start from others"
        )
        raise ConfigError(explain("objective.anchor", base.objective.anchor, problem, "leave it empty, or use asha"))


def _members(folder: SweepFolder, table: Sweep, asked: Search, search: str, scheduler: str) -> list[Point]:
    """Return the points at which a population's trials start, or were when an earlier start ended. Raises ConfigError for a
    search that needs results first."""
    if not isinstance(asked, PointList):
        remedy = "use random or grid"
        raise ConfigError(
            explain("--search", search, f"does not fit --scheduler {scheduler}: all trials start at once", remedy)
        )
    points = [asked.ask(number) for number in range(table.budget.trials)]
    return [folder.lineage(number, point)[-1].point for number, point in enumerate(points) if point is not None]


def _worker(base: Config) -> dict[str, float]:
    elastic = base.elastic
    return {"CPU": elastic.cpus_per_worker} | ({"GPU": elastic.gpus_per_worker} if elastic.gpus_per_worker else {})
