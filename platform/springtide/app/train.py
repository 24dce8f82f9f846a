"""``st.prepare``, ``st.train`` and ``st.sample``, for notebooks, the CLI, jobs and sweeps."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from springtide import config as configs
from springtide.app.estimate import check_fits, check_whole_fits, choose_micro_batch, gigabytes, least_workers
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import check_order
from springtide.checkpoint.fresh_start import begin_from_scratch, check_fresh_start
from springtide.config import Config
from springtide.config.schema import SAMPLE_PROMPT, SAMPLE_TEMPERATURE
from springtide.dataset import Progress, open_dataset, rows_text, silent, units_to_make
from springtide.dataset import prepare as prepare_here
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.events import Event, Sampled, Started, StepDone, Stopped
from springtide.events.listeners import Listeners
from springtide.report import dataset_page
from springtide.run.folder import Run, claim
from springtide.shards import TRAIN, SplitReader
from springtide.store import Folder
from springtide.stream import Data, open_data
from springtide.track.console import Console
from springtide.track.journal import Journal
from springtide.track.mlflow_sink import OFF, MlflowSink, default_uri

_LARGE_UNITS = 8
_RATE_JUMP = 0.02
_CARD_ROWS = 3
CARD = "card.html"


def prepare(config: Config, progress: Progress | None = None) -> Config:
    """Find the dataset of ``config`` or make it.

    A small corpus is prepared in this process, a larger one by Ray Data tasks on the cluster that training would use. A
    killed prepare resumes where it stopped.

    Args:
        config: settings; ``corpus`` and ``shards`` decide what the dataset holds.
        progress: receives the name of a stage, the number of its jobs done, and the number of its jobs in all.

    Returns:
        The config with ``shards.dataset`` filled in.

    Raises:
        ConfigError: a setting cannot work, such as a folder that cannot be written.
        CorpusError: the corpus is missing, empty or too small.

    Examples:
        >>> st.prepare(st.recipes.tiny()).shards.dataset
        '/.../datasets/...'
    """
    progress = progress or silent
    units = units_to_make(config)
    if units <= _LARGE_UNITS:
        config = prepare_here(config, progress)
    else:
        from springtide.on_ray.cluster.session import cluster
        from springtide.on_ray.data.prepare import ray_map

        with cluster(config, dashboard=False):
            config = prepare_here(config, progress, ray_map)
    if units:
        write_card(config.shards.dataset)
    return config


def write_card(url: str) -> str:
    """Write ``card.html`` into a sealed dataset: its source, what was dropped, a few rows; returns its path or URL."""
    manifest, vocabulary = open_dataset(url)
    rows = SplitReader(Folder(url), manifest, TRAIN).read(np.arange(min(_CARD_ROWS, manifest.splits[TRAIN].rows)))
    texts = list(rows_text(rows.tokens, vocabulary))
    page = dataset_page.render(f"Dataset {Folder(url).name}", manifest.model_dump(mode="json"), manifest.digest, texts)
    Folder(url).write(CARD, page)
    return Folder(url).where(CARD)


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

    Uses the cluster that this process is connected to, else that of RAY_ADDRESS, else a private one that is stopped at the end.

    Args:
        config: settings of the run.
        resume: continue the run ``run.id`` (or the newest of this config) from its newest good checkpoint; "auto" also starts
            one if there is none. Without it an existing run is refused; a finished run is left as it is.
        accept_changes: resume under a config that trains something else, too.
        from_scratch: with ``resume``, restart the run at step 0; its checkpoints are set aside.
        listen: receives every event in this process, in order of arrival.
        progress: receives the progress of ``prepare``.
        dashboard: start Ray's dashboard with a private cluster.
        workers: for a trial, the workers of its sweep; the sweep then writes the report.
        tracking_uri: MLflow URI, not written to any file; if empty: the config's, else the environment's.

    Returns:
        A handle on the run, which has finished or was asked to stop: see ``Run.finished``.

    Raises:
        ConfigError: a setting cannot work; before anything starts.
        CorpusError: the corpus is missing, empty or too small; before anything starts.
        RunExists: the run exists and ``resume`` is not set, or the config would train something else; before anything starts.
        CheckpointError: no checkpoint of the run can be read, or none is of this order.
        TrainingFailed: the training code raised an error. Workers raise their own SpringtideError instead if there is one. The
            run can be resumed after any of them.

    Examples:
        >>> run = st.train(st.recipes.tiny(), resume="auto")  # doctest: +SKIP
        >>> run.finished  # doctest: +SKIP
        True
    """
    from springtide.model import find
    from springtide.on_ray.cluster.session import check_before_start  # Ray loads only when needed

    check_before_start(config)
    if config.model.source:
        find(config.model.source)
    if from_scratch and not resume:
        raise ConfigError(explain("--from-scratch", True, "restarts an existing run", "add --resume, or omit it"))
    config, run = claim(absolute(config), resume, accept_changes)
    if resume and not from_scratch and run.has_nothing_left(config):
        remedy = "to train further, raise train.total and add --accept-changes"
        _say(config, f"run {run.id} finished at step {run.last_step}: nothing to do; {remedy}")
        return run
    config = prepare(config, progress)
    data = open_data(config)
    lease = leases.claim(run.folder, secrets.token_hex(8), trains=False)  # a refused driver has written nothing
    try:
        remarks = _begin(config, run, data, lease.term, accept_changes, from_scratch)
        uri = mlflow_uri(config, tracking_uri)
        _train(config, run, data, lease, remarks, uri, listen, dashboard, workers)
    finally:
        leases.end(run.folder, lease.term)
    return run


