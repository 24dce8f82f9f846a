"""Recipes: functions that return a whole config, named by size, hardware or model.

Examples:
    >>> st.recipes.llama3_8b().model.dim
    4096
    >>> list(st.recipes.RECIPES)[:5]
    ['tiny', 'demo', 'gpu_125m', 'gpu_1b', 'gemma_2b']
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from springtide.config.data import CorpusConfig, ShardsConfig, StreamConfig
from springtide.config.elastic import ElasticConfig
from springtide.config.engine import ModelConfig, OptimConfig, ParallelConfig
from springtide.config.inherit import inherited, is_named
from springtide.config.quantities import Tokens
from springtide.config.schema import CheckpointConfig, Config, TrainConfig
from springtide.errors import ConfigError, explain

_EVAL = Tokens(2**20)
"""Held-out tokens that the recipes for GPUs evaluate on. An evaluation takes less time than two steps [tokens]."""


def demo() -> Config:
    """A 4M-parameter model on Python's own source, two CPU workers: two minutes on a laptop."""
    return Config(
        model=ModelConfig(num_layers=4, dim=256, num_heads=4, num_kv_heads=2, ffn_dim=688, max_sequence_length=256),
        shards=ShardsConfig(sequence_length=128, heldout_fraction=0.04),
        stream=StreamConfig(global_batch=8, lanes=4),
        # fp64 sums have the same bits at any number of workers: a resize does not change the loss
        parallel=ParallelConfig(reduction="fp64", strategy="zero1"),
        optim=OptimConfig(peak_lr=3e-3, warmup=Tokens(40_000), final_lr_ratio=0.05),
        train=TrainConfig(total=Tokens(135 * 8 * 128), micro_batch=4, eval_tokens=Tokens(256 * 128)),
        checkpoint=CheckpointConfig(every_steps=50),
        elastic=ElasticConfig(min_workers=1, max_workers=2, notices="off"),
    )


def tiny() -> Config:
    """A 0.2M-parameter byte model that trains in seconds: for tests and first experiments."""
    return Config.model_validate(
        {
            "corpus": {"tokenizer": "bytes", "max_files": 40},
            "model": {"num_layers": 2, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160},
            "shards": {"sequence_length": 64, "rows_per_group": 64, "groups_per_shard": 8, "heldout_fraction": 0.1},
            "stream": {"global_batch": 12, "max_epochs": 100},  # long experiments repeat the small corpus many times
            "optim": {"warmup": 12 * 64 * 10},
            "train": {"total": 12 * 64 * 60, "eval_tokens": 16 * 64, "sample_tokens": 32},
            "checkpoint": {"every_steps": 20, "when_busy": "queue"},
            "elastic": {"notices": "off"},
        }
    )


def gpu_125m() -> Config:
    """GPT-2 small's size in a Llama shape, bf16, one to eight GPUs, 2.5B tokens of your text."""
    return Config(
        corpus=_corpus(50_304),
        model=ModelConfig(
            num_layers=12, dim=768, num_heads=12, num_kv_heads=12, ffn_dim=2048, max_sequence_length=2048
        ),
        shards=ShardsConfig(sequence_length=1024, rows_per_group=2048),  # a row group, read in one request, has 4 MiB
        stream=StreamConfig(global_batch=480),
        parallel=ParallelConfig(precision="bf16"),
        optim=OptimConfig(peak_lr=6e-4, warmup=Tokens(100_000_000), schedule="wsd"),
        train=TrainConfig(total=Tokens(2_500_000_000), micro_batch=32, eval_tokens=_EVAL, eval_every=500),
        checkpoint=CheckpointConfig(every_steps=500),
        elastic=ElasticConfig(min_workers=1, max_workers=8, gpus_per_worker=1),
    )


def gpu_1b() -> Config:
    """1.3B parameters in a Llama shape, bf16, on eight GPUs, 26B tokens of your text."""
    model = ModelConfig(num_layers=24, dim=2048, num_heads=16, num_kv_heads=16, ffn_dim=5632, tied_head=False)
    return _pretrain(model, 50_304, global_batch=512, peak_lr=3e-4, total=26_000_000_000, micro_batch=8)


