"""Decide all settings of a run before anything is written to its folder.

    find its folder -> prepare its data -> decide where it starts -> fit it to the cluster -> ResolvedRun

Only preparing the data writes files. The prepared dataset stays, and the next start of the run uses it. A run that is refused
leaves no folder, no lease (a driver's exclusive right to write to the run) and no run in MLflow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import posixpath
import time
from collections.abc import Iterator
from typing import Any, Literal

from springtide import config as configs
from springtide.api.prepare import as_begun, prepare
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import step_of
from springtide.checkpoint.fresh_start import check_fresh_start, newer_of_other_orders
from springtide.config import Config
from springtide.config.code import find_code
from springtide.config.objective import L2SP
from springtide.config.steps import StepsDone
from springtide.dataset import Progress
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.planning.device_memory import usable_bytes
from springtide.planning.estimate import (
    check_fits,
    choose_micro_batch,
    estimate_evenness,
    gigabytes,
    least_workers,
)
from springtide.run.find import check_taken_up, find_run, remarks_on
from springtide.run.folder import Run
from springtide.shards import TRAIN
from springtide.storage import Folder
from springtide.stream import Data, open_data
from springtide.tracking.journal import stream_journal
from springtide.tracking.ledger import SPOT

_RATE_JUMP = 0.02
"""The user gets a remark if the learning rate changes by more than this fraction at a resume, or at the start of a branch (a
run that continues another run)."""


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A run that is ready to start, with all settings decided."""

    run: Run
    config: Config
    """The config to train. ``train.micro_batch`` is a number, not "auto"; ``elastic.min_workers`` is large enough for the
    model; ``shards.dataset`` exists."""
    starts_from: str
    """URL of the checkpoint to start from; empty for step 0. If nodes hold a newer snapshot in memory, the run starts from the
    snapshot instead."""
    remarks: tuple[str, ...]
    """Remarks for the user: settings that changed or were decided, and checkpoints that would be set aside (kept, but not
    resumed from)."""
    from_scratch: bool = False
    accept_changes: bool = False
    finished: bool = False
    """True if nothing is left to train. Then settings such as ``train.micro_batch`` are not decided."""
    dashboard: str = ""
    """Host and port of the dashboard of the connected Ray cluster; empty if there is none."""
    is_private: bool = False
    """True if the connected Ray cluster was started for this run only."""

    @functools.cached_property
    def data(self) -> Data:
        """The data of the run, opened once."""
        return open_data(self.config.data)


def resolve(
    config: Config,
    *,
    resume: bool | Literal["auto"] = False,
    accept_changes: bool = False,
    from_scratch: bool = False,
    progress: Progress | None = None,
) -> ResolvedRun:
    """Return the run that ``train`` would train with these arguments, with all settings decided. Nothing is trained.

    Prepares the data if needed. A run that resumes reads the sealed datasets that it began with, even if its corpus has
    changed, unless the config names other datasets or the run restarts from scratch. The size of device memory is queried from
    the cluster of ``RAY_ADDRESS``, or from this machine.

    Args:
        config: settings of the run.
        resume: continue an existing run, as for ``train``.
        accept_changes: resume also under a config that changes what is learned, as for ``train``.
        from_scratch: with ``resume``, restart the run at step 0, as for ``train``.
        progress: receives the progress of ``prepare``.

    Returns:
        The run, its decided settings, and remarks for the user.

    Raises:
        ConfigError: a setting cannot work, or the model does not fit the cluster.
        CorpusError: the corpus is missing, empty or too small.
        RunExists: the run exists and ``resume`` is not set, the config would change what is learned, or another driver holds
            the run.
        CheckpointError: no checkpoint of the run has the config's order of samples.

    Examples:
        >>> found = st.resolve(st.recipes.tiny().override({"train.micro_batch": "auto"}))  # doctest: +SKIP
        >>> found.config.train.micro_batch  # doctest: +SKIP
        16
    """
    with resolved(
        config,
        resume=resume,
        accept_changes=accept_changes,
        from_scratch=from_scratch,
        progress=progress,
        trains=False,
    ) as found:
        return found