def _begin(config: Config, run: Run, data: Data, lease: int, accept_changes: bool, from_scratch: bool) -> list[str]:
    """Decide where a claimed run starts, and write its config; returns remarks for the user. Raises CheckpointError and
    ConfigError when it cannot start there."""
    remarks = []
    if from_scratch:
        older = begin_from_scratch(run.folder, lease)
        remarks.append(f"restarted at step 0; checkpoints set aside: {', '.join(older) or 'none'}")
    elif not check_order(run.folder, data.order.identity_at, accept_changes, lease):
        raise CheckpointError(
            f"no checkpoint of {run.folder.url} is of this order: it changes (skipped steps or weights) before all "
            "of them. Change the order of later steps only, or add --from-scratch to restart at step 0"
        )
    check_fresh_start(run.folder)
    if config.train.start_from and (remark := _branched(config, data)):
        remarks.append(remark)
    if run.folder.exists(configs.RUN_CONFIG):
        changed = configs.difference(run.config, config)
        remarks += [f"resumed with {name}: {before!r} -> {after!r}" for name, (before, after) in changed.items()]
    run.write_config(config)
    return remarks


def _train(
    config: Config,
    run: Run,
    data: Data,
    lease: leases.Lease,
    remarks: Sequence[str],
    uri: str,
    listen: Callable[[Event], None] | None,
    dashboard: bool,
    workers: Any,
) -> None:
    """Train a claimed run to its end, with all listeners; the report is written even after an error."""
    from springtide.on_ray.cluster.session import cluster, dashboard_hint  # Ray and torch load only when needed
    from springtide.on_ray.train.trainer import train as train_on_ray

    earlier = run.events
    before = max((event.step for event in earlier if isinstance(event, StepDone)), default=0)
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(Console(config.num_steps, config.track.progress))
        journal = stack.enter_context(Journal(run.folder, term=lease.term, say=console.say))
        for remark in remarks:
            console.say(remark)
        listeners: list[Callable[[Event], None]] = [journal, console, *([listen] if listen else [])]
        if uri != OFF:
            listeners.append(
                stack.enter_context(MlflowSink(config, run.folder, uri, earlier, _tags(config, run, data)))
            )

        tell_all = Listeners(listeners)

        def hear(event: Event) -> None:
            nonlocal before
            tell_all(event)
            if isinstance(event, Started) and event.step < before:
                console.say(
                    f"steps {event.step + 1} to {before} were trained before and not saved: they are trained again"
                )
                before = 0  # said once
            if isinstance(event, Stopped):  # from here on the run is read from its journal
                journal.flush()

        try:
            with cluster(config, dashboard=dashboard) as address:
                if address:
                    console.say(f"run {run.id}; Ray dashboard: http://{address}{dashboard_hint()}")
                config = _fitted(config, data, console.say)
                labels = {"run": config.run.id}
                train_on_ray(config, run.folder, journal.term, labels, lease.owner, hear, workers)
        except BaseException as error:
            if not tell_all.finished:  # later errors do not change how the run ended
                status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                reason = f"{type(error).__name__}: {error}"[:2000]
                hear(Stopped(step=max(before, tell_all.last_step), status=status, reason=reason))
            raise
        finally:
            if workers is None:
                _report(run, console.say)


def _report(run: Run, say: Callable[[str], None]) -> None:
    """Write the report; a store error must not hide how the run ended."""
    try:
        run.write_report()
    except OSError as error:
        say(f"the report could not be written ({error})")