def llama3_8b() -> Config:
    """Llama 3 8B's shape (arXiv 2407.21783), bf16, 64 GPUs, 200B tokens of your text."""
    model = _llama3(32, 4096, 32, 14336)
    return _pretrain(model, 128_256, global_batch=512, peak_lr=3e-4, total=200_000_000_000, length=8192)


def llama3_70b() -> Config:
    """Llama 3 70B's shape (arXiv 2407.21783), bf16, 256 GPUs, 1.4T tokens of your text."""
    return _pretrain(
        _llama3(80, 8192, 64, 28672),
        128_256,
        global_batch=1024,
        peak_lr=1.5e-4,
        total=1_400_000_000_000,
        length=8192,
        most=256,
        recompute="full",  # selective keeps matrix products, 1.5 GB per block: too much, 121 GB in 80 blocks
    )


def qwen3_4b() -> Config:
    """Qwen 3 4B's shape (arXiv 2505.09388), bf16, 64 GPUs, 80B tokens of your text."""
    model = ModelConfig(
        num_layers=36,
        dim=2560,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=9728,
        qk_norm="head",
        norm_eps=1e-6,
        max_sequence_length=32768,
        rope_theta=1e6,
    )
    return _pretrain(model, 151_936, global_batch=512, peak_lr=3e-4, total=80_000_000_000, length=4096)


def gemma_2b() -> Config:
    """Gemma 2B's shape (arXiv 2403.08295), bf16, 64 GPUs, 50B tokens of your text."""
    model = ModelConfig(
        num_layers=18,
        dim=2048,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        ffn_dim=16384,
        activation="gelu",
        norm_eps=1e-6,
        norm_unit_offset=True,
        scaled_embedding=True,
        max_sequence_length=8192,
    )
    return _pretrain(model, 256_000, global_batch=512, peak_lr=3e-4, total=50_000_000_000, length=4096)


def gemma2_2b() -> Config:
    """Gemma 2 2B's shape (arXiv 2408.00118), bf16, 64 GPUs, 50B tokens of your text."""
    model = ModelConfig(
        num_layers=26,
        dim=2304,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        ffn_dim=9216,
        window=4096,
        global_every=2,
        attention_cap=50.0,
        logit_cap=30.0,
        max_sequence_length=8192,
        **_GEMMA2,
    )
    return _pretrain(
        model, 256_000, global_batch=512, peak_lr=3e-4, total=50_000_000_000, length=4096, recompute="full"
    )


def gemma3_1b() -> Config:
    """Gemma 3 1B's shape (arXiv 2503.19786), bf16, 64 GPUs, 20B tokens of your text."""
    model = ModelConfig(
        num_layers=26,
        dim=1152,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        ffn_dim=6912,
        qk_norm="head",
        window=512,
        global_every=6,
        max_sequence_length=32768,
        rope_theta=1e6,
        local_rope_theta=1e4,
        **_GEMMA2,
    )
    return _pretrain(model, 262_144, global_batch=512, peak_lr=3e-4, total=20_000_000_000, length=4096)


def mistral_7b() -> Config:
    """Mistral 7B's shape (arXiv 2310.06825), bf16, 64 GPUs, 150B tokens of your text."""
    model = _llama3(32, 4096, 32, 14336).model_copy(update={"rope_theta": 10_000.0, "window": 4096})
    return _pretrain(model, 32_000, global_batch=512, peak_lr=3e-4, total=150_000_000_000, length=8192)


def olmo2_7b() -> Config:
    """OLMo 2 7B's shape (arXiv 2501.00656), bf16, 64 GPUs, 150B tokens of your text."""
    return _pretrain(_olmo2(), 100_352, global_batch=512, peak_lr=3e-4, total=150_000_000_000, length=4096)


def olmo3_7b() -> Config:
    """OLMo 3 7B's shape (arXiv 2512.13961), bf16, 64 GPUs, 150B tokens of your text."""
    model = _olmo2().model_copy(update={"window": 4096, "global_every": 4, "max_sequence_length": 8192})
    return _pretrain(model, 100_352, global_batch=512, peak_lr=3e-4, total=150_000_000_000, length=8192)


