"""The whole config: one frozen section per package. Every field has a doc line that ends with its unit in brackets.

Fields marked *free* may change when a run is resumed: they decide where and how fast it trains, never what it learns.
Fields marked *ahead* may change too, but only for steps that are not trained yet. A hash of the order of batches detects
changes to trained steps. All other fields form the run's identity: a resume with other values is refused, unless the user
accepts the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from springtide.config.code import CODE_FIELDS
from springtide.config.data import CorpusConfig, DataConfig, FeedConfig, Ramp, ShardsConfig, StreamConfig
from springtide.config.elastic import ElasticConfig
from springtide.config.engine import ModelConfig, OptimConfig, ParallelConfig
from springtide.config.objective import ObjectiveConfig
from springtide.config.only_when import OnlyWhenText
from springtide.config.quantities import Bytes, Tokens
from springtide.config.section import Section, free
from springtide.config.steps import StepsDone
from springtide.errors import explain

SAMPLE_PROMPT = "def "
"""Prompt of the text that is generated at the end of a run."""
SAMPLE_TEMPERATURE = 0.8


class TrainConfig(Section):
    """Length of the run, micro-batch, evaluation."""

    total: Tokens = Tokens(1_000_000)
    """Tokens to train on; the last step may go past it [tokens]."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = free(default=8)
    """Rows that a worker computes at once; does not change the gradient. ``auto`` takes the largest power of two that is
    predicted to fit the cluster's devices, both with ``elastic.min_workers`` and with ``elastic.max_workers`` workers
    [rows]."""
    profile: int = free(default=0, ge=0)
    """Steps that rank 0 profiles after each start of the workers, from the fourth step on; 0 profiles none [steps]."""
    metrics: tuple[Literal["largest_logit", "noise_scale"], ...] = free(default=())
    """Extra metrics to report with each step, at a small cost: the largest logit, which grows before training diverges; and the
    gradient noise scale, the batch size beyond which larger batches save few steps [name]."""
    seed: int = Field(0, ge=0)
    """Seed of random draws in training, such as dropout; each step and worker derives its own seed from this one [1]."""
    start_from: str = ""
    """Checkpoint of another run to start from, or the folder of a run for its newest checkpoint; empty starts with new weights
    [url]."""
    start_with: Literal["state", "optimizer", "weights"] = "state"
    """What to take from ``start_from``. state: everything, so this run branches off at that step and trains on the rows that
    follow. optimizer: weights, averaged weights and optimizer state; this run begins at step 0 of other rows with the same
    vocabulary, as in a second stage with longer rows. weights: only the weights; this run begins at step 0 [name]."""
    new_blocks: tuple[int, ...] = ()
    """Numbers, from 0, of this model's blocks that ``start_from``'s model does not have. Each new block begins as a copy of the
    block before it, with zeroed output matrices, so that the model's outputs at step 0 do not change. Needs ``start_with:
    weights`` [blocks]."""
    eval_tokens: Tokens = free(default=Tokens(131_072))
    """Held-out tokens to evaluate on before and after training: whole rows, the same number from each held-out set; 0 evaluates
    nothing [tokens]."""
    eval_every: int = free(default=0, ge=0)
    """Steps between evaluations during training; 0 makes none [steps]."""
    eval_async: bool = free(default=False)
    """Whether evaluations during training run in the background. A separate process then evaluates the first checkpoint
    committed at or after each evaluation step, and skips checkpoints if it is too slow. Otherwise training waits for each
    evaluation [flag]."""
    eval_gpus: float = free(default=0.0, ge=0)
    """GPUs that the process of ``eval_async`` reserves in Ray; with 0 it computes on the driver's node [gpus]."""
    sample_tokens: int = free(default=96, ge=0)
    """Length of the text generated after training; 0 generates none [tokens]."""
    parts: str = ""
    """Function that adds your own code to each step, ``package.module:function``. It is called with the training loop and
    returns one or several objects of the class ``springtide.training.Part``; empty for none [name]."""
    only_when: OnlyWhenText = free(default="")
    """Conditions under which to train, checked on rank 0's machine. ``hours 22-6, battery 30, temperature 80``: from 22 to 6
    o'clock, at 30 % of charge or plugged in, and below 80 degrees Celsius. Otherwise the run pauses between steps. Empty never
    pauses [name]."""

    @property
    def rows_at_once(self) -> int:
        """``micro_batch`` as a number; ValueError while it is ``auto`` [rows]."""
        if self.micro_batch == "auto":
            raise ValueError(
                explain(
                    "train.micro_batch",
                    "auto",
                    "works only in runs on Ray",
                    "set train.micro_batch to a number of rows",
                )
            )
        return self.micro_batch