def _tags(config: Config, run: Run, data: Data) -> dict[str, str]:
    """Return the MLflow tags of a run, in addition to its settings."""
    return {
        "springtide.order": data.order.identity,
        "springtide.dataset": " ".join(data.datasets),
        "springtide.dataset_digest": " ".join(manifest.digest for manifest in data.manifests),
        "springtide.checkpoints": (run.folder / "checkpoints").url,
        "springtide.lineage": " <- ".join(branch.lineage(config)),
    }


def _say(config: Config, text: str) -> None:
    """Print ``text`` outside training."""
    with Console(config.num_steps, config.track.progress) as console:
        console.say(text)


def _branched(config: Config, data: Data) -> str:
    """Return remarks for the user on the checkpoint that the run starts from; raises ConfigError when it cannot start there."""
    from springtide.training.optim import rate_after

    saved = branch.prepare(config, data.order.identity_at, data.tokenizer_digest)
    remarks, step = branch.remarks(saved, config), branch.first_step(config.train)
    there, here = rate_after(saved, step), rate_after(config, step)
    if step and abs(there - here) > _RATE_JUMP * there:
        remarks.append(
            f"the learning rate of step {step} was {there:.3g} in {config.train.start_from} and is {here:.3g} here"
        )
    return "\n".join(remarks)


def _fitted(config: Config, data: Data, say: Callable[[str], None]) -> Config:
    """Return ``config`` with a micro-batch and a minimum of workers that fit the cluster; raises ConfigError if none fits."""
    from springtide.on_ray.cluster.session import device_bytes

    has = device_bytes(config)
    least = least_workers(config, data.vocab_size, data.eos_id, has)
    if least > config.elastic.min_workers:
        say(f"elastic.min_workers = {least}: with fewer workers a step does not fit the {gigabytes(has)} that each has")
        config = config.override({"elastic.min_workers": least})
    chosen = choose_micro_batch(config, data.vocab_size, data.eos_id, has)
    if chosen != config:
        say(f"train.micro_batch = {chosen.train.micro_batch} fits the {gigabytes(has)} that a worker has")
    check_fits(chosen, data.vocab_size, data.eos_id, config.elastic.max_workers, has)
    return chosen


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
        tokens: most tokens to generate, the end of the document may come first; 0: the config's length.
        temperature: of the softmax; 0 takes the most likely token each time.
        seed: seed of the draws.
        trust_code: run the code of the user's own model if the config names one (``model.source``).

    Returns:
        The step of the checkpoint, the prompt and the text after it, as an event.

    Raises:
        ConfigError: the temperature is negative, this machine lacks the memory, or the config names code and ``trust_code``
            is not set.
        CheckpointError: bytes of the checkpoint are bad.

    Examples:
        >>> found = st.sample(st.open_run("runs/mine"), "import ", tokens=4, temperature=0)
        >>> found.step, found.prompt, len(found.text) > 0
        (8, 'import ', True)
    """
    from springtide.checkpoint.load import load
    from springtide.model import whole
    from springtide.training.evaluate import generate
    from springtide.training.sample import prompt_of

    config = run.config
    configs.check_trusted(config.model.source, run.folder.where(configs.RUN_CONFIG), trust_code)
    manifest, vocabulary = open_dataset(open_data(config).datasets[0])
    check_whole_fits(config, manifest.vocab_size)
    model = whole(config.model, manifest.vocab_size, manifest.eos_id)
    name = run.checkpoints[-1]
    load(run.folder, name, model)
    before, end = prompt_of(vocabulary, prompt)
    length = tokens or config.train.sample_tokens
    context = min(config.model.max_sequence_length, manifest.sequence_length)
    found = generate(model, before, length, context, manifest.vocab_size, temperature, seed, end)
    text = vocabulary.decode(found)
    return Sampled(step=int(name.removeprefix("step-")), prompt=prompt, text=text)


def absolute(config: Config) -> Config:
    """Return ``config`` with absolute paths: relative ones are relative to the driver's folder, on every node."""
    mixture = {name: Folder(url).url for name, url in config.stream.mixture.items()}
    changes: dict[str, Any] = {"shards.root": Folder(config.shards.root).url, "stream.mixture": mixture}
    if config.shards.dataset:
        changes["shards.dataset"] = Folder(config.shards.dataset).url
    return config.override(changes)


def mlflow_uri(config: Config, given: str = "") -> str:
    """Return the MLflow URI for a run of ``config``: ``given``, else the config's, else the environment's, else a file next to
    the runs. It may have a password, and is not written anywhere."""
    # a server that is down may cost a retry, not minutes inside its client
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    chosen = given or config.track.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    return chosen or default_uri(Folder(config.run.root))
