"""Recipes for runs that go on from a model: the settings of its run, and what a kind of fine-tuning changes.

Examples:
    >>> run = st.open_run("runs/mine")
    >>> tuned = st.recipes.lora(run.config, "runs/mine").override({"corpus.source": "chats.jsonl"})
    >>> tuned.model.adapter, tuned.model.dim == run.config.model.dim, tuned.train.start_from
    ('lora', True, 'runs/mine')
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springtide.config.data import CorpusConfig, ShardsConfig, StreamConfig
from springtide.config.engine import OptimConfig
from springtide.config.quantities import Tokens
from springtide.config.schema import Config, RunConfig, TrainConfig

_MADE_HERE = ("bpe", "bytes")
"""Tokenizers that are written into the dataset."""
_TOKENIZER = "tokenizer.json"


def sft(run: Config, start_from: str) -> Config:
    """Return settings that train all weights of a model on chats or instructions, answers only.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: that run's folder, or one of its checkpoints.

    Returns:
        The run's model, tokenizer, layout and workers, with a low learning rate (Touvron et al., "Llama 2", 2023, section 3.1:
        2e-5). ``corpus.source`` is yours to name, and ``corpus.chat_template`` where the run has none: ``model`` for that of an
        imported model, which the command line takes by itself.

    Examples:
        >>> found = st.recipes.sft(st.open_run("runs/mine").config, "runs/mine")
        >>> found.train.start_with, found.shards.packing, found.optim.peak_lr
        ('weights', 'best_fit', 2e-05)
    """
    return _tuned(run, start_from, peak_lr=2e-5)


def lora(run: Config, start_from: str) -> Config:
    """Return settings that train a LoRA adapter on every matrix of a model's blocks; the model stays as it is.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: that run's folder, or one of its checkpoints.

    Returns:
        As ``sft``, with rank 16 and ten times the learning rate, which a low rank needs (Schulman et al., "LoRA Without
        Regret", 2025). A model that has an adapter keeps it, and trains it on.

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
    """Return settings that train new blocks between those of a model, which stay as they are (Wu et al., "LLaMA Pro", 2024).

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: that run's folder, or one of its checkpoints.

    Returns:
        As ``sft``, with a new block after every four (``train.new_blocks``), all else frozen (``optim.groups``), and ten times
        the learning rate. ``new_blocks_of`` gives the numbers of other counts.

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
    """Return the numbers of ``count`` new blocks that stand evenly among the ``layers`` blocks of a model, the last at its end.

    Examples:
        >>> new_blocks_of(32, 8)
        (4, 9, 14, 19, 24, 29, 34, 39)
    """
    return tuple(-(-number * layers // count) + number - 1 for number in range(1, count + 1))


FINE_TUNING: dict[str, Callable[[Config, str], Config]] = {"sft": sft, "lora": lora, "grow": grow}
"""Name -> recipe that takes the settings of the run that it goes on from."""


def _tuned(run: Config, start_from: str, peak_lr: float) -> Config:
    """Return the settings that fine-tuning shares."""
    shards = {name: getattr(run.shards, name) for name in ("root", "sequence_length", "token_type")}
    return Config(
        run=RunConfig(root=run.run.root),
        corpus=_corpus(run),
        model=run.model,
        shards=ShardsConfig(**shards, packing="best_fit", mask_across_documents=True),
        stream=StreamConfig(global_batch=run.stream.global_batch),
        parallel=run.parallel,
        optim=OptimConfig(peak_lr=peak_lr, warmup=Tokens(0), schedule="cosine", weight_decay=0.0),
        train=TrainConfig(
            start_from=start_from,
            start_with="weights",
            micro_batch=run.train.micro_batch,
            eval_tokens=run.train.eval_tokens,
            sample_tokens=0,
        ),
        checkpoint=run.checkpoint,
        elastic=run.elastic,
        track=run.track,
    )


def _corpus(run: Config) -> CorpusConfig:
    """Return a corpus that has to be named, with the tokenizer of ``run`` and its ends of texts."""
    same: dict[str, Any] = {
        name: getattr(run.corpus, name) for name in ("end_of_text", "begin_of_text", "chat_template")
    }
    tokenizer = run.corpus.tokenizer
    if tokenizer in _MADE_HERE:
        dataset = run.shards.dataset or next(iter(run.stream.mixture.values()), "")
        tokenizer = f"{dataset.rstrip('/')}/{_TOKENIZER}" if dataset else tokenizer
    return CorpusConfig(source="", tokenizer=tokenizer, **same)
