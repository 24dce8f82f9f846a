"""One frozen section a room. Every field has a doc line that ends with its unit in brackets.

Fields marked *free* may differ when a run is resumed: they change where and how fast it trains, never what it learns.
Fields marked *ahead* may differ too, for steps that are not trained yet; the identity of the order guards those that are.
Everything else is the run's identity.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from springtide.config.amounts import Bytes, Seconds, Tokens
from springtide.config.data import CorpusConfig, ShardsConfig, StreamConfig
from springtide.config.section import Section, free
from springtide.errors import explain


class ModelConfig(Section):
    """A decoder; its options span Llama, Qwen and Gemma."""

    num_layers: int = Field(6, ge=1)
    """Decoder blocks [blocks]."""
    dim: int = Field(192, ge=2)
    """Width of the residual stream [features]."""
    num_heads: int = Field(6, ge=1)
    """Query heads; must divide dim, unless head_dim is given [heads]."""
    num_kv_heads: int = Field(3, ge=1)
    """Key and value heads; must divide num_heads [heads]."""
    head_dim: int = Field(0, ge=0)
    """Width of a head; 0 means dim / num_heads [features]."""
    ffn_dim: int = Field(512, ge=1)
    """Hidden width of the gated feed-forward [features]."""
    activation: Literal["silu", "gelu"] = "silu"
    """What the gate goes through: SwiGLU, or Gemma's GeGLU with the tanh approximation [name]."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen 2 [flag]."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before they are turned, as in Qwen 3 [flag]."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square inside RMSNorm [1]."""
    norm_around_one: bool = False
    """Whether norms scale by one plus their weight, which begins at zero, as in Gemma [flag]."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of dim, as in Gemma [flag]."""
    tied_head: bool = True
    """Whether the output head shares the embedding's weight [flag]."""
    max_sequence_length: int = Field(2048, ge=2)
    """Longest sequence the rotary table is built for [tokens]."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary wavelengths [1]."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How wavelengths are stretched for longer sequences than a model was trained on: all alike, or as in Llama 3 the long ones
    only [name]."""
    rope_factor: float = Field(8.0, ge=1)
    """By how much they are stretched [ratio]."""
    rope_original_length: int = Field(8192, ge=2)
    """Length of the sequences the model was trained on before; for llama3 [tokens]."""
    rope_low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths above rope_original_length over this are stretched wholly; for llama3 [ratio]."""
    rope_high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths below rope_original_length over this are kept; for llama3 [ratio]."""
    init_seed: int = Field(0, ge=0)
    """Seed of the initial weights [1]."""

    @property
    def head_width(self) -> int:
        """Of a head [features]."""
        return self.head_dim or self.dim // self.num_heads

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if not self.head_dim and self.dim % (2 * self.num_heads):
            raise ValueError(
                explain(
                    "model.num_heads",
                    self.num_heads,
                    f"must divide model.dim = {self.dim} into even head sizes",
                    "choose dim as an even multiple of num_heads, or set model.head_dim",
                )
            )
        if self.head_dim % 2:
            raise ValueError(explain("model.head_dim", self.head_dim, "must be even", f"use {self.head_dim + 1}"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                explain(
                    "model.num_kv_heads",
                    self.num_kv_heads,
                    f"must divide model.num_heads = {self.num_heads}",
                    "choose a divisor",
                )
            )
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ValueError(
                explain(
                    "model.rope_high_freq_factor",
                    self.rope_high_freq_factor,
                    f"must be more than model.rope_low_freq_factor = {self.rope_low_freq_factor:g}",
                    "Llama 3 has 1 and 4",
                )
            )
        return self


class ParallelConfig(Section):
    """How the model is laid over the workers."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of weights and activations inside a block; master weights stay fp32 [type]."""
    reduction: Literal["fp32", "fp64"] = free(default="fp32")
    """Type that gradients are added up in, over micro-batches and workers. With fp64 the sums are exact in all but freak cases
    and micro-batches never cross lanes, so that a CPU run is bit-equal at any world size [type]."""
    reshard_after_forward: bool = free(default=True)
    """Whether FSDP frees a block's full weights after every use (ZeRO-3) or keeps them for the step (ZeRO-2) [flag]."""
    threads: int = free(default=0, ge=0)
    """Intra-op CPU threads a worker; 0 leaves the choice to OMP_NUM_THREADS [threads]."""


class OptimConfig(Section):
    """AdamW, its schedule in tokens, and clipping."""

    peak_lr: float = Field(3e-3, gt=0)
    """Learning rate after warm-up [1]."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Shape after warm-up: a half cosine, or stable and then a linear decay [name]."""
    warmup: Tokens = Tokens(50_000)
    """Linear warm-up from zero [tokens]."""
    decay: Tokens = Tokens(0)
    """Length of the final decay; 0 means all that follows the warm-up for cosine, a fifth of the run for wsd [tokens]."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end over peak_lr [ratio]."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment [ratio]."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment [1]."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices; vectors are not decayed [1]."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off [1]."""

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(explain("optim.betas", self.betas, "each must be in [0, 1)", "use (0.9, 0.95)"))
        return self


class TrainConfig(Section):
    """Length of the run, micro-batch, evaluation."""

    total: Tokens = Tokens(1_000_000)
    """Tokens to train on; the last step may go past it [tokens]."""
    micro_batch: int = free(default=8, ge=1)
    """Rows a worker computes at once; the gradient does not depend on it [rows]."""
    seed: int = Field(0, ge=0)
    """Seed of what is drawn in training, such as dropout; each step and worker draws from its own [1]."""
    eval_rows: int = free(default=64, ge=0)
    """Held-out rows to evaluate on, before and after training; 0 evaluates nothing [rows]."""
    sample_tokens: int = free(default=96, ge=0)
    """Length of the text generated after training; 0 generates none [tokens]."""


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
    memory_bytes: Bytes = free(default=Bytes(64 * 2**30), ge=0)
    """Most memory that snapshots may take on a node, copies for its peers included [bytes]."""
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
    """Folder on each node's own disk that keeps row groups of object storage; empty is one below the node's temporary folder
    [name]."""
    cache_bytes: Bytes = free(default=Bytes(32 * 2**30), ge=0)
    """Most that the cache of a node may hold; 0 keeps nothing and reads the store each time [bytes]."""


class TrackConfig(Section):
    """Where a run reports to."""

    mlflow_uri: str = free(default="")
    """MLflow tracking server; empty means a sqlite file beside the runs; ``off`` turns MLflow off [url]."""
    experiment: str = free(default="springtide")
    """MLflow experiment [name]."""
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

    @property
    def tokens_per_step(self) -> int:
        """Tokens trained on in a step over all workers [tokens]."""
        return self.stream.global_batch * self.shards.sequence_length

    @property
    def num_steps(self) -> int:
        """Steps in the run [steps]."""
        return -(-int(self.train.total) // self.tokens_per_step)

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
        if self.train.total < 1:
            found.append(explain("train.total", int(self.train.total), "trains on nothing", "give at least one token"))
        if self.optim.warmup + self.optim.decay > self.num_steps * self.tokens_per_step:
            found.append(
                explain(
                    "optim.warmup",
                    int(self.optim.warmup),
                    f"with optim.decay = {int(self.optim.decay)} longer than train.total = {int(self.train.total)}",
                    "shorten warmup or decay, or train longer",
                )
            )
        return found
