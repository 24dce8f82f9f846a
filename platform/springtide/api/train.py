"""``st.train`` and ``st.sample``, for notebooks, the CLI, jobs and sweeps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import posixpath
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from springtide import config as configs
from springtide.api import provenance
from springtide.api.resolve import ResolvedRun, begun_s, resolved
from springtide.api.tracking_server import mlflow_uri
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import step_of
from springtide.checkpoint.fresh_start import begin_from_scratch, check_order
from springtide.config import Config
from springtide.config.code import LISTENER, find_code
from springtide.config.schema import SAMPLE_PROMPT, SAMPLE_TEMPERATURE
from springtide.config.steps import StepsDone
from springtide.dataset import Progress
from springtide.events import Event, Sampled, Started, StepDone, Stopped
from springtide.events.listeners import Listeners
from springtide.run.folder import Run
from springtide.run.live_report import live_report
from springtide.run.origin import read_origin, write_origin
from springtide.tracking.console import Console
from springtide.tracking.journal import Journal, stream_journal
from springtide.tracking.ledger import Restart
from springtide.tracking.mlflow_client import OFF
from springtide.tracking.mlflow_sink import MlflowSink
from springtide.tracking.own_listener import OwnListener


def train(
    config: Config,
    *,
    resume: bool | Literal["auto"] = False,
    accept_changes: bool = False,
    from_scratch: bool = False,
    listen: Callable[[Event], None] | None = None,
    progress: Progress | None = None,
    dashboard: bool = True,
    workers: Any = None,
    tracking_uri: str = "",
) -> Run:
    """Prepare the data if needed, train on Ray to the end of the run, and write the report.

    Uses the Ray cluster that this process is connected to, else that of RAY_ADDRESS, else a private one that is stopped at the
    end.

    Args:
        config: settings of the run.
        resume: continue the run ``run.id`` (or the newest run of this config) from its newest good checkpoint; "auto" starts a
            new run if there is no run to continue. Without ``resume`` an existing run is refused. A finished run is left as it
            is.
        accept_changes: resume also under a config that changes what is learned.
        from_scratch: with ``resume``, restart the run at step 0; its checkpoints are set aside (kept, but not used).
        listen: function that is called in this process with every event of the run, in order of arrival.
        progress: receives the progress of ``prepare``.
        dashboard: if a private cluster is started for this run, start Ray's dashboard once training has run for a while.
        workers: for a trial of a sweep: the sweep's ``WorkerLender``, which lends it workers; the sweep then also writes the
            report.
        tracking_uri: MLflow URI, not written to any file. If empty, the config's URI is used, or else the environment's.

    Returns:
        A handle on the run, which has finished or was asked to stop: see ``Run.finished``.

    Raises:
        ConfigError: a setting cannot work. Raised before anything starts.
        CorpusError: the corpus is missing, empty or too small. Raised before anything starts.
        RunExists: the run exists and ``resume`` is not set, or the config would train something else. Raised before anything
            starts.
        CheckpointError: no checkpoint of the run can be read, or none has the config's order of samples.
        TrainingFailed: the training code raised an error; its subclass ``StoreLost``: a store stayed unreachable. A
            SpringtideError of a worker is raised unchanged instead. After each of these errors the run can be resumed.

    Examples:
        >>> run = st.train(st.recipes.tiny(), resume="auto")  # doctest: +SKIP
        >>> run.finished  # doctest: +SKIP
        True
    """
    uri = mlflow_uri(config, tracking_uri)
    with resolved(
        config,
        resume=resume,
        accept_changes=accept_changes,
        from_scratch=from_scratch,
        progress=progress,
        trains=True,
    ) as found:
        if found.finished:
            with Console(found.config.num_steps, found.config.track.progress) as console:
                console.say(*found.remarks)
        else:
            _claim_and_train(found, uri, listen, workers, dashboard and found.is_private)
    return found.run


def _claim_and_train(
    found: ResolvedRun, uri: str, listen: Callable[[Event], None] | None, workers: Any, dashboard: bool
) -> None:
    """Take the run's lease (exclusive right to write to it) and train the run to its end, or until it is stopped.
    ``dashboard``: start Ray's dashboard once the run trains."""
    hears = [listen] if listen else []
    if found.config.run.queue:
        from springtide.ray.cluster.worker_queue import check_quota

        check_quota(found.config)
    # take the lease before anything is written: a driver that is refused must leave no trace
    with _lease(found) as lease, contextlib.ExitStack() as stack:
        _begin(found, lease.term)
        before = found.run.timeline.last_try
        if workers is not None:  # a trial of a sweep accepts no user commands: the sweep controls it
            _train(found, lease, uri, hears, workers, before, reports=False)
            return
        from springtide.api.control import Controls  # Ray loads only when needed
        from springtide.ray.train.driver_listeners import RayMetrics
        from springtide.ray.train.worker_lender import workers_of

        own = workers_of(found.config, found.is_private)
        stack.callback(own.end)
        own.claim(found.config)
        controls = Controls(found.config, found.run, own, before)
        stack.enter_context(controls.carried_out())
        hears = [controls, stack.enter_context(RayMetrics(found.run.id)), *hears]
        _train(found, lease, uri, hears, own, before, True, controls.remarks, dashboard)