def phi4_mini() -> Config:
    """Phi 4 mini's shape (arXiv 2503.01743), bf16, 64 GPUs, 80B tokens of your text."""
    model = ModelConfig(
        num_layers=32,
        dim=3072,
        num_heads=24,
        num_kv_heads=8,
        ffn_dim=8192,
        rotary_fraction=0.75,
        max_sequence_length=4096,
    )
    return _pretrain(model, 200_064, global_batch=512, peak_lr=3e-4, total=80_000_000_000, length=4096)


_GEMMA2: dict[str, Any] = {
    "activation": "gelu",
    "norm_eps": 1e-6,
    "norm_unit_offset": True,
    "norms": "both",
    "scaled_embedding": True,
}


def _olmo2() -> ModelConfig:
    return ModelConfig(
        num_layers=32,
        dim=4096,
        num_heads=32,
        num_kv_heads=32,
        ffn_dim=11008,
        qk_norm="all_heads",
        norms="post",
        norm_eps=1e-6,
        tied_head=False,
        max_sequence_length=4096,
        rope_theta=500_000.0,
    )


def _llama3(num_layers: int, dim: int, num_heads: int, ffn_dim: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_dim=ffn_dim,
        tied_head=False,
        max_sequence_length=8192,
        rope_theta=500_000.0,
    )


def _corpus(vocab_size: int) -> CorpusConfig:
    """Return a corpus section with the vocabulary size of the released model and without a source of text, which the user must
    name."""
    return CorpusConfig(source="", vocab_size=vocab_size)