@contextlib.contextmanager
def resolved(
    config: Config,
    *,
    resume: bool | Literal["auto"],
    accept_changes: bool,
    from_scratch: bool,
    progress: Progress | None,
    trains: bool,
) -> Iterator[ResolvedRun]:
    """Yield the result of ``resolve``. During the ``with`` block this process is connected to the Ray cluster, unless nothing
    is left to train. A private cluster (for this run only) starts once the data is prepared. While it starts, this process
    imports torch, if ``trains`` also the trainer, and decides the remaining settings."""
    from springtide.ray.cluster import session  # Ray loads only when needed

    session.check_before_start(config)
    for field, source in config.sources.items():
        find_code(field, source)
    is_plain = config.model.adapter == "none" and not (config.optim.groups or config.train.new_blocks)
    if not is_plain or config.objective.anchor:
        _check_parameters(config)
    if from_scratch and not resume:
        raise ConfigError(explain("--from-scratch", True, "restarts an existing run", "add --resume, or omit it"))
    config, run = find_run(absolute(config), resume, accept_changes)
    check_deadline(config, run)
    of_corpus: list[str] = []
    if resume and not from_scratch and run.folder.exists(configs.RUN_CONFIG):
        config, of_corpus = as_begun(config, run.config)
    if not from_scratch:
        check_taken_up(config, run)
    if resume and not from_scratch and run.has_nothing_left(config):
        remedy = "to train further, raise train.total and add --accept-changes"
        remark = f"run {run.id} finished at step {run.last_step}: nothing to do; {remedy}"
        yield ResolvedRun(run, config, run.checkpoints[-1], (remark,), finished=True)
        return
    leases.check_free(run.folder)
    config = prepare(config, progress)
    data, is_private = open_data(config.data), session.is_private()
    data.check_epochs(config.num_steps)
    with session.starting_cluster(config) as connected:
        from springtide.model import make
        from springtide.training.forgetting import with_old_sets
        from springtide.training.start_check import check_objective

        if trains:
            importlib.import_module("springtide.ray.train.trainer")
        config, unmeasured = with_old_sets(config)
        data = open_data(config.data)
        check_objective(config, data)
        if not config.model.source:
            # make the model only to raise ConfigError if its vocabulary is too small for the dataset's ids
            make(config.model, data.vocab_size)
        start, remarks = _start(config, run, data, accept_changes, from_scratch)
        remarks += of_corpus
        remarks += [*unmeasured, *data.leaks, *data.repeats(config.num_steps)]
        if (even := estimate_evenness(config)).evenness.worst < 1:
            remarks.append(even.describe())
        address = connected()
        remarks += session.check_resources(config) + remarks_on_markets(config)
        config, fitting = fitted(config, data)
        if run.folder.exists(configs.RUN_CONFIG):
            changed = configs.difference(run.config, config)
            remarks += [f"resumed with {name}: {before!r} -> {after!r}" for name, (before, after) in changed.items()]
            if changed and start:
                remarks += _rate_jump(run.config, config, start)
        yield ResolvedRun(
            run, config, start, (*remarks, *fitting), from_scratch, accept_changes, False, address, is_private
        )


def _rate_jump(before: Config, config: Config, start: str) -> list[str]:
    """Return a remark if ``config`` gives the next step a learning rate that differs by more than 2% from the rate under
    ``before``, the run's stored config. ``start``: URL of the checkpoint to start from."""

    from springtide.training.state import rate_after

    done = step_of(posixpath.basename(start)) or StepsDone(0)
    there, here = rate_after(before, done), rate_after(config, done)
    if abs(there - here) <= _RATE_JUMP * there:
        return []
    return [
        f"the learning rate after step {done} was {there:.3g} with the settings before, and is {here:.3g} with these"
    ]


def _check_parameters(config: Config) -> None:
    """Raise ConfigError if an adapter, an anchor (penalty for moving away from the start weights), new blocks or parameter
    groups do not fit the model. If the model is the user's own code, the worker group checks the parameter groups and the
    adapter's targets later."""
    from springtide.model import make
    from springtide.optim.parameter_groups import check_groups
    from springtide.training.start_check import check_adapter

    check_adapter(config)
    is_known = not config.model.source
    if is_known and (config.optim.groups or config.model.adapter != "none"):
        check_groups(make(config.model, 1), config.optim)


def _start(config: Config, run: Run, data: Data, accept_changes: bool, from_scratch: bool) -> tuple[str, list[str]]:
    """Return the URL of the checkpoint that the run starts from (empty for step 0), and remarks for the user. Raises
    CheckpointError or ConfigError if the run cannot start from its checkpoints."""
    remarks, names = [], run.checkpoints
    if from_scratch:
        remarks.append(f"restarted at step 0; checkpoints set aside: {', '.join(names) or 'none'}")
        names = []
    else:
        newer = newer_of_other_orders(run.folder, data.order.identity_at, accept_changes)
        if newer is None:
            raise CheckpointError(
                f"no checkpoint of {run.folder.url} is of this order of samples: skipped steps, weights or labels change "
                "before the oldest checkpoint. Change later steps only, or add --from-scratch to restart at step 0"
            )
        check_fresh_start(run.folder)
        if newer:
            remarks.append(f"checkpoints of another data order are set aside: {', '.join(newer)}")
            names = [name for name in names if name not in newer]
    if config.train.start_from:
        remarks += _branched(config, data)
    own = f"{run.folder.url}/checkpoints/{names[-1]}" if names else ""
    return own or config.train.start_from, remarks