@contextlib.contextmanager
def _lease(found: ResolvedRun) -> Iterator[leases.Lease]:
    """Hold the run's lease (exclusive right to write to the run) during the ``with`` block. Raises RunExists if another driver
    holds it."""
    lease = leases.claim(found.run.folder, secrets.token_hex(8), trains=False, sources=found.config.needs_trust)
    try:
        yield lease
    finally:
        leases.end(found.run.folder, lease.term)


def _begin(found: ResolvedRun, lease: int) -> None:
    """Write the decisions of ``resolve`` to disk. Mark checkpoints that this run must no longer resume from. Make other runs
    keep the checkpoints that this run needs. Store the config and the origin (command and commit)."""
    run, config = found.run, found.config
    if found.from_scratch:
        begin_from_scratch(run.folder, lease)
    else:
        check_order(run.folder, found.data.order.identity_at, found.accept_changes, lease)
    if config.train.start_from:
        branch.keep(config.train.start_from, run.id)
    if config.objective.teacher:
        branch.keep(config.objective.teacher, run.id, "objective.teacher")
    run.write_config(config)
    write_origin(run.folder, provenance.origin_of(sys.argv, os.getcwd()))


def _train(
    found: ResolvedRun,
    lease: leases.Lease,
    uri: str,
    hears: Sequence[Callable[[Event], None]],
    workers: Any,
    before: int,
    reports: bool,
    remarks: Sequence[str] = (),
    dashboard: bool = False,
) -> None:
    """Train a run, whose lease this process holds, to its end, and pass its events to all listeners. ``hears``: additional
    listeners; ``before``: the last step trained before this start of the run; ``reports``: write the HTML report, also after an
    error; ``remarks``: additional remarks to print; ``dashboard``: start Ray's dashboard."""
    from springtide.ray.cluster.session import (
        LateDashboard,  # Ray and torch load only when needed
        dashboard_hint,
    )
    from springtide.ray.train.trainer import train as train_on_ray

    run, config = found.run, found.config
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(Console(config.num_steps, config.track.progress))
        journal = stack.enter_context(Journal(run.folder, term=lease.term, say=console.say))
        for remark in (*found.remarks, *remarks):
            console.say(remark)
        at = f"; Ray dashboard: http://{found.dashboard}{dashboard_hint()}" if found.dashboard else ""
        console.say(f"run {run.id}{at}")
        if reports:
            console.say(f"its page, written anew while it trains: {run.report}")
        listeners: list[Callable[[Event], None]] = [journal, console, *hears]
        if dashboard:
            listeners.append(stack.enter_context(LateDashboard(console.say)))
        if uri != OFF:
            settings = configs.flatten(configs.redact(config))
            earlier = functools.partial(stream_journal, run.folder)
            tags, datasets = provenance.tags_of(found, read_origin(run.folder)), provenance.datasets_of(found)
            sink = MlflowSink(settings, run.folder, uri, earlier, tags, datasets=datasets)
            listeners.append(stack.enter_context(sink))
        if source := config.track.listener:
            make: Callable[..., Any] = find_code(LISTENER, source)
            listeners.append(stack.enter_context(OwnListener(source, functools.partial(make, run))))

        tell_all, has_started = Listeners(listeners), False
        own = found.starts_from if found.starts_from.startswith(f"{run.folder.url}/") else ""
        saved = step_of(posixpath.basename(own)) or StepsDone(0)

        def on_event(event: Event) -> None:
            nonlocal before, has_started
            has_started = has_started or isinstance(event, Started)
            # the run stopped before any worker group trained: report the step of its checkpoint, not 0
            if isinstance(event, Stopped) and not has_started:
                event = dataclasses.replace(event, step=max(event.step, saved))
            tell_all(event)
            if isinstance(event, Started) and event.step < before:
                console.say(
                    f"steps {event.step + 1} to {before} were trained before and not saved: they are trained again"
                )
                before = 0  # report this only once
            if isinstance(event, Stopped):  # write the end to disk now, because callers read it from the journal
                journal.flush()

        try:
            labels, since_s = {"run": run.id}, begun_s(run) if config.elastic.deadline.is_set else 0.0
            with live_report(run.folder, console.say) if reports else contextlib.nullcontext():
                train_on_ray(config, run.folder, journal.term, labels, lease.owner, on_event, workers, since_s)
        except BaseException as error:
            if not tell_all.finished:  # after the run has ended, an error does not change the run's status
                status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                reason = f"{type(error).__name__}: {error}"[:2000]
                on_event(Stopped(step=max(before, tell_all.last_step), status=status, reason=reason))
            raise
        finally:
            if reports:
                _report(run, console.say)


