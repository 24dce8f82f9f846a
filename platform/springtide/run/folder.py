"""Open a run's folder and read its contents.

<root>/<run id>/config.yaml    all settings of the newest start
                journal/       every event
                checkpoints/   committed checkpoints
                compiled/      cache of compiled code for nodes that join later, signed by the user who runs the job
                control/       commands to the run, and their results
                mlflow.json    id of the MLflow run that this run reports to
                origin.json    command and git commit of the newest start
                report.html    HTML report, rewritten while the run trains, and when it ends
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.format import committed, name_of, step_of
from springtide.checkpoint.retention import note_reader
from springtide.config import RUN_CONFIG, Config
from springtide.config.schema import SAMPLE_TEMPERATURE
from springtide.errors import ConfigError, explain, redacted
from springtide.events import Evaluated, Event, Sampled, Started, StepDone, Stopped
from springtide.run.control import RunControl
from springtide.run.page_facts import facts_of
from springtide.run.report.run_page import charts, handle, render
from springtide.storage import Folder
from springtide.tracking.journal import frame, last_steps, read_journal
from springtide.tracking.journal_reader import JournalReader
from springtide.tracking.ledger import Ledger, Prices, ledger
from springtide.tracking.run_state import run_state
from springtide.tracking.timeline import Timeline
from springtide.tune.folder import PAGE, PLAN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pandas import DataFrame

    from springtide.eval import Answer
    from springtide.run.diagnosis import Diagnosis
    from springtide.run.verify import Verification

REPORT = "report.html"
CHARTS = "charts.svg"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run(RunControl):
    """A handle on a run that trains or has ended. Every property is read from the run's folder at each access.

    Examples:
        >>> run = st.open_run("runs/mine")
        >>> run.finished, len(run.steps), run.checkpoints
        (True, 8, ['step-0000000004', 'step-0000000008'])
    """

    folder: Folder

    @property
    def id(self) -> str:
        """The run's name, the last part of its folder."""
        return self.folder.url.rstrip("/").rsplit("/", 1)[-1]

    @property
    def config(self) -> Config:
        """The config of the run's last start, with the values of all settings."""
        return configs.parse(self.folder.read(RUN_CONFIG), self.folder.where(RUN_CONFIG))

    @property
    def events(self) -> list[Event]:
        """All events of the run's journal, in the order of writing."""
        return read_journal(self.folder)

    @property
    def timeline(self) -> Timeline:
        """All events of the run, with the steps as arrays. Reading a long run takes seconds and little memory."""
        reader = JournalReader(self.folder)
        reader.read()
        return reader.timeline

    @property
    def metrics(self) -> DataFrame:
        """Metrics of the run's steps as a pandas DataFrame, indexed by step; units as in ``events.metrics``.

        Examples:
            >>> st.open_run("runs/mine").metrics.loc[8, ["tokens", "world_size"]].to_dict()
            {'tokens': 6144, 'world_size': 1}
        """
        return frame(self.events)

    @property
    def steps(self) -> list[StepDone]:
        """One event for each step that the current model was trained on. For a step that was trained again, the event of its
        last execution."""
        return last_steps(self.events)

    @property
    def checkpoints(self) -> list[str]:
        """Names of the committed checkpoints, oldest first."""
        return committed(self.folder)

    @property
    def evaluations(self) -> list[Evaluated]:
        """The evaluations on held-out rows, oldest first.

        Examples:
            >>> [one.step for one in st.open_run("runs/mine").evaluations]
            [0, 8]
        """
        return [event for event in self.timeline.events if isinstance(event, Evaluated)]

    @property
    def ledger(self) -> Ledger:
        """How the run's time was spent, and what it cost at the prices in its config.

        Examples:
            >>> book = st.open_run("runs/mine").ledger
            >>> book.tokens, book.total_dollars, 0 < book.goodput < 1
            (6144, 0.0, True)
        """
        return ledger(self.timeline.condensed(), Prices.set_in(self.config.track))

    @property
    def starts(self) -> list[Started]:
        """One event for each start of a worker group (the first start and each restart), oldest first."""
        return [event for event in self.timeline.events if isinstance(event, Started)]

    @property
    def status(self) -> str:
        """The run's state. Ended: ``finished``, ``stopped`` or ``failed``. Never started: ``not started``. Else, if no end is
        recorded since the last start: ``paused``, ``waiting`` (for nodes), or ``running or killed``."""
        return run_state(self.timeline.events).known

    @property
    def finished(self) -> bool:
        """True if the run reached its last step, according to the newest end of training in the journal."""
        ends = [event for event in self.timeline.events if isinstance(event, Stopped)]
        return bool(ends) and ends[-1].status == "finished"

    def has_nothing_left(self, config: Config) -> bool:
        """Return True if a resume with the settings ``config`` would train no step: the run finished, its newest checkpoint is
        at or after the last step of ``config``, and no ``stream`` setting differs, except ``stream.eval_datasets``.

        Args:
            config: the config under which the run would resume.

        Examples:
            >>> run = st.open_run("runs/mine")
            >>> run.has_nothing_left(run.config)
            True
        """
        if not self.finished or (step_of((self.checkpoints or [""])[-1]) or 0) < config.num_steps:
            return False
        # any other changed ``stream`` setting may change the order of samples, which only a start can check (``check_order``).
        # ``eval_datasets`` does not count as changed, because each start may add datasets to it
        changed = configs.difference(self.config, config)
        return not any(name.startswith("stream.") and name != "stream.eval_datasets" for name in changed)

    @property
    def last_step(self) -> int:
        """The highest step that was trained, or from which a worker group started; 0 if there is neither."""
        timeline = self.timeline
        return max([timeline.last_try, *(event.step for event in timeline.events if isinstance(event, Started))])

    @property
    def sample(self) -> str:
        """The last text that was generated during training, with its prompt; empty if there is none."""
        return ["", *(one.prompt + one.text for one in self.timeline.events if isinstance(one, Sampled))][-1]

    @property
    def report(self) -> str:
        """Path or URL of the run's HTML report."""
        return self.folder.where(REPORT)

    def checkpoint_at(self, step: int | None = None) -> str:
        """Return the name of a committed checkpoint.

        Args:
            step: step of the checkpoint; None: the newest checkpoint.

        Raises:
            ConfigError: there is no such checkpoint.

        Examples:
            >>> st.open_run("runs/mine").checkpoint_at(4)
            'step-0000000004'
        """
        names = self.checkpoints
        name = name_of(step) if step is not None else (names or [""])[-1]
        if name not in names:
            remedy = f"one of: {', '.join(str(step_of(one)) for one in names) or 'none'}"
            raise ConfigError(explain("step", step, f"has no checkpoint that counts in {self.folder.url}", remedy))
        return name

    def evaluate(self, step: int | None = None, tokens: int = 0, trust_code: bool = False) -> Evaluated:
        """Compute the held-out loss of a checkpoint in this process, in the precision of training.

        Args:
            step: step of the checkpoint; None: the newest.
            tokens: number of held-out tokens to evaluate on, instead of ``train.eval_tokens``; 0: all held-out tokens.
            trust_code: run the code of the user's own model if the config names one (``model.source``); needed unless you
                started the run with the same code.

        Returns:
            The loss [nats per token] and the bits per byte, for the mixture and for each held-out set.

        Raises:
            ConfigError: there is no such checkpoint, or the config names code that is not trusted.
            CheckpointError: the checkpoint is corrupt.

        Examples:
            >>> found = st.open_run("runs/mine").evaluate(step=4, tokens=512)
            >>> found.step, found.rows, found.heldout_bits_per_byte < 8
            (4, 8, True)
        """
        from springtide.training.evaluate import evaluate_checkpoint

        check_model_code(self.folder, self.config, trust_code)
        # switch off the cache of rows: its folder in the config may not exist on this machine. And the config of another user's
        # run must not decide where this process writes
        changed = self.config.override({"train.eval_tokens": tokens or sys.maxsize, "feed.cache": ""})
        return evaluate_checkpoint(self.folder, changed, self.checkpoint_at(step))

    def generate(
        self,
        prompts: str | Sequence[str],
        tokens: int = 0,
        temperature: float = SAMPLE_TEMPERATURE,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        chat: bool = False,
        step: int | None = None,
        on_text: Callable[[int, str], None] | None = None,
        trust_code: bool = False,
    ) -> list[Answer]:
        """Generate text with the model of a checkpoint, in this process, in fp32.

        Args:
            prompts: a text to continue, or several.
            tokens: maximum number of tokens to generate per prompt; 0: ``train.sample_tokens``. A text ends earlier if the
                model generates the end of a document.
            temperature: divides the logits; 0: greedy decoding.
            top_k: draw only from this number of most likely tokens; 0: from all tokens.
            top_p: nucleus sampling: draw only from the smallest set of most likely tokens whose probabilities sum to this
                value; 1: from all tokens.
            seed: seed of the first prompt; prompt i uses ``seed + i``.
            stop: strings at which generation stops; they are cut off the returned text.
            chat: format each prompt as a user message, with the chat template of the run's dataset.
            step: step of the checkpoint; None: the newest.
            on_text: called with the index of the prompt and each new piece of its text, as it is generated.
            trust_code: as for ``evaluate``.

        Returns:
            One answer per prompt, in order: the generated text, its number of tokens and why generation ended.

        Raises:
            ConfigError: a value is out of range, a prompt is longer than a row, there is no such checkpoint or no chat
                template, this machine lacks the memory, or the config names code that is not trusted.
            CheckpointError: the checkpoint is corrupt.

        Examples:
            >>> run = st.open_run("runs/mine")
            >>> found = run.generate(["import ", "def "], tokens=4, temperature=0)
            >>> [(one.prompt, one.num_tokens, one.ended) for one in found]
            [('import ', 4, 'length'), ('def ', 4, 'length')]
        """
        from springtide.eval import Sampling
        from springtide.run.text import text_model

        sampling, length = Sampling(temperature, top_k, top_p, seed), tokens or self.config.train.sample_tokens
        several = [prompts] if isinstance(prompts, str) else prompts
        return text_model(self, step, trust_code).generate(several, length, sampling, stop, chat, on_text)

    def average(self, to: str, last: int = 1, ema: bool = False) -> Run:
        """Average the weights of the newest checkpoints and write the mean as the folder of a new run, without optimizer state.

        The new run can be evaluated, generate text, or be the start of another run (``train.start_with = weights``). Averaging
        needs little memory.

        Args:
            to: folder or URL to create.
            last: number of newest checkpoints to average.
            ema: average the exponential moving averages of the weights (``optim.ema_half_life``) instead of the weights. With
                ``last = 1`` the result is the moving average of the newest checkpoint.

        Returns:
            A handle on the new folder.

        Raises:
            ConfigError: there are fewer than ``last`` checkpoints, or ``to`` is not empty.
            CheckpointError: a checkpoint has no moving average, the checkpoints are of different models, or one is corrupt.

        Examples:
            >>> run = st.open_run("runs/mine")
            >>> found = run.average("runs/mine-average", last=2)
            >>> found.checkpoints
            ['step-0000000008']
            >>> found.evaluate(tokens=512).heldout_loss < run.evaluate(step=4, tokens=512).heldout_loss
            True
        """
        from springtide.checkpoint.checkpoint_mean import (
            average_checkpoints,  # imported here: it imports torch, which other methods do not need
        )

        names, folder = self.checkpoints, Folder(to)
        if not 0 < last <= len(names):
            limit = f"{self.folder.url} has {len(names)} checkpoints that count"
            raise ConfigError(explain("last", last, limit, "lower it, or set checkpoint.keep_last higher"))
        if folder.names():
            raise ConfigError(explain("to", to, "is not empty", "name another folder"))
        root, _, name = folder.url.rstrip("/").rpartition("/")
        found = Run(folder)
        config = self.config.override({"run.id": name, "run.root": root})
        with contextlib.ExitStack() as stack:
            for one in names[-last:]:
                stack.enter_context(note_reader(self.folder, one))
            average_checkpoints(self.folder, names[-last:], folder, configs.redact(config).model_dump(mode="json"), ema)
        found.write_config(config)
        return found

    def why(self) -> Diagnosis:
        """Return how the run's time was spent and what limits its speed: findings with numbers and remedies, the most costly
        first.

        Examples:
            >>> found = st.open_run("runs/mine").why()
            >>> found.step, found.findings[0].share > 0, found.not_measured[0][:13]
            (8, True, 'communication')
        """
        from springtide.run.diagnosis import DiagnosisBuilder

        builder = DiagnosisBuilder()
        builder.take(self.timeline)
        return builder.diagnosis()

    def verify(self) -> Verification:
        """Check that the run trained on exactly the samples that its fixed order of samples gives.

        Returns:
            The number of checked steps, and mismatches with the order of samples; see ``springtide.run.verify.verify``.

        Raises:
            ConfigError: the run's datasets are no longer compatible with each other.
            CorpusError: a dataset is missing.

        Examples:
            >>> found = st.open_run("runs/mine").verify()
            >>> found.ok, found.steps_checked, found.world_sizes
            (True, 8, (1,))
        """
        from springtide.run.verify import verify

        return verify(self.folder)

    def write_config(self, config: Config) -> None:
        """Write ``config`` as the run's config.yaml. If it contains a password, only the owner can read the file on a local
        disk; on an object store a warning is logged.

        Args:
            config: the resolved config of the next start.

        Examples:
            >>> run = st.open_run("runs/mine")
            >>> run.write_config(run.config.override({"track.progress": False}))
        """
        secrets_in = configs.secret_fields(config)
        self.folder.write(RUN_CONFIG, configs.dump(config), private=bool(secrets_in))
        if secrets_in and not self.folder.is_local:
            _log.warning(
                "%s contains a password in %s: everyone with access to the store can read it; pass MLflow's password in "
                "MLFLOW_TRACKING_URI, and a store's password in the environment variables of its client",
                redacted(self.folder.where(RUN_CONFIG)),
                ", ".join(secrets_in),
            )

    def write_report(self) -> None:
        """Write ``report.html`` and ``charts.svg`` from the journal.

        Examples:
            >>> run = st.open_run("runs/mine")
            >>> run.write_report()
            >>> run.report
            '/.../runs/mine/report.html'
        """
        timeline = self.timeline
        self.folder.write(REPORT, render(self.id, timeline, facts_of(self)))
        self.folder.write(CHARTS, charts(timeline))

    def _repr_html_(self) -> str:
        return handle(self.id, self.timeline)