def _branched(config: Config, data: Data) -> list[str]:
    """Check the checkpoint of another run that this run starts from (``train.start_from``), and return remarks for the user.
    Raises ConfigError if the run cannot start from it."""
    from springtide.training.start_check import check_start, check_tensors
    from springtide.training.state import rate_after

    saved = check_start(config, data.order.identity_at, data.tokenizer_digest)
    check_tensors(config, data)
    remarks = remarks_on(saved, config)
    if config.train.start_with == "weights":
        return remarks
    trained = step_of(branch.split(config.train.start_from)[1]) or StepsDone(0)
    there, here = rate_after(saved, trained), rate_after(config, max(branch.first_step(config.train), StepsDone(1)))
    if abs(there - here) > _RATE_JUMP * there:
        remarks.append(
            f"the learning rate of step {trained} was {there:.3g} in {config.train.start_from}; this run begins with {here:.3g}"
        )
    return remarks


def fitted(config: Config, data: Data) -> tuple[Config, list[str]]:
    """Return ``config`` with a micro-batch and a least number of workers that fit the devices of the connected cluster, and
    remarks on what was changed. Raises ConfigError if no micro-batch fits."""
    from springtide.ray.cluster.session import device_size

    size, remarks = device_size(config), []
    has = usable_bytes(config, *size)
    least = least_workers(config, data.vocab_size, data.eos_id, has)
    if least > config.elastic.min_workers:
        remarks.append(
            f"elastic.min_workers = {least}: with fewer workers a step does not fit the {gigabytes(has)} that each has"
        )
        config = config.override({"elastic.min_workers": least})
    chosen = choose_micro_batch(config, data.vocab_size, data.eos_id, has)
    if chosen != config:
        remarks.append(f"train.micro_batch = {chosen.train.micro_batch} fits the {gigabytes(has)} that a worker has")
    check_fits(chosen, data.vocab_size, data.eos_id, config.elastic.max_workers, has)
    return chosen, remarks


def absolute(config: Config) -> Config:
    """Return ``config`` with absolute paths. Relative paths refer to the driver's working directory, but other nodes and
    processes have another one."""
    # keep an empty URL in the mixture: it stands for a dataset that is yet to be prepared
    mixture = {name: url and Folder(url).url for name, url in config.stream.mixture.items()}
    eval_datasets = {name: Folder(url).url for name, url in config.stream.eval_datasets.items()}
    changes: dict[str, Any] = {
        "shards.root": Folder(config.shards.root).url,
        "stream.mixture": mixture,
        "stream.eval_datasets": eval_datasets,
    }
    if config.objective.labels:
        changes["objective.labels"] = Folder(config.objective.labels).url
    if config.objective.anchor not in ("", L2SP):
        changes["objective.anchor"] = Folder(config.objective.anchor).url
    if config.shards.dataset:
        changes["shards.dataset"] = Folder(config.shards.dataset).url
    return config.override(changes)


# Give the length of a run in epochs or steps instead of as ``train.total`` (tokens).


def with_steps(config: Config, steps: int) -> Config:
    """Return ``config`` with ``train.total`` set to the number of tokens of ``steps`` steps. Raises ConfigError if ``steps`` is
    below 1.

    Examples:
        >>> from springtide.api.resolve import with_steps
        >>> with_steps(st.recipes.tiny(), 20).num_steps
        20
    """
    if steps < 1:
        raise ConfigError(explain("--steps", steps, "trains on nothing", "give at least one step"))
    return config.override({"train.total": config.tokens_after(steps)})