class CheckpointConfig(Section):
    """When to save the state, where to stage a save, and which checkpoints to keep."""

    every_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = free(default=50)
    """Steps between checkpoints; 0 saves at the end only, ``auto`` computes the interval from the cost of a save and how often
    workers are lost [steps]."""
    when_busy: Literal["skip", "queue"] = free(default="skip")
    """What to do when a save is due while the previous one is being written: skip it, or let training wait [name]."""
    stage: str = free(default="/dev/shm")
    """Folder in a memory file system to which the state is copied before it is written in the background; empty copies nothing,
    and training waits for each save [name]."""
    memory_every: Annotated[int, Field(ge=0)] | Literal["auto"] = free(default="auto")
    """Steps between snapshots of the state in the nodes' memory, on Ray; 0 takes none, ``auto`` takes them as often as possible
    at less than 3% of training time [steps]."""
    memory_bytes: Annotated[Bytes, Field(ge=0)] | Literal["auto"] = free(default="auto")
    """Most memory that snapshots may take on a node, including copies that it holds for other nodes; ``auto`` is half of the
    node's free memory when the run's first process starts there [bytes]."""
    memory_copies: int = free(default=1, ge=0)
    """Copies of each snapshot on other nodes: no snapshot is lost if this many nodes are lost at once without notice
    [copies]."""
    tries: int = free(default=5, ge=1)
    """Attempts to write a checkpoint before the save counts as failed [tries]."""
    max_failed: int = free(default=3, ge=0)
    """Saves in a row that may fail before the run stops [checkpoints]."""
    keep_last: int = free(default=3, ge=1)
    """Newest committed checkpoints to keep [checkpoints]."""
    keep_every: int = free(default=0, ge=0)
    """Also keep checkpoints whose step is a multiple of this; 0 keeps none for this reason [steps]."""
    keep_best: int = free(default=0, ge=0)
    """Also keep this many checkpoints with the smallest ``best_by`` [checkpoints]."""
    best_by: Literal["loss", "heldout_loss"] = free(default="loss")
    """Loss that ``keep_best`` compares: the mean training loss since the previous save (loss), or the held-out loss of
    checkpoints that were evaluated (heldout_loss) [name]."""


class TrackConfig(Section):
    """Where a run's metrics and events are reported, and prices for the report."""

    mlflow_uri: str = free(default="")
    """MLflow tracking server; empty means a sqlite file next to the runs; ``off`` turns MLflow off [url]."""
    experiment: str = free(default="springtide")
    """MLflow experiment [name]."""
    parent: str = free(default="")
    """MLflow run that is the parent of this run, as a sweep is of its trials; empty for none [name]."""
    progress: bool = free(default=True)
    """Whether to draw progress on the console [flag]."""
    price: float = free(default=0.0, ge=0)
    """Price of a worker per hour, for the report; 0 counts no costs [dollars/h]."""
    spot_price: float = free(default=0.0, ge=0)
    """Price of a worker per hour on nodes whose label ``ray.io/market-type`` is ``spot``, for the report [dollars/h]."""
    listener: str = free(default="")
    """Function that makes your own listener, ``package.module:function``. The driver on Ray calls the function with the run's
    handle, and then calls the listener that it returns with every event, in a thread. Empty: no listener [name]."""


NAME = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$"
"""Pattern of the name of a run or sweep, which is also the name of its folder; an empty name is replaced by a generated one."""


class RunConfig(Section):
    """The run's name and location."""

    id: str = free(default="", pattern=NAME)
    """Name of the run and of its folder; empty generates one [name]."""
    root: str = free(default="runs")
    """Folder or fsspec URL that holds runs [url]."""
    queue: str = free(default="", pattern=NAME)
    """Queue on a cluster that several runs share. Runs of all queues get workers by ``priority``; the runs of one queue get no
    more than its quota. Empty: the run takes the workers that no other run has [name]."""
    priority: int = free(default=0)
    """Priority in the queue: a run with a higher priority takes workers from runs with a lower one, after their current step
    [1]."""


