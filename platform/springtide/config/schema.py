"""One frozen section a package. Every field has a doc line that ends with its unit in brackets.

Fields marked *free* may differ when a run is resumed: they change where and how fast it trains, never what it learns.
Fields marked *ahead* may differ too, for steps that are not trained yet; the identity of the order guards those that are.
Everything else is the run's identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from springtide.config.batch_schedule import Ramp
from springtide.config.data import CorpusConfig, ShardsConfig, StreamConfig
from springtide.config.engine import ModelConfig, OptimConfig, ParallelConfig
from springtide.config.quantities import Bytes, Seconds, Tokens
from springtide.config.section import Section, free
from springtide.errors import explain

SAMPLE_PROMPT = "def "
"""What the text that a run ends with follows."""
SAMPLE_TEMPERATURE = 0.8


class TrainConfig(Section):
    """Length of the run, micro-batch, evaluation."""

    total: Tokens = Tokens(1_000_000)
    """Tokens to train on; the last step may go past it [tokens]."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = free(default=8)
    """Rows a worker computes at once; the gradient does not depend on it. ``auto`` takes as many as fit the devices of the
    cluster, with the fewest workers as with the most [rows]."""
    profile: int = free(default=0, ge=0)
    """Steps that rank 0 takes a profile of, after the first three of a group of workers; 0 takes none [steps]."""
    seed: int = Field(0, ge=0)
    """Seed of what is drawn in training, such as dropout; each step and worker draws from its own [1]."""
    start_from: str = ""
    """Checkpoint of another run to begin with, or its run's folder for the newest; empty begins with new weights [url]."""
    start_with: Literal["state", "weights"] = "state"
    """What of it: all its state, so that this run branches off at its step and trains on the rows that follow, or its weights,
    at step 0 [name]."""
    eval_rows: int = free(default=64, ge=0)
    """Held-out rows to evaluate on, before and after training; 0 evaluates nothing [rows]."""
    eval_every: int = free(default=0, ge=0)
    """Steps between evaluations while it trains; 0 makes none [steps]."""
    eval_async: bool = free(default=False)
    """Whether those are made beside training, of the first checkpoint committed at or after each such step, by a process of its
    own that computes in fp32; else training waits for them. One that takes longer than it has leaves out checkpoints
    [flag]."""
    eval_gpus: float = free(default=0.0, ge=0)
    """GPUs that process reserves in Ray; without one it computes on the driver's node [gpus]."""
    sample_tokens: int = free(default=96, ge=0)
    """Length of the text generated after training; 0 generates none [tokens]."""

    @property
    def rows_at_once(self) -> int:
        """``micro_batch``, which is a number by the time anything trains [rows]."""
        if self.micro_batch == "auto":
            raise ValueError(
                explain("train.micro_batch", "auto", "is chosen by a run on Ray only", "give a number of rows here")
            )
        return self.micro_batch


