"""A sweep: many runs (trials) of one recipe with different settings, to find the best. ``tune.folder`` describes its folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from springtide import config as configs
from springtide.checkpoint.branch import first_step
from springtide.checkpoint.format import name_of as step_name
from springtide.config import Config
from springtide.config.code import BESIDE_THE_MODEL, find_code
from springtide.config.fields import fields, mark
from springtide.config.renames import ADDED_SETTINGS, current, lost, newest_name
from springtide.config.schema import NAME
from springtide.errors import ConfigError, RunExists, explain
from springtide.events import Event, Started, StepDone, Stopped
from springtide.ray.tune.messages import HeldSweep, hold_sweep
from springtide.run.find import config_or_problem
from springtide.run.folder import REPORT, Run
from springtide.storage import Folder, to_json
from springtide.stream import open_data
from springtide.tracking.ledger import Prices, costs, ledger
from springtide.tracking.mlflow_client import OFF, SweepSink, default_uri
from springtide.tune import (
    Budget,
    Chosen,
    Generation,
    Point,
    PointList,
    Rung,
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
from springtide.tune.space import WEIGHT

if TYPE_CHECKING:  # Ray loads only when needed
    import threading

    from springtide.ray.tune.messages import TrialJob
    from springtide.ray.tune.schedulers import TrialScheduler
    from springtide.ray.tune.worker_pool import WorkerPoolHandle

_OF_TAKEOVER = ("train.start_from", "train.start_with")
"""Settings that a trial of population-based training has only after it has taken over another trial's state."""


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
    """Train a trial (run) at each of many points (settings) of a search space, in parallel, and rank the trials.

    Trials share the workers of the cluster: each has from ``elastic.min_workers`` to ``elastic.max_workers`` workers. A trial
    that fails is marked and does not end the sweep. At Ctrl-C or SIGTERM trials save their state, and the sweep ends with its
    result so far. A second signal ends the sweep at once; a later resume continues trials from their newest checkpoints.

    Args:
        base: config of every trial, before the values of its point are applied.
        space: search space, objective and budget: a table as in tune_spaces/, or the path of such a file.
        name: name of the sweep and of its folder; generated if empty.
        search: how points are chosen: random, grid or tpe.
        scheduler: which trials are stopped early: none, asha, hyperband, median, pbt or pb2.
        seed: seed of the random choice of points.
        concurrent: number of trials at a time; 0: all that fit the cluster.
        resume: continue the sweep ``name``; "auto" creates the sweep if it does not exist.
        say: receives lines of text on the sweep's progress.
        dashboard: if a private cluster is started for the sweep, start Ray's dashboard, too.

    Returns:
        Every trial with its point, values and costs, and the best trial.

    Raises:
        ConfigError: the space or a setting cannot work, or a resumed sweep had another space or other settings. Raised before
            anything starts.
        RunExists: the sweep exists and ``resume`` is not set, or another driver process is running it.

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
    base = absolute(base)  # make paths absolute: each trial has its own driver process, with another working directory
    uri = mlflow_uri(base)
    judges = scheduler_of(scheduler, table)
    root = Folder(base.run.root)
    folder = SweepFolder(root / (name or time.strftime("sweep-%Y%m%d-%H%M%S-") + secrets.token_hex(2)))
    plan, points = started_with(folder, plan_of(base, table, search, seed), resume), folder.points()
    check_finalists(folder, table.budget)
    # get the exclusive right to the sweep before anything is written: a second driver is refused and writes nothing
    with hold_sweep(folder) as held:
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
        # Do not write a URI from the environment into the trials' configs, because it may contain a password. Trials get it as
        # ``tracking_uri`` instead
        own = uri if uri == default_uri(root) else base.track.mlflow_uri
        changes = {"run.root": folder.trials.url, "track.progress": False, "track.mlflow_uri": own}
        base = base.override({**changes, "track.parent": sink.id if sink else ""})
        driver = SweepDriver(held, table, base, root.url, uri, concurrent, say)
        say(driver.plan())

        about = {
            "springtide.sweep": folder.root.name,
            "springtide.folder": folder.root.url,
            "springtide.report": folder.page,
        }
        shared = cluster(base, dashboard=dashboard, metadata=about)
        with shared, open_worker_pool(_worker(base), folder.root.name) as pool:
            check_resources(base)
            if any(Prices.set_in(base.track)) and base.shards.dataset and not base.sources.keys() - BESIDE_THE_MODEL:
                say(driver.projected_cost(worker_speed(base, open_data(base.data).vocab_size)))
            # set the signal handlers after Ray has started: Ray sets its own handler of SIGTERM, which would replace them
            with stop_signals() as interrupted:
                limit = driver.try_all(pool, asked, judges, members, interrupted)
        held.check()
        if limit:
            say(limit)
        return driver.finish(sink)


@dataclasses.dataclass(frozen=True)
class SweepDriver:
    """Runs a sweep: trains all trials, then ranks them. It holds the sweep's lease, so no other driver writes to the sweep."""

    held: HeldSweep
    table: Sweep
    base: Config
    """Config of every trial, before the values of its point are applied."""
    root: str
    """URL of the folder that contains the sweep's folder and other runs (``run.root``)."""
    tracking_uri: str
    """The MLflow URI, which may contain a password."""
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
        """Return the size of the sweep as text: trials, tokens, evaluations."""
        budget = self.table.budget
        most = budget.trials * budget.tokens_per_trial
        most = min(most, int(budget.tokens)) if budget.tokens else most
        return (
            f"{self.folder.name}: {budget.trials} trials of {budget.tokens_per_trial:,} tokens, evaluated {budget.rungs} "
            f"times by {self.table.metric}; at most {most:,} tokens in all"
        )

    def projected_cost(self, tokens_per_s: float) -> str:
        """Return, as text, the cost of the sweep if no trial is stopped early. ``tokens_per_s``: speed of one worker with the
        base config [tokens/s]."""
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
        """Train a trial at every point of the search, then repeat the best trials (finalists) with other seeds. If the sweep
        ended early, returns the reason, else "".

        Args:
            members: the points at which the trials of population-based training start; empty for other schedulers.
            interrupted: event that is set when all trials must save their state and end.
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
        """Rank the trials; write, print and return the result."""
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
        """Return the trial numbers of the finalists: the best trials, which are repeated with other seeds. They are chosen and
        recorded now, unless this was done before the sweep was resumed."""
        budget = self.table.budget
        if self.folder.finalists(budget) is None:
            best = finalists(self.table, outcomes)[: budget.finalists]
            self.folder.write_finalists(Chosen([one.number for one in best], budget.trials, budget.seeds))
        return self._chosen()

    def _chosen(self) -> list[int]:
        """Return the trial numbers of the finalists (best trials) that were recorded; empty before they are chosen."""
        chosen = self.folder.finalists(self.table.budget)
        return chosen.numbers if chosen else []

    def _reseeded(self, chosen: Sequence[int]) -> list[Point]:
        """Return the points at which to repeat the trials ``chosen``: each trial's settings, once for each further seed."""
        points = [self.folder.lineage(number, {})[-1].point for number in chosen]
        return [other_seed(self.base, point, seed) for point in points for seed in range(1, self.table.budget.seeds)]

    def _write(self, verdict: SweepResult) -> None:
        """Write the sweep's result (``result.json``), its HTML page, and the config of the best trial."""
        from springtide.run.report.sweep_page import render
        from springtide.tune.search import importance

        self.folder.write_result(verdict)
        mattered = importance(self.table, [one for one in verdict.outcomes if one.repeats < 0])
        pages = {}
        # write missing reports of trials, because the driver of a trial may have been killed before it wrote one
        for one in verdict.outcomes:
            for run in self.reader.runs(one.number, one.point):
                pages[one.number] = f"{self.folder.trials.name}/{run.id}/{REPORT}"
                if not run.folder.exists(REPORT):
                    run.write_report()
        self.folder.write_page(render(self.folder.name, self.table, verdict, mattered, pages))
        if (best := verdict.best) is not None:
            self.folder.write_best(self._best_config(best))

    def _best_config(self, best: TrialOutcome) -> Config:
        """Return a config that trains like the best trial, but outside of the sweep: the present base config, plus all settings
        of the trial that affect training."""
        config = trial_config(self.base, self.table.budget, best.name, best.point)
        ran = configs.difference(config, self.reader.runs(best.number, best.point)[-1].config)
        own = {name: value for name, (_, value) in configs.changes_the_run(ran).items() if name not in _OF_TAKEOVER}
        return config.override({**own, "run.id": "", "run.root": self.root, "track.parent": "", "track.progress": True})