class Config(Section):
    """All settings of a run, frozen and validated.

    Examples:
        >>> config = st.recipes.tiny()
        >>> config.tokens_per_step, config.num_steps
        (768, 60)
    """

    run: RunConfig = RunConfig()
    """Name and location of the run."""
    corpus: CorpusConfig = CorpusConfig()
    """Text and tokenizer."""
    shards: ShardsConfig = ShardsConfig()
    """Packing of token ids into rows, and storage."""
    stream: StreamConfig = StreamConfig()
    """Order in which rows are trained on."""
    model: ModelConfig = ModelConfig()
    """Architecture of the model."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution of the model over workers."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    train: TrainConfig = TrainConfig()
    """Length of the run, and evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: when to save, and which to keep."""
    elastic: ElasticConfig = ElasticConfig()
    """Number and size of workers, and failures."""
    feed: FeedConfig = FeedConfig()
    """Data pipeline of each worker."""
    track: TrackConfig = TrackConfig()
    """Where metrics are reported."""

    def override(self, changes: Mapping[str, Any]) -> Config:
        """Return a copy with some fields changed.

        Args:
            changes: dotted name of a field -> its new value; amounts may be texts with a unit, such as ``2M``.

        Raises:
            ConfigError: a field does not exist, or a value is not valid; names the field, the limit and a remedy.

        Examples:
            >>> st.Config().override({"stream.global_batch": 64, "train.total": "2M"}).train.total
            2000000
            >>> st.Config().override({"optim.peek_lr": 1e-3})
            Traceback (most recent call last):
            springtide.errors.ConfigError: optim.peek_lr = 0.001: is not a setting; did you mean 'optim.peak_lr'?
        """
        from springtide.config.files import with_changes  # imported here, because config.files imports this module

        return with_changes(self, changes)

    @property
    def data(self) -> DataConfig:
        """The settings that decide which rows the run trains on, and in which order."""
        return DataConfig(self.stream, self.shards, self.feed, int(self.train.total), self.objective.labels)

    @property
    def sources(self) -> dict[str, str]:
        """The user's own functions that a run of this config calls: field -> ``package.module:function``."""
        values = (self.model.source, self.optim.source, self.objective.code, self.track.listener, self.train.parts)
        return {field: value for field, value in zip(CODE_FIELDS, values, strict=True) if value}

    @property
    def needs_trust(self) -> dict[str, str]:
        """Everything in this config that can run code, as field -> value: ``sources``, and environment variables that are not
        known to be harmless (``elastic.ALLOWED_ENV``)."""
        return self.sources | self.elastic.unlisted_env

    @property
    def prepare_sources(self) -> dict[str, str]:
        """The user's own functions that run while the dataset is prepared: field -> ``package.module:function``. Empty if
        ``shards.dataset`` is set: there is nothing to prepare."""
        filters = self.corpus.filter and not self.shards.dataset
        return {"corpus.filter": self.corpus.filter} if filters else {}

    @property
    def ramp(self) -> Ramp:
        """The number of rows in each step."""
        return self.data.ramp

    @property
    def tokens_per_step(self) -> int:
        """Tokens trained on in a full-size step over all workers [tokens]."""
        return self.stream.global_batch * self.shards.sequence_length

    @property
    def num_steps(self) -> StepsDone:
        """Steps in the run [steps]."""
        return self.steps_to(int(self.train.total))

    def steps_to(self, tokens: int) -> StepsDone:
        """Steps until at least ``tokens`` are trained on, if no step is jumped over [steps]."""
        return self.data.steps_to(tokens)

    def tokens_after(self, step: int) -> int:
        """Tokens trained on after ``step`` steps, if no step is jumped over [tokens]."""
        return self.ramp.before(step) * self.shards.sequence_length

    @model_validator(mode="after")
    def _check(self) -> Config:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> list[str]:
        """Return an error message for each pair of settings that contradict each other."""
        found = self._optimizer_contradictions() + self._float8_contradictions()
        if self.elastic.max_workers > self.stream.num_lanes:
            found.append(
                explain(
                    "elastic.max_workers",
                    self.elastic.max_workers,
                    f"a worker needs a lane, and stream.lanes is {self.stream.num_lanes} "
                    f"(stream.global_batch = {self.stream.global_batch})",
                    "raise stream.global_batch or lower max_workers",
                )
            )
        if self.run.priority and not self.run.queue:
            problem, remedy = (
                "takes effect only in a queue, and run.queue is empty",
                "set run.queue, or leave this at 0",
            )
            found.append(explain("run.priority", self.run.priority, problem, remedy))
        if self.parallel.shards and self.elastic.min_workers % self.parallel.shards:
            found.append(
                explain(
                    "elastic.min_workers",
                    self.elastic.min_workers,
                    f"must be a multiple of parallel.shard_workers = {self.parallel.shards}",
                    f"use {-(-self.elastic.min_workers // self.parallel.shards) * self.parallel.shards}",
                )
            )
        if self.shards.sequence_length > self.model.max_sequence_length:
            found.append(
                explain(
                    "shards.sequence_length",
                    self.shards.sequence_length,
                    f"longer than model.max_sequence_length = {self.model.max_sequence_length}",
                    "shorten the sequence or raise the model's limit",
                )
            )
        most_ids = 2**15 if self.shards.mask_across_documents or self.corpus.begin_of_text else 2**16
        if self.corpus.tokenizer == "bpe" and self.shards.token_type == "uint16" and self.corpus.vocab_size > most_ids:
            found.append(
                explain(
                    "corpus.vocab_size",
                    self.corpus.vocab_size,
                    f"shards.token_type = 'uint16' holds {most_ids} ids here",
                    "set shards.token_type to uint32 or choose a smaller vocabulary",
                )
            )
        if self.checkpoint.keep_best and self.checkpoint.best_by == "heldout_loss" and self.train.eval_async:
            problem = "is not known yet when a save is made, with train.eval_async"
            found.append(
                explain("checkpoint.best_by", "heldout_loss", problem, "turn train.eval_async off, or choose by loss")
            )
        if self.train.total < 1:
            found.append(explain("train.total", int(self.train.total), "trains on nothing", "give at least one token"))
        if self.optim.warmup + self.optim.decay > self.optim.schedule_begin + self.tokens_after(self.num_steps):
            found.append(
                explain(
                    "optim.warmup",
                    int(self.optim.warmup),
                    f"with optim.decay = {int(self.optim.decay)} longer than train.total = {int(self.train.total)}",
                    "shorten warmup or decay, or train longer",
                )
            )
        return found

    def _optimizer_contradictions(self) -> list[str]:
        found = []
        if self.model.base_width and (self.optim.optimizer != "adamw" or self.optim.source):
            # muP's factors are derived for AdamW and do not fit other optimizers: Muon scales its updates to AdamW's root mean
            # square at every width, LAMB to the weights' norm
            other = "source" if self.optim.source else "optimizer"
            problem = (
                f"scales AdamW's learning rates; optim.{other} = {getattr(self.optim, other)!r} needs its own scaling"
            )
            found.append(explain("model.base_width", self.model.base_width, problem, "use adamw, or base_width 0"))
        if self.objective.source and self.optim.z_loss:
            problem = f"is added to the cross-entropy, and objective.source = {self.objective.source!r} is minimised"
            found.append(explain("optim.z_loss", self.optim.z_loss, problem, "use 0, and add it in that function"))
        if self.objective.labels and self.stream.mixture:
            problem = "are labels of one dataset, and stream.mixture names several"
            remedy = "label and train on one dataset; corpus.sources puts several texts into it, with a weight each"
            found.append(explain("objective.labels", self.objective.labels, problem, remedy))
        return found

    def _float8_contradictions(self) -> list[str]:
        found: list[str] = []
        if self.parallel.float8 and self.shards.sequence_length % 16:
            problem = f"multiplies in fp8, whose kernels take multiples of 16 tokens; the row has {self.shards.sequence_length}"
            remedy = f"set shards.sequence_length to {self.shards.sequence_length // 16 * 16 or 16}, or use bf16"
            found.append(explain("parallel.precision", self.parallel.precision, problem, remedy))
        if self.parallel.float8 and self.model.adapter != "none":
            problem = (
                f"multiplies weights that train, and those under model.adapter = {self.model.adapter!r} are frozen"
            )
            found.append(explain("parallel.precision", self.parallel.precision, problem, "use bf16"))
        return found