class CheckpointConfig(Section):
    """When to save, where to stage it, and what to keep."""

    every_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = free(default=50)
    """Steps between checkpoints; 0 saves at the end only, ``auto`` when it pays, by what a save costs and how often workers are
    lost [steps]."""
    min_every: Seconds = free(default=Seconds(30.0), gt=0)
    """Least time between checkpoints of ``auto`` [s]."""
    max_every: Seconds = free(default=Seconds(1800.0), gt=0)
    """Most time between checkpoints of ``auto`` [s]."""
    expected_loss: Seconds = free(default=Seconds(4 * 3600.0), gt=0)
    """Training time a loss of workers is expected after, until this run has seen its own; for ``auto`` [s]."""
    when_busy: Literal["skip", "queue"] = free(default="skip")
    """What becomes of a save that is due while the one before is being written: it is left out, or training waits [name]."""
    stage: str = free(default="/dev/shm")
    """Folder of a memory file system that state is copied to, to be written from beside training; empty copies nothing, and
    training waits for saves [name]."""
    memory_every: Annotated[int, Field(ge=0)] | Literal["auto"] = free(default="auto")
    """Steps between snapshots in the memory of the nodes, on Ray; 0 takes none, ``auto`` as many as cost training less than
    3% of its time [steps]."""
    memory_bytes: Annotated[Bytes, Field(ge=0)] | Literal["auto"] = free(default="auto")
    """Most memory that snapshots may take on a node, copies for its peers included; ``auto`` is half of what the node has free
    when the first process of the run comes to it [bytes]."""
    memory_copies: int = free(default=1, ge=0)
    """Copies of each snapshot on other nodes: so many nodes may go at once, without notice, and none of what was in memory is
    lost [copies]."""
    tries: int = free(default=5, ge=1)
    """How often a save is tried before it has failed [tries]."""
    max_failed: int = free(default=3, ge=0)
    """Saves that may fail one after the other before the run stops [checkpoints]."""
    keep_last: int = free(default=3, ge=1)
    """Newest committed checkpoints to keep [checkpoints]."""
    keep_every: int = free(default=0, ge=0)
    """Keep those whose step is a multiple of it; 0 keeps none for that [steps]."""
    keep_best: int = free(default=0, ge=0)
    """Keep so many with the smallest ``best_by`` [checkpoints]."""
    best_by: Literal["loss", "heldout_loss"] = free(default="loss")
    """What the best are chosen by: the mean training loss since the save before, or the held-out loss, of those that were
    evaluated [name]."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.min_every > self.max_every:
            raise ValueError(
                explain(
                    "checkpoint.min_every",
                    float(self.min_every),
                    f"must be at most checkpoint.max_every = {float(self.max_every):g} s",
                    "lower it or raise max_every",
                )
            )
        return self


class ElasticConfig(Section):
    """How many workers, of which size, and how much misfortune to bear."""

    min_workers: int = free(default=1, ge=1)
    """Fewest workers to train with; below, the run waits [workers]."""
    max_workers: int = free(default=2, ge=1)
    """Most workers to use [workers]."""
    cpus_per_worker: float = free(default=1.0, gt=0)
    """Logical CPUs a worker reserves in Ray [cpus]."""
    gpus_per_worker: float = free(default=0.0, ge=0)
    """GPUs a worker reserves in Ray [gpus]."""
    grow: Literal["when_it_pays", "always", "never"] = free(default="when_it_pays")
    """Whether to take up nodes that join: when the time they save is more than the restart takes, or by rule [name]."""
    max_failures: int = free(default=3, ge=0)
    """Worker failures to recover from before the run stops; lost nodes do not count [failures]."""
    settle: Seconds = free(default=Seconds(2.0), ge=0)
    """Changes of the cluster that follow each other faster than this are one restart [s]."""
    wait: Seconds = free(default=Seconds(0.0), ge=0)
    """How long to wait for ``min_workers`` before the run ends, to be resumed; 0 waits for ever [s]."""
    reserve: Seconds = free(default=Seconds(5.0), ge=0)
    """What is kept of the time before an announced loss to bring the state to safety [s]."""
    hang: Seconds = free(default=Seconds(300.0), ge=0)
    """Least time without a step, a save or an evaluation after which workers count as hung and are restarted; never less than
    twenty usual steps; 0 waits for ever [s]."""
    compare: Seconds = free(default=Seconds(60.0), ge=0)
    """How often the devices of all workers are compared while they train, to name those that hold up the others; 0 never
    [s]."""
    notices: Literal["auto", "aws", "gcp", "azure", "file", "off"] = free(default="auto")
    """Whom each node asks whether it will be taken away: the cloud it is in, as its firmware tells, and ``notice_file``; only
    the file; nobody [name]."""
    notice_file: str = free(default="/tmp/springtide-notice")
    """File on each node in which a hook leaves the seconds that are left, as `springtide notice` does; ``{node}`` in it stands
    for the node's id in Ray; empty looks at none [name]."""
    metadata_url: str = free(default="")
    """Where the cloud's metadata service answers; empty is the address that clouds have in common [url]."""
    leave_on_rebalance: bool = free(default=False)
    """Whether to leave a node that AWS recommends to rebalance, before it is known that it goes [flag]."""

    @model_validator(mode="after")
    def _check(self) -> ElasticConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                explain(
                    "elastic.min_workers",
                    self.min_workers,
                    f"must be at most elastic.max_workers = {self.max_workers}",
                    "lower it or raise max_workers",
                )
            )
        return self


class FeedConfig(Section):
    """The Ray Data pipeline of each worker."""

    read_bytes: Bytes = free(default=Bytes(4 * 2**20), ge=1)
    """Token bytes that one read task fetches [bytes]."""
    reads_in_flight: int = free(default=2, ge=1)
    """Read tasks a worker keeps ahead of training [tasks]."""
    cpus_per_read: float = free(default=0.0, ge=0)
    """Logical CPUs a read task reserves; 0 never starves behind workers that hold every CPU [cpus]."""
    cache: str = free(default="")
    """Folder on each node's own disk in which row groups of object storage are kept, in ``springtide-cache-UID`` below it;
    nothing else there is touched; empty is the node's temporary folder [name]."""
    cache_bytes: Bytes = free(default=Bytes(32 * 2**30), ge=0)
    """Most that the cache of a node may hold; 0 keeps nothing and reads the store each time [bytes]."""