def _report(run: Folder) -> None:
    Run(run).write_report()


def _check(base: Config, name: str, scheduler: str) -> None:
    from springtide.ray.tune.schedulers import POPULATIONS

    # load the user's code now: if it is missing, fail before any trial starts
    for field in BESIDE_THE_MODEL & base.sources.keys():
        find_code(field, base.sources[field])
    if not re.fullmatch(NAME, name):
        limit = "is not the name of a folder below run.root"
        raise ConfigError(explain("--name", name, limit, "begin with a letter or digit; use these, '.', '_' and '-'"))
    if base.elastic.deadline.is_set:
        limit = "applies to a single run: trials share the workers of the sweep"
        raise ConfigError(explain("elastic.deadline", str(base.elastic.deadline), limit, "leave it at 0"))
    if base.run.queue:
        problem = "a sweep has the whole cluster, and shares it between its trials"
        raise ConfigError(
            explain("run.queue", base.run.queue, problem, "leave run.queue empty, and sweep on a separate cluster")
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
    """Return the start points (settings) of the trials of population-based training. After a resume, these are the points that
    the trials had reached. All these trials start at once, so a search that chooses points from results of earlier trials
    raises ConfigError."""
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


# The plan of a sweep: everything that determines its points and trials. A sweep can only be resumed with an equal plan.

_OF_POINTS = ("search", "seed", "space")
_OF_TRIALS = ("train.total", "train.eval_every")
"""Settings that a trial gets from the sweep's budget instead of from the base config."""
_OF_VALUES = ("train.eval_tokens",)
"""Settings that may change when a run is resumed, but not when a sweep is resumed: they affect the values by which trials are
compared."""


def plan_of(base: Config, table: Sweep, search: str, seed: int) -> dict[str, Any]:
    """Return the plan of a new sweep, which determines its points and trials, as stored in ``sweep.json``.

    >>> from springtide.tune import read
    >>> base = configs.recipes.tiny()
    >>> budget = {"trials": 4, "tokens_per_trial": 40 * base.tokens_per_step}
    >>> space = {"optim.peak_lr": ("uniform", 0.01, 0.02)}
    >>> table = read({"SPACE": space, "OBJECTIVE": {"metric": "loss", "mode": "min"}, "BUDGET": budget}, base)
    >>> plan = plan_of(base, table, "random", seed=0)
    >>> sorted(plan), plan["base"]["stream.seed"], "optim.peak_lr" in plan["base"]
    (['base', 'distinct', 'search', 'seed', 'space'], 0, False)
    """
    plan = {"search": search, "seed": seed, "space": [dataclasses.asdict(one) for one in table.space]}
    tried = {WEIGHT.rstrip(".") if one.field.startswith(WEIGHT) else one.field for one in table.space}
    counts = {name for name, field in fields().items() if mark(field) != "free"} | {*_OF_VALUES}
    counts -= {*_OF_TRIALS, *tried}
    shown = configs.flatten(configs.redact(base))
    settings = {name: value for name, value in shown.items() if name in counts}
    return {**plan, "distinct": True, "base": settings}


def started_with(folder: SweepFolder, plan: dict[str, Any], resume: bool | Literal["auto"]) -> dict[str, Any]:
    """Return the plan that the sweep was created with, if the sweep exists already; else return ``plan``.

    Raises RunExists if the sweep exists and ``resume`` is not set. Raises ConfigError if ``resume`` is True and the sweep does
    not exist. Also raises ConfigError if the existing sweep has another space, search, seed or base config. The same error is
    raised if the existing sweep uses a setting that springtide no longer has and that affects training.
    """
    earlier = _under_new_names(folder.plan())
    if earlier is not None and not resume:
        raise RunExists(f"the sweep {folder.url} exists; continue it with --resume, or choose another --name")
    if resume is True and earlier is None:
        raise ConfigError(
            explain("--name", folder.name, f"is not a sweep in {folder.url.rpartition('/')[0]}", "omit --resume")
        )
    if earlier is None:
        return plan
    now, remedy = json.loads(to_json(plan)), "repeat the options of its start, or choose another --name"
    if any(earlier.get(key) != now[key] for key in _OF_POINTS):
        problem = "was started with another space, --search or --seed"
        raise ConfigError(explain("--name", folder.name, problem, remedy))
    if changed := _changed(earlier.get("base"), now["base"]):
        raise ConfigError(explain("--name", folder.name, f"was started with other settings: {changed}", remedy))
    return earlier


def check_finalists(folder: SweepFolder, budget: Budget) -> None:
    """Raise ConfigError if BUDGET.trials or BUDGET.seeds has changed since the finalists (best trials, repeated with other
    seeds) were chosen. The numbers of the repeats depend on both values. If one changed, a trial could be mistaken for a
    repeat."""
    chosen = folder.finalists(budget)
    for name in ("trials", "seeds") if chosen else ():
        before, now = getattr(chosen, name), getattr(budget, name)
        if now != before:
            limit = f"was {before} when the finalists were chosen"
            raise ConfigError(explain(f"BUDGET.{name}", now, limit, "set it back, or start a sweep with a new --name"))


def _under_new_names(plan: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the stored plan of a sweep, updated to this version: renamed settings get their present names, removed settings
    are dropped. Raises ConfigError if the plan uses a removed setting without which trials would train something else."""
    base, space = (plan or {}).get("base"), (plan or {}).get("space")
    if plan is not None and isinstance(base, dict):
        sections: dict[str, dict[str, Any]] = {}
        for name, value in base.items():
            section, _, field = name.partition(".")
            sections.setdefault(section, {})[field] = value
        if problems := lost(sections):
            raise ConfigError("\n".join(problems))
        named = {
            f"{section}.{field}": value for section, of in current(sections).items() for field, value in of.items()
        }
        plan = {**plan, "base": named}
    if plan is not None and isinstance(space, list):
        ranges = [{**one, "field": newest_name(str(one.get("field")))} for one in space if isinstance(one, dict)]
        plan = {**plan, "space": ranges}
    return plan


def _changed(before: object, now: Mapping[str, Any]) -> str:
    """Return, as text, the settings of the base config that differ from those of an earlier start (``before``). Returns an
    empty text if an old version recorded no base config. A setting that did not exist at the earlier start is compared with the
    value that turns it off."""
    known = {**ADDED_SETTINGS, **before} if isinstance(before, Mapping) else {}
    differ = [name for name in now if name in known and known[name] != now[name]]
    return "; ".join(f"{name} was {known[name]!r}, is {now[name]!r}" for name in differ)


# Read the outcomes of a sweep's trials from the sweep's folder and from the folders of the trials' runs.


@dataclasses.dataclass(frozen=True)
class SweepReader:
    """Reads the outcomes of a sweep's trials."""

    folder: SweepFolder
    table: Sweep
    prices: Prices
    """Prices per worker and hour, to compute the cost of each trial."""

    def outcomes(self) -> list[TrialOutcome]:
        """Return the outcomes of all trials that were started or wait to start."""
        return [self._outcome(number, point) for number, point in self.folder.points().items()]

    def interrupted(self, outcomes: Sequence[TrialOutcome]) -> list[str]:
        """Return the names of trials that were interrupted and may be resumed. If a trial must not continue, the sweep's driver
        writes a record of its end. A failed trial without this record counts as interrupted: for example, its store was
        unreachable."""
        ended = self.folder.ended()
        return [one.name for one in outcomes if one.status != "finished" and one.number not in ended]

    def runs(self, number: int, point: Point) -> list[Run]:
        """Return the runs of trial ``number`` that have started and can be read, oldest first."""
        return [run for run in self._started(self.folder.lineage(number, point)) if config_or_problem(run)[0]]

    def begun(self) -> Config | None:
        """Return the config of the first readable run of any trial; None if no run can be read. Callers use it to find the
        datasets, which are the same for all trials unless the space contains settings of the data."""
        return next(
            (run.config for number, point in self.folder.points().items() for run in self.runs(number, point)), None
        )

    def last_settled_rung(self, members: Sequence[Point]) -> int:
        """Return the last settled rung of a population. A rung is a step at which trials are compared. It is settled if all
        trials have reached it and at least one has continued from it: then it is decided which trials take over another trial's
        state."""
        lineages = [self.folder.lineage(number, point) for number, point in enumerate(members)]
        started = [self._started(generations) for generations in lineages]
        started = [runs for runs in started if not self._problem(runs)]  # leave out trials that cannot be read
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
        """Return those runs of a trial that have started. ``generations``: the successive runs of the trial."""
        runs = [Run(self.folder.trials / one.run) for one in generations]
        return [run for run in runs if run.folder.exists(configs.RUN_CONFIG)]

    def _problem(self, runs: Sequence[Run]) -> str:
        """Return the reason why a run of a trial cannot be read, in one line; empty if all its runs can be read."""
        return next((problem for _, problem in map(config_or_problem, runs) if problem), "")

    def _rungs(self, runs: Sequence[Run]) -> list[Rung]:
        """Return the rungs (evaluations at which trials are compared) of a trial, in order of steps. If a later run of the
        trial took over another trial's state at a step, rungs of earlier runs after this step are dropped."""
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
    """Return (status, reason) of a trial whose end the sweep's driver did not record, from the events of the trial's newest
    run."""
    last = events[-1] if events else None
    if isinstance(last, Stopped) and last.status in ("finished", "failed"):
        return last.status, last.reason
    step = max((event.step for event in events if isinstance(event, StepDone | Started)), default=0)
    return "stopped", f"interrupted at step {step:,}, can be resumed"