def with_epochs(
    config: Config, epochs: float, resume: bool | Literal["auto"] = False, progress: Progress | None = None
) -> Config:
    """Return ``config`` with a ``train.total`` that reads its dataset ``epochs`` times, rounded up to whole steps.

    Prepares the dataset if needed. For a run that resumes, the total is computed from the dataset that the run began with. If
    ``stream.max_epochs`` is below ``epochs``, it is increased.

    Args:
        config: settings of the run.
        epochs: number of times that each row is read; may be a fraction.
        resume: continue an existing run, as for ``train``.
        progress: receives the progress of ``prepare``.

    Raises:
        ConfigError: ``epochs`` is not a positive number, or the run mixes several datasets.
        CorpusError: the corpus is missing, empty or too small.
    """
    if not (math.isfinite(epochs) and epochs > 0):
        raise ConfigError(explain("--epochs", epochs, "is not a number above 0", "give one, such as 3"))
    config = absolute(config)
    run = Run(Folder(config.run.root) / config.run.id) if resume and config.run.id else None
    if run is not None and run.folder.exists(configs.RUN_CONFIG):
        config, _ = as_begun(config, run.config)
    config = prepare(config, progress)
    data = open_data(config.data)
    if len(data.corpora) > 1:
        limit = (
            f"is not defined for a mixture of {len(data.corpora)} datasets, each of which is read as its weight says"
        )
        raise ConfigError(explain("--epochs", epochs, limit, "give --steps or --train.total"))
    rows = data.corpora[0].manifest.splits[TRAIN].rows
    config = config.override({"train.total": math.ceil(rows * epochs) * config.shards.sequence_length})
    (drawn,) = open_data(config.data).drawn(config.num_steps).values()
    return config.override({"stream.max_epochs": max(config.stream.max_epochs, math.ceil(drawn.epochs * 100) / 100)})


# Checks of a run's deadline (``elastic.deadline``), made before anything is written.

_DEADLINE = "elastic.deadline"
_MOST_S = 366 * 86400.0
"""Largest time until a deadline [s]. A later deadline is probably a mistake, such as a wrong year."""
_MARKETS = ("on-demand", *SPOT)
_LABEL = "ray start --labels ray.io/market-type=spot, or on-demand"


def begun_s(run: Run) -> float:
    """Return the time of a run's first event, in seconds since 1970. If the run has no events, return the present time."""
    first = next(
        stream_journal(run.folder), None
    )  # read only up to the first event, because the whole journal (event log) of a long run takes seconds to read
    return time.time() if first is None else first.time_s


def check_deadline(config: Config, run: Run) -> None:
    """Raise ConfigError if the run has a deadline (``elastic.deadline``) that it cannot work with: it has passed or is more
    than a year away, ``track.price`` or ``track.spot_price`` is missing, spot nodes are not cheaper, or the run shares nodes
    with other runs (``run.queue``)."""
    deadline, track = config.elastic.deadline, config.track
    if not deadline.is_set:
        return
    left_s = deadline.at_s(begun_s(run)) - time.time()
    if left_s <= 0:
        over = f"is over since {-left_s / 3600:.1f} h" if left_s < -3600 else f"is over since {-left_s:.0f} s"
        raise ConfigError(explain(_DEADLINE, str(deadline), over, "give a later one, or 0 to train without one"))
    if left_s > _MOST_S:
        limit = f"is {left_s / 86400:.0f} days away, more than a year"
        raise ConfigError(explain(_DEADLINE, str(deadline), limit, "give an earlier one, or 0 to train without one"))
    for field, price in (("track.price", track.price), ("track.spot_price", track.spot_price)):
        if not price:
            remedy = "give the dollars per worker and hour on demand and on spot nodes"
            raise ConfigError(
                explain(field, price, f"is missing, and {_DEADLINE} = {str(deadline)!r} weighs costs", remedy)
            )
    if track.spot_price >= track.price:
        limit = f"is not less than track.price ({track.price:g}), so spot nodes save nothing"
        raise ConfigError(explain("track.spot_price", track.spot_price, limit, f"correct it, or unset {_DEADLINE}"))
    if config.run.queue:
        limit = f"shares the nodes of both markets with other runs, whoever orders them under {_DEADLINE}"
        raise ConfigError(explain("run.queue", config.run.queue, limit, "unset run.queue, or unset the deadline"))


def remarks_on_markets(config: Config) -> list[str]:
    """Return a remark if the run has a deadline and some nodes of the connected cluster are not labelled as spot or
    on-demand."""
    if not config.elastic.deadline.is_set:
        return []
    from springtide.ray.cluster.nodes import markets  # Ray loads only when needed

    found = markets()
    unknown = [market for market in found.values() if market not in _MARKETS]
    if not unknown:
        return []
    odd = sorted({market for market in unknown if market})
    what = f"a market that is not known ({', '.join(odd)})" if odd else "no market label"
    return [
        f"{_DEADLINE}: {len(unknown)} of {len(found)} nodes have {what}: they count as spot nodes for the deadline, and cost "
        f"track.price ({_LABEL})"
    ]