class TrackConfig(Section):
    """Where a run reports to."""

    mlflow_uri: str = free(default="")
    """MLflow tracking server; empty means a sqlite file beside the runs; ``off`` turns MLflow off [url]."""
    experiment: str = free(default="springtide")
    """MLflow experiment [name]."""
    parent: str = free(default="")
    """MLflow run that this one is shown below, as a trial below its sweep; empty shows it by itself [name]."""
    progress: bool = free(default=True)
    """Whether to draw progress on the console [flag]."""
    price: float = free(default=0.0, ge=0)
    """What a worker costs in an hour, for the report; 0 where money is not counted [dollars/h]."""
    spot_price: float = free(default=0.0, ge=0)
    """The same on nodes whose label ``ray.io/market-type`` is ``spot`` [dollars/h]."""
    retry: Seconds = free(default=Seconds(5.0))
    """Pause before a tracking server that failed is tried again [s]."""


class RunConfig(Section):
    """What the run is called and where it lives."""

    id: str = free(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$")
    """Name of the run and of its folder; empty makes one up [name]."""
    root: str = free(default="runs")
    """Folder or fsspec URL that holds runs [url]."""


class Config(Section):
    """Everything a run is made of."""

    run: RunConfig = RunConfig()
    """Name and place."""
    corpus: CorpusConfig = CorpusConfig()
    """Text and vocabulary."""
    shards: ShardsConfig = ShardsConfig()
    """Packing and sealing."""
    stream: StreamConfig = StreamConfig()
    """Order of samples."""
    model: ModelConfig = ModelConfig()
    """Architecture."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout over workers."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    train: TrainConfig = TrainConfig()
    """Length and evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    elastic: ElasticConfig = ElasticConfig()
    """Workers."""
    feed: FeedConfig = FeedConfig()
    """Ray Data."""
    track: TrackConfig = TrackConfig()
    """Metrics."""

    def override(self, changes: Mapping[str, Any]) -> Config:
        """A copy with fields changed by their dotted names, checked like any other config; ConfigError names the field.

        >>> Config().override({"stream.global_batch": 64}).stream.global_batch
        64
        """
        from springtide.config.files import with_changes  # it reads the fields of this class

        return with_changes(self, changes)

    @property
    def ramp(self) -> Ramp:
        """Rows of every step."""
        length, pieces, trained = self.shards.sequence_length, [(0, self.stream.global_batch)], 0
        for entry in self.stream.ramp:
            start = pieces.pop()[0]
            steps = -(-(int(entry.until_tokens) - trained) // (entry.rows * length))
            trained += steps * entry.rows * length
            pieces += [(start, entry.rows), (start + steps, self.stream.global_batch)]
        return Ramp(tuple(pieces))

    @property
    def tokens_per_step(self) -> int:
        """Tokens trained on in a step of full size over all workers [tokens]."""
        return self.stream.global_batch * self.shards.sequence_length

    @property
    def num_steps(self) -> int:
        """Steps in the run [steps]."""
        return self.steps_to(int(self.train.total))

    def steps_to(self, tokens: int) -> int:
        """Steps until ``tokens`` are trained on, or more, if none is jumped over [steps]."""
        return self.ramp.steps(-(-tokens // self.shards.sequence_length))

    def tokens_after(self, step: int) -> int:
        """Tokens trained on after ``step`` steps, if none is jumped over [tokens]."""
        return self.ramp.before(step) * self.shards.sequence_length

    @model_validator(mode="after")
    def _check(self) -> Config:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> list[str]:
        """Settings that are fine alone and wrong together, each as one sentence."""
        found = []
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
        if self.corpus.tokenizer == "bpe" and self.shards.token_type == "uint16" and self.corpus.vocab_size > 2**16:
            found.append(
                explain(
                    "corpus.vocab_size",
                    self.corpus.vocab_size,
                    "shards.token_type = 'uint16' holds ids below 65536",
                    "set shards.token_type to uint32 or choose a smaller vocabulary",
                )
            )
        if self.model.base_width and self.optim.optimizer == "muon":
            # its updates have the root mean square of AdamW's at every width, and a spectral norm that grows with its root
            problem = "scales the rates of AdamW; optim.optimizer = 'muon' would need a rule of its own"
            found.append(explain("model.base_width", self.model.base_width, problem, "use adamw, or base_width 0"))
        if self.checkpoint.keep_best and self.checkpoint.best_by == "heldout_loss" and self.train.eval_async:
            problem = "is not known yet when a save is made, with train.eval_async"
            found.append(explain("checkpoint.best_by", "heldout_loss", problem, "turn that off, or choose by loss"))
        if self.train.total < 1:
            found.append(explain("train.total", int(self.train.total), "trains on nothing", "give at least one token"))
        if self.optim.warmup + self.optim.decay > self.tokens_after(self.num_steps):
            found.append(
                explain(
                    "optim.warmup",
                    int(self.optim.warmup),
                    f"with optim.decay = {int(self.optim.decay)} longer than train.total = {int(self.train.total)}",
                    "shorten warmup or decay, or train longer",
                )
            )
        return found