def _report(run: Run, say: Callable[[str], None]) -> None:
    """Write the run's HTML report. A store error is only printed: raising it would hide how the run ended."""
    try:
        run.write_report()
    except OSError as error:
        say(f"the report could not be written ({error})")


def sample(
    run: Run,
    prompt: str = SAMPLE_PROMPT,
    tokens: int = 0,
    temperature: float = SAMPLE_TEMPERATURE,
    seed: int = 0,
    trust_code: bool = False,
) -> Sampled:
    """Generate text with the run's newest checkpoint. The whole model is built in this process, in fp32.

    Args:
        run: the run.
        prompt: the text to continue.
        tokens: largest number of tokens to generate; 0: ``train.sample_tokens``. Generation stops earlier if the text ends.
        temperature: temperature of the softmax; 0: greedy decoding.
        seed: seed of the random choice of tokens.
        trust_code: run the code of the user's own model if the config names one (``model.source``); needed unless you
            started the run with the same code.

    Returns:
        The step of the checkpoint, the prompt and the text after it, as an event.

    Raises:
        ConfigError: the temperature is negative, this machine lacks the memory, or the config names code that is not
            trusted.
        CheckpointError: the checkpoint is corrupt.

    Examples:
        >>> found = st.sample(st.open_run("runs/mine"), "import ", tokens=4, temperature=0)
        >>> found.step, found.prompt, len(found.text) > 0
        (8, 'import ', True)
    """
    # choose the step only once: a run that still trains may commit a newer checkpoint meanwhile
    step = step_of(run.checkpoint_at()) or 0
    [found] = run.generate(
        prompt, tokens or run.config.train.sample_tokens, temperature, seed=seed, step=step, trust_code=trust_code
    )
    return Sampled(step=step, prompt=prompt, text=found.text)


# ``make demo``: a short training in which two workers are killed, and the cost of each kill.

_PARTS = (1 / 3, 2 / 3)
"""The fractions of the training after which a worker is killed."""


def demonstrate(config: Config, progress: Progress | None = None, say: Callable[[str], None] = print) -> Run:
    """Train ``config``, kill a worker with SIGKILL at one and at two thirds of its steps, and return the run. Workers of a
    cluster that the user named are not killed."""
    from springtide.ray.cluster.local import kill_worker

    due = [round(config.num_steps * part) for part in _PARTS]

    def kill_when_due(event: Event) -> None:
        if isinstance(event, StepDone) and due and event.step >= due[0]:
            del due[0]
            if pid := kill_worker():
                say(f"step {event.step}: kill -9 {pid}, one of {event.world_size} workers")

    return train(config, listen=kill_when_due, progress=progress)


def account(run: Run) -> str:
    """Return the results of a finished demo as text: restarts, held-out loss, verification and report."""
    before, after = (run.evaluations[at].heldout_bits_per_byte for at in (0, -1))
    restarts = [_words(restart) for restart in run.ledger.restarts]
    found = run.verify()
    proof = f"{found.steps_checked} steps trained on exactly the samples of the uninterrupted run"
    again = f"; {found.steps_trained_again} of them twice" if found.steps_trained_again else ""
    return "\n".join(
        [
            *restarts,
            f"held-out  {before:.3f} -> {after:.3f} bits per byte ({1 - after / before:.0%} less)",
            f"verify    {proof + again if found.ok else 'NOT the samples of the uninterrupted run: springtide verify'}",
            f"report    {run.report}",
        ]
    )


def _words(restart: Restart) -> str:
    steps = f"{restart.steps_lost} step{'s' * (restart.steps_lost != 1)} trained again"
    workers = f"{restart.workers_before} -> {restart.workers_after} workers"
    return f"restart   step {restart.step}: {restart.gap_s:.1f} s without training, {steps}, {workers}"
