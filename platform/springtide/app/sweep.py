"""A sweep: many runs of one recipe, to find the best; its folder, its driver, its result.

<root>/<sweep id>/sweep.json      the space, and how points are chosen from it
                  leases/         which driver holds the sweep, as for a run
                  points/         one file per point, written before it is tried
                  trials/         one run per trial
                  lineage/        the runs of a population's trials, each with the checkpoint it continued from
                  ended/          trials that ended before they finished and must not continue, and why
                  finalists.json  numbers of the trials whose points are trained again with other seeds
                  result.json     every trial's rungs and costs, and which is best
                  sweep.html      the same as a page
                  best.yaml       config of the best trial, for `springtide train --config`
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.branch import first_step
from springtide.checkpoint.format import name_of as step_name
from springtide.config import Config
from springtide.errors import ConfigError, RunExists, explain
from springtide.events import Started, Stopped
from springtide.run.folder import REPORT, Run
from springtide.store import Folder
from springtide.stream import open_data
from springtide.track.ledger import Prices, costs, ledger
from springtide.track.mlflow_sink import OFF, SweepSink, default_uri
from springtide.tuning import (
    POINTS,
    Generation,
    Point,
    PointList,
    Rung,
    Search,
    Sweep,
    SweepResult,
    TrialOutcome,
    finalists,
    lineage_of,
    name_of,
    number_of,
    other_seed,
    rank_trials,
    read,
    read_file,
    search_of,
    trial_config,
    words,
)

NOTES = "sweep.json"
RESULT = "result.json"
FINALISTS = "finalists.json"
ENDED = "ended"
PAGE = "sweep.html"
BEST = "best.yaml"


def sweep(
    base: Config,
    space: str | Mapping[str, Any],
    *,
    name: str = "",
    search: str = "random",
    scheduler: str = "asha",
    seed: int = 0,
    concurrent: int = 0,
    resume: bool = False,
    say: Callable[[str], None] = print,
    dashboard: bool = True,
) -> SweepResult:
    """Try points of a space in parallel, and rank them.

    Trials share the workers of the cluster: each has from ``elastic.min_workers`` to ``elastic.max_workers`` of them. A trial
    that fails is marked and does not end the sweep.

    Args:
        base: config of every trial, before the values of its point.
        space: a table as in tune_spaces/, or the path of its file.
        name: name of the sweep and of its folder; generated if empty.
        search: how points are chosen: random, grid or tpe.
        scheduler: which trials are stopped early: none, asha, hyperband, median, pbt or pb2.
        seed: seed of the points.
        concurrent: number of trials at a time; 0: all that fit the cluster.
        resume: continue the sweep ``name``.
        say: receives lines of text on the sweep's course.
        dashboard: start Ray's dashboard with a private cluster.

    Returns:
        Every trial with its point, values and costs, and which is best.

    Raises:
        ConfigError: the space or a setting cannot work; before anything starts.
        RunExists: the sweep exists and ``resume`` is not set, or another driver holds it.

    Examples:
        >>> found = st.sweep(st.recipes.tiny(), "tune_spaces/lr_and_decay.py")  # doctest: +SKIP
        >>> sorted(found.best.point)  # doctest: +SKIP
        ['optim.peak_lr', 'optim.weight_decay']
    """
    from springtide.app.train import absolute, mlflow_uri, prepare, train
    from springtide.on_ray.cluster.session import check_resources, cluster, worker_speed
    from springtide.on_ray.tune.trial import TrialJob
    from springtide.on_ray.tune.tuner import POPULATIONS, scheduler_of
    from springtide.on_ray.tune.worker_pool import open_worker_pool

    table = read_file(space, base) if isinstance(space, str) else read(space, base)
    _check(base)
    base = absolute(base)  # trials have their drivers in other processes
    judges = scheduler_of(scheduler, table)
    root = Folder(base.run.root).url
    folder = Folder(root) / (name or time.strftime("sweep-%Y%m%d-%H%M%S-") + secrets.token_hex(2))
    notes = {"search": search, "seed": seed, "space": [dataclasses.asdict(one) for one in table.space]}
    points = _started_points(folder, notes, resume)
    with _held(folder) as lease:  # a refused driver has written nothing
        asked = search_of(
            search, table, base, seed, [points[number] for number in sorted(points)][: table.budget.trials]
        )
        begins = _population(folder, table, asked, search, scheduler) if scheduler in POPULATIONS else []
        folder.write_json(NOTES, notes)
        if not any(one.field.startswith(("corpus.", "shards.")) for one in table.space):
            base = prepare(base)
        uri = mlflow_uri(base)
        sink = SweepSink(base, folder, uri) if uri != OFF else None
        # a URI from the environment may have a password: trials get it through ``tracking_uri``, not in their config
        own = uri if uri == default_uri(Folder(root)) else base.track.mlflow_uri
        changes = {"run.root": (folder / "trials").url, "track.progress": False, "track.mlflow_uri": own}
        base = base.override({**changes, "track.parent": sink.id if sink else ""})
        say(_plan(table, folder))

        with cluster(base, dashboard=dashboard), open_worker_pool(_worker(base)) as pool:
            check_resources(base)
            if (base.track.price or base.track.spot_price) and base.shards.dataset and not base.model.source:
                say(_projected(table, base, worker_speed(base, open_data(base).vocab_size)))
            job = TrialJob(
                base=base.model_dump(mode="json"),
                sweep=dataclasses.replace(table, where=None),
                folder=folder.url,
                pool=pool,
                train=functools.partial(train, tracking_uri=uri),
                report=_report,
                decided=frozenset(map(number_of, (folder / ENDED).names())),
                population=bool(begins),
                told=_last_settled_rung(folder, table, begins),
                lease=lease,
            )
            limit = _try_all(folder, table, base, job, asked, begins, judges, concurrent, say)
        leases.check(folder, lease)
        if limit:
            say(f"the budget is spent, {limit}")
        verdict = rank_trials(table, _outcomes(folder, table, base))
        _write_result(folder, table, base, verdict, root, sink, say)
        return verdict


def _try_all(
    folder: Folder,
    table: Sweep,
    base: Config,
    job: Any,
    asked: Search,
    begins: list[Point],
    judges: Any,
    concurrent: int,
    say: Callable[[str], None],
) -> str:
    """Try every point, then the best again with other seeds; returns the limit of the budget that was reached, or ""."""
    from springtide.on_ray.tune.tuner import run_trials, scheduler_of

    lease = job.lease  # callbacks of Tune must not refer to the job: see run_trials

    def note(number: int, how: str, why: str) -> None:
        leases.check(folder, lease)
        (folder / ENDED).write_json(f"{name_of(number)}.json", {"status": how, "reason": why})

    def begun(number: int, point: Point) -> None:
        leases.check(folder, lease)
        if not (folder / POINTS).exists(f"{name_of(number)}.json"):
            (folder / POINTS).write_json(f"{name_of(number)}.json", point)

    for number, point in enumerate(begins):
        begun(number, point)
    limit = run_trials(job, asked, begun, begins, folder, judges, concurrent, say, note)
    leases.check(folder, lease)
    outcomes = _outcomes(folder, table, base)
    if limit or not table.budget.finalists or _interrupted_trials(folder, outcomes):
        return limit
    points = _reseeded_finalists(folder, table, base, outcomes)
    budget = dataclasses.replace(table.budget, trials=len(points), min_improvement_per_dollar=0.0)
    job = dataclasses.replace(job, sweep=dataclasses.replace(job.sweep, budget=budget), population=False)
    first = [one for one in outcomes if one.repeats < 0]
    say(f"{', '.join(name_of(one) for one in folder.read_json(FINALISTS))} are trained again with other seeds")
    alike = scheduler_of("none", job.sweep)
    return run_trials(
        job, PointList(points, table.budget.trials), begun, [], folder, alike, concurrent, say, note, first
    )


@contextlib.contextmanager
def _held(folder: Folder) -> Iterator[int]:
    """Hold the sweep, as a driver holds a run; yields the term of the lease. Raises RunExists if another driver holds it."""
    lease = leases.claim(folder, secrets.token_hex(8), trains=False)
    try:
        yield lease.term
    finally:
        leases.end(folder, lease.term)


def _interrupted_trials(folder: Folder, outcomes: Sequence[TrialOutcome]) -> list[str]:
    """Return the names of trials that were interrupted and may be resumed."""
    ended = {file.removesuffix(".json") for file in (folder / ENDED).names()}
    return [one.name for one in outcomes if one.status in ("stopped", "waiting") and one.name not in ended]


def _write_result(
    folder: Folder,
    table: Sweep,
    base: Config,
    verdict: SweepResult,
    root: str,
    sink: SweepSink | None,
    say: Callable[[str], None],
) -> None:
    """Write the result, and say it."""
    from springtide.report.sweep_page import render
    from springtide.tuning.importance import importance

    folder.write_json(RESULT, verdict.as_dict())
    mattered = importance(table, [one for one in verdict.outcomes if one.repeats < 0])
    for one in verdict.outcomes:  # a killed driver may not have written all reports
        for run in _runs(folder, lineage_of(folder, one.number, one.point)):
            if not run.folder.exists(REPORT):
                _report(run.folder)
    folder.write(PAGE, render(folder.name, table, verdict, mattered))
    best = verdict.best
    if best is not None:
        alone = {"run.id": "", "run.root": root, "track.parent": "", "track.progress": True}
        config = trial_config(base, table.budget, best.name, best.point)
        config = config.override(alone)
        folder.write(BEST, configs.dump(config), private=bool(configs.secret_fields(config)))
    if sink:
        figures = {"worker_s": verdict.worker_s, "dollars": verdict.dollars}
        figures |= {table.metric: best.value} if best else {}
        sink.end({"trial": best.name, **best.point} if best else {}, figures)
    say(words(table, verdict))
    say(f"page: {folder.where(PAGE)}")
    if left := _interrupted_trials(folder, verdict.outcomes):
        say(f"{', '.join(left)} can be resumed: use the same command with --resume --name {folder.name}")


def _report(run: Folder) -> None:
    Run(run).write_report()


def _check(base: Config) -> None:
    if not base.train.eval_rows:
        problem = "evaluates nothing, but trials are compared on held-out rows"
        raise ConfigError(explain("train.eval_rows", 0, problem, "set it to 1 or more"))


def _started_points(folder: Folder, notes: dict[str, Any], resume: bool) -> dict[int, Point]:
    """Return number -> point of the trials that an earlier start began. Raises RunExists if there was one but not ``resume``;
    ConfigError if ``resume`` but there was none, or if it chose its points in another way than ``notes``."""
    exists = folder.exists(NOTES)
    if exists and not resume:
        raise RunExists(f"the sweep {folder.url} exists; continue it with --resume, or choose another --name")
    if resume and not exists:
        raise ConfigError(
            explain("--name", folder.name, f"is not a sweep in {folder.url.rpartition('/')[0]}", "omit --resume")
        )
    if exists and folder.read_json(NOTES) != json.loads(json.dumps(notes)):
        raise ConfigError(
            explain(
                "--name",
                folder.name,
                "was started with another space, --search or --seed",
                "use the same ones, or another name",
            )
        )
    return {number_of(file): (folder / POINTS).read_json(file) for file in (folder / POINTS).names()}


def _population(folder: Folder, table: Sweep, asked: Search, search: str, scheduler: str) -> list[Point]:
    """Return the points at which a population's trials start, or were when an earlier start ended. Raises ConfigError for a
    search that needs results first."""
    if not isinstance(asked, PointList):
        remedy = "use random or grid"
        raise ConfigError(
            explain("--search", search, f"does not fit --scheduler {scheduler}: all trials start at once", remedy)
        )
    points = [asked.ask(number) for number in range(table.budget.trials)]
    return [lineage_of(folder, number, point)[-1].point for number, point in enumerate(points) if point is not None]


def _last_settled_rung(folder: Folder, table: Sweep, begins: list[Point]) -> int:
    """Return the step of the last rung that all members of a population have reached and at least one has continued from: the
    takeovers at that rung are decided."""
    lineages = [lineage_of(folder, number, point) for number, point in enumerate(begins)]
    members = [_runs(folder, generations) for generations in lineages]
    rungs = [[rung.step for rung in _rungs(table, runs)] for runs in members]
    reached = min((max(steps, default=0) for steps in rungs), default=0)
    turned = any(one.of.endswith(step_name(reached)) for generations in lineages for one in generations)
    began = (event.step for runs in members for run in runs for event in run.events if isinstance(event, Started))
    if turned or any(step >= reached for step in began):
        return reached
    return max((step for steps in rungs for step in steps if step < reached), default=0)


def _plan(table: Sweep, folder: Folder) -> str:
    budget = table.budget
    most = budget.trials * budget.tokens_per_trial
    most = min(most, int(budget.tokens)) if budget.tokens else most
    return (
        f"{folder.name}: {budget.trials} trials of {budget.tokens_per_trial:,} tokens, evaluated {budget.rungs} times by "
        f"{table.metric}; at most {most:,} tokens in all"
    )


def _projected(table: Sweep, base: Config, tokens_per_s: float) -> str:
    """Return the cost, as text, if no trial is stopped. ``tokens_per_s``: of one worker that trains the base recipe."""
    budget = table.budget
    trials = budget.trials + budget.finalists * (budget.seeds - 1)
    tokens = trials * budget.tokens_per_trial
    hours = (min(tokens, int(budget.tokens)) if budget.tokens else tokens) / tokens_per_s / 3600.0
    prices = sorted({price for price in (base.track.price, base.track.spot_price) if price})
    dollars = " to ".join(f"{hours * price:.3g}" for price in prices)
    limits = [f"{getattr(budget, kind):g} {kind}" for kind in ("worker_hours", "dollars") if getattr(budget, kind)]
    said = f"a worker trains {tokens_per_s:,.0f} tokens/s of this recipe: {hours:.3g} worker-hours, {dollars} $, and start-up"
    return f"{said}; the sweep ends at {' or '.join(limits)}" if limits else said


def _worker(base: Config) -> dict[str, float]:
    elastic = base.elastic
    return {"CPU": elastic.cpus_per_worker} | ({"GPU": elastic.gpus_per_worker} if elastic.gpus_per_worker else {})


def _outcomes(folder: Folder, table: Sweep, base: Config) -> list[TrialOutcome]:
    """Return the outcomes of all trials that were started."""
    names = sorted((folder / POINTS).names())
    return [_outcome(folder, table, base, number_of(name), (folder / POINTS).read_json(name)) for name in names]


def _reseeded_finalists(folder: Folder, table: Sweep, base: Config, outcomes: Sequence[TrialOutcome]) -> list[Point]:
    """Return the points of the finalists, each with other seeds; those of an earlier start, if it had chosen them."""
    if not folder.exists(FINALISTS):
        best = finalists(table, outcomes)[: table.budget.finalists]
        folder.write_json(FINALISTS, [one.number for one in best])
    numbers = folder.read_json(FINALISTS)
    points = [lineage_of(folder, number, {})[-1].point for number in numbers]
    return [other_seed(base, point, seed) for point in points for seed in range(1, table.budget.seeds)]


def _repeats(folder: Folder, table: Sweep, number: int) -> int:
    """Return the number of the trial whose point trial ``number`` repeats with another seed; -1 if it repeats none."""
    at = number - table.budget.trials
    return int(folder.read_json(FINALISTS)[at // (table.budget.seeds - 1)]) if at >= 0 else -1


def _outcome(folder: Folder, table: Sweep, base: Config, number: int, point: Point) -> TrialOutcome:
    """Return the outcome of a trial, from the folders of its runs."""
    generations = lineage_of(folder, number, point)
    runs = _runs(folder, generations)
    if not runs:
        return TrialOutcome(number, point, "waiting", repeats=_repeats(folder, table, number))
    books = [ledger(run.events, Prices(base.track.price, base.track.spot_price)) for run in runs]
    status, reason = "stopped", ""
    file = f"{name_of(number)}.json"
    if (folder / ENDED).exists(file):
        note = (folder / ENDED).read_json(file)
        status, reason = note["status"], note["reason"]
    elif runs[-1].finished:
        status = "finished"
    elif isinstance(last := runs[-1].events[-1], Stopped) and last.status == "failed":
        status, reason = "failed", last.reason
    return TrialOutcome(
        number,
        generations[-1].point,
        status,
        tuple(_rungs(table, runs)),
        reason,
        sum(book.held for book in books),
        sum(sum(book.dollars.values()) for book in books),
        sum(len(book.restarts) for book in books),
        costs(step for run in runs for step in run.steps)[table.secondary.metric] if table.secondary else math.nan,
        _repeats(folder, table, number),
        tuple(one.of for one in generations[1:]),
    )


def _runs(folder: Folder, generations: list[Generation]) -> list[Run]:
    """Return the runs of ``generations`` that have started."""
    runs = [Run(folder / "trials" / one.run) for one in generations]
    return [run for run in runs if run.folder.exists(configs.RUN_CONFIG)]


def _rungs(table: Sweep, runs: list[Run]) -> list[Rung]:
    """Return the rungs in order of steps. Where a run took over another's state, later rungs of the runs before are ignored."""
    rungs: dict[int, Rung] = {}
    for run in runs:
        config, losses = run.config, {step.step: step.loss for step in run.steps}
        rungs = {step: rung for step, rung in rungs.items() if step <= first_step(config.train)}
        for one in run.evaluations:
            if one.step:
                value = losses.get(one.step) if table.metric == "loss" else getattr(one, table.metric)
                if value is not None:
                    rungs[one.step] = Rung(one.step, config.tokens_after(one.step), value)
    return [rungs[step] for step in sorted(rungs)]