def _pretrain(
    model: ModelConfig,
    vocab_size: int,
    global_batch: int,
    peak_lr: float,
    total: int,
    micro_batch: int = 1,
    length: int = 2048,
    most: int = 64,
    recompute: Literal["selective", "full"] = "selective",
) -> Config:
    """Return a config for pretraining on GPUs in bf16, with compiled blocks and at most ``most`` workers."""
    return Config(
        corpus=_corpus(vocab_size),
        model=model,
        shards=ShardsConfig(
            sequence_length=length, rows_per_group=1024, token_type="uint16" if vocab_size <= 2**16 else "uint32"
        ),
        stream=StreamConfig(global_batch=global_batch),
        parallel=ParallelConfig(precision="bf16", recompute=recompute, compile=True),
        optim=OptimConfig(peak_lr=peak_lr, warmup=Tokens(total // 100), schedule="wsd"),
        train=TrainConfig(total=Tokens(total), micro_batch=micro_batch, eval_tokens=_EVAL, eval_every=500),
        checkpoint=CheckpointConfig(every_steps="auto"),
        elastic=ElasticConfig(min_workers=1, max_workers=most, gpus_per_worker=1),
    )


_OF_RELEASED_MODELS = (gemma_2b, gemma2_2b, gemma3_1b, qwen3_4b, phi4_mini, mistral_7b, olmo2_7b, olmo3_7b)
_ALL = (tiny, demo, gpu_125m, gpu_1b, *_OF_RELEASED_MODELS, llama3_8b, llama3_70b)
RECIPES: dict[str, Callable[[], Config]] = {recipe.__name__: recipe for recipe in _ALL}


# Recipes for runs that start from a model: they take settings from the model's run, and change what their kind of fine-tuning
# needs.
#
# Examples:
# >>> run = st.open_run("runs/mine")
# >>> tuned = st.recipes.lora(run.config, "runs/mine").override({"corpus.source": "chats.jsonl"})
# >>> tuned.model.adapter, tuned.model.dim == run.config.model.dim, tuned.train.start_from
# ('lora', True, 'runs/mine')

_ROWS = ("packing", "mask_across_documents", "rows_per_group", "groups_per_shard", "heldout_fraction")


def sft(run: Config, start_from: str) -> Config:
    """Return settings that train all weights of a model on chats or instructions, with loss on the answers only.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: folder of the model's run, or one of its checkpoints.

    Returns:
        The run's model, tokenizer, length of rows and precision (``inherit.INHERITED``), with a low learning rate (Touvron et
        al., "Llama 2", 2023, section 3.1: 2e-5). You must set ``corpus.source``, and ``corpus.chat_template`` if the run has
        none. Set the template to ``model`` for an imported model's own template, as the command line does by default.

    Examples:
        >>> found = st.recipes.sft(st.open_run("runs/mine").config, "runs/mine")
        >>> found.train.start_with, found.shards.packing, found.optim.peak_lr
        ('weights', 'best_fit', 2e-05)
    """
    return _tuned(run, start_from, peak_lr=2e-5)


def lora(run: Config, start_from: str) -> Config:
    """Return settings that train a LoRA adapter on every matrix of a model's blocks; the model's own weights are frozen.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: folder of the model's run, or one of its checkpoints.

    Returns:
        Settings as from ``sft``, but with an adapter of rank 16 and ten times the learning rate, which a low rank needs
        (Schulman et al., "LoRA Without Regret", 2025). If the model already has an adapter, that adapter is trained further.

    Examples:
        >>> found = st.recipes.lora(st.open_run("runs/mine").config, "runs/mine")
        >>> found.model.adapter, found.model.adapter_rank, found.optim.peak_lr
        ('lora', 16, 0.0002)
    """
    new = run.model.adapter == "none"
    adapter = {"adapter": "lora", "adapter_rank": 16, "adapter_alpha": 32.0} if new else {}
    tuned = _tuned(run, start_from, peak_lr=2e-4)
    return tuned.override({f"model.{name}": value for name, value in adapter.items()})


def grow(run: Config, start_from: str) -> Config:
    """Return settings that train new blocks between a model's blocks, which are frozen (Wu et al., "LLaMA Pro", 2024).

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: folder of the model's run, or one of its checkpoints.

    Returns:
        Settings as from ``sft``, but with a new block after every four (``train.new_blocks``), all other weights frozen
        (``optim.groups``), and ten times the learning rate. For another number of new blocks, ``new_blocks_of`` returns their
        indexes.

    Examples:
        >>> found = st.recipes.grow(st.open_run("runs/mine").config, "runs/mine")
        >>> found.train.new_blocks, found.model.num_layers, [group.match for group in found.optim.groups]
        ((2,), 3, ['blocks.2.*', '*'])
    """
    layers = run.model.num_layers
    new = new_blocks_of(layers, max(1, layers // 4))
    groups = [{"match": f"blocks.{number}.*"} for number in new] + [{"match": "*", "frozen": True}]
    changes = {"model.num_layers": layers + len(new), "train.new_blocks": new, "optim.groups": groups}
    return _tuned(run, start_from, peak_lr=2e-4).override(changes)


def new_blocks_of(layers: int, count: int) -> tuple[int, ...]:
    """Return the indexes that ``count`` new blocks get when they are spread evenly among the ``layers`` blocks of a model. The
    last new block is at the end.

    Examples:
        >>> new_blocks_of(32, 8)
        (4, 9, 14, 19, 24, 29, 34, 39)
    """
    return tuple(-(-number * layers // count) + number - 1 for number in range(1, count + 1))


def dpo(run: Config, start_from: str) -> Config:
    """Return settings that train a model to prefer the chosen answers in pairs of answers, with the model itself as the
    reference.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: folder of the model's run, or one of its checkpoints.

    Returns:
        Settings as from ``sft``, but with direct preference optimization at a learning rate of 1e-6 (Rafailov et al., 2023,
        appendix B). You must also set ``objective.labels``, the reference's log-probabilities; ``objective.source: orpo`` needs
        no labels.

    Examples:
        >>> found = st.recipes.dpo(st.open_run("runs/mine").config, "runs/mine")
        >>> found.objective.source, found.optim.peak_lr
        ('dpo', 1e-06)
    """
    return _tuned(run, start_from, peak_lr=1e-6).override({"objective.source": "dpo"})


def distill(run: Config, start_from: str) -> Config:
    """Return settings that train a model, the student, to predict a teacher's probabilities of next tokens.

    Args:
        run: settings of the student's run, as ``import_model`` or training wrote them.
        start_from: folder of the model's run, or one of its checkpoints.

    Returns:
        The student's model, tokenizer, rows and precision, with a third of the learning rate of its run. You must name the text
        (``corpus.source`` or ``shards.dataset``) and the teacher (``objective.teacher``, or its labels in
        ``objective.labels``).

    Examples:
        >>> found = st.recipes.distill(st.open_run("runs/mine").config, "runs/mine")
        >>> found.objective.source, found.train.start_with, found.shards.packing
        ('distill', 'weights', 'concat')
    """
    return _trained_on(run, start_from).override({"objective.source": "distill"})


def continued(run: Config, start_from: str, named: Sequence[str] = ()) -> Config:
    """Return settings that continue to train a model on new text. A quarter of each batch replays the text that the model was
    trained on. On the command line this recipe is ``continue``.

    Args:
        run: settings of the model's run, which names its dataset.
        start_from: folder of the model's run, or one of its checkpoints.
        named: more URLs that the user typed. ``run`` may come from a stranger, so its datasets must be local, or on the host of
            one of these URLs or of ``start_from``.

    Returns:
        The run's model, tokenizer, rows and precision. The learning rate warms up again, to a third of the run's peak, and
        falls to a tenth of that third (Ibrahim et al., "Simple and scalable strategies to continually pre-train large language
        models", 2024). You must set ``corpus.source``, the new text: in the mixture it is ``new``, and the run's dataset is
        ``old``.

    Raises:
        ConfigError: ``run`` has no dataset, or one on a host that the user has not named.

    Examples:
        >>> found = st.recipes.continued(st.open_run("runs/mine").config, "runs/mine")
        >>> sorted(found.stream.mixture), found.stream.weights[0].shares, found.train.start_with
        (['new', 'old'], {'new': 3.0, 'old': 1.0}, 'weights')
    """
    known = {f"old-{name}": url for name, url in run.stream.mixture.items()} or {"old": run.shards.dataset}
    if "" in known.values():
        problem = "has no dataset to replay: its run was imported, or prepares its text yet"
        remedy = "name datasets and weights yourself: docs/how-to/continue.md"
        raise ConfigError(explain("train.start_from", start_from, problem, remedy))
    for url in known.values():
        if not any(is_named(url, one) for one in (start_from, *named)):
            limit = f"names a dataset to replay on a host that you did not name: {url}"
            remedy = f"to allow it: --stream.mixture '{json.dumps({'new': '', **known}, allow_nan=False)}'"
            raise ConfigError(explain("train.start_from", start_from, limit, remedy))
    shares = {"new": 3.0, **dict.fromkeys(known, 1.0 / len(known))}
    mixture = {"new": "", **known}
    return _trained_on(run, start_from).override({"stream.mixture": mixture, "stream.weights": [{"shares": shares}]})


FINE_TUNING: dict[str, Callable[[Config, str], Config]] = {
    "sft": sft,
    "lora": lora,
    "grow": grow,
    "dpo": dpo,
    "distill": distill,
    "continue": continued,
}
"""Name -> recipe, for the recipes that start from a model and take settings from its run."""


def _tuned(run: Config, start_from: str, peak_lr: float) -> Config:
    """Return the settings that all fine-tuning recipes share: facts about the model of ``run`` (``config/inherit.py``), and a
    cosine schedule that begins at ``peak_lr``, without warm-up."""
    optim = {"peak_lr": peak_lr, "warmup": 0, "schedule": "cosine", "weight_decay": 0.0}
    changes = {"train.start_from": start_from, "train.start_with": "weights", "train.sample_tokens": 0}
    changes |= {f"optim.{name}": value for name, value in optim.items()}
    return inherited(run).override({**changes, "shards.packing": "best_fit", "shards.mask_across_documents": True})


def _trained_on(run: Config, start_from: str) -> Config:
    """Return the settings that ``distill`` and ``continued`` share: rows as in ``run``, and a learning rate that warms up
    again."""
    tuned = _tuned(run, start_from, peak_lr=run.optim.peak_lr / 3)
    same = {f"shards.{name}": getattr(run.shards, name) for name in _ROWS}
    optim = {
        "optim.warmup": run.optim.warmup,
        "optim.weight_decay": run.optim.weight_decay,
        "optim.final_lr_ratio": 0.1,
    }
    return tuned.override({**same, **optim})