def open_run(path: str) -> Run:
    """Return a handle on a run.

    Args:
        path: path or URL of the run's folder, ``<root>/<run id>``.

    Raises:
        ConfigError: the folder is not a run's.

    Examples:
        >>> st.open_run("runs/mine").id
        'mine'
    """
    run = Run(Folder(path))
    if not run.folder.exists(RUN_CONFIG):
        if run.folder.exists(PLAN):
            remedy = f"name one of its trials (springtide run list {path}), or open {run.folder.where(PAGE)}"
            raise ConfigError(explain("run", path, "is a sweep's folder, not a run's", remedy))
        raise ConfigError(explain("run", path, "is not a run's folder: it has no config.yaml", "give <root>/<run id>"))
    return run


# Trust in the code of a run's model. The config of another user's run may name Python code to execute (``model.source``).


def check_model_code(run: Folder, config: Config, trust_code: bool) -> None:
    """Raise ConfigError if ``config`` names the user's own model code (``model.source``) and this code is not trusted. Code is
    trusted if ``trust_code`` is True, or if this user last started the run with the same code."""
    sources = config.needs_trust if config.model.source else {}  # other code in a config is not run here
    configs.check_trusted(sources, run.where(RUN_CONFIG), trust_code, leases.trusted_code(run, sources))
