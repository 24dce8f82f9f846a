"""Recipes for runs that go on from a model: the settings of its run, and what a kind of fine-tuning changes.

Examples:
    >>> run = st.open_run("runs/mine")
    >>> tuned = st.recipes.lora(run.config, "runs/mine").override({"corpus.source": "chats.jsonl"})
    >>> tuned.model.adapter, tuned.model.dim == run.config.model.dim, tuned.train.start_from
    ('lora', True, 'runs/mine')
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from springtide.config.inherit import inherited, is_named
from springtide.config.schema import Config
from springtide.errors import ConfigError, explain

_ROWS = ("packing", "mask_across_documents", "rows_per_group", "groups_per_shard", "heldout_fraction")


def sft(run: Config, start_from: str) -> Config:
    """Return settings that train all weights of a model on chats or instructions, answers only.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: that run's folder, or one of its checkpoints.

    Returns:
        The run's model, tokenizer, length of rows and precision (``inherit.INHERITED``), with a low learning rate (Touvron et
        al., "Llama 2", 2023, section 3.1: 2e-5). ``corpus.source`` is yours to name, and ``corpus.chat_template`` where the run
        has none: ``model`` for that of an imported model, which the command line takes by itself.

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


def dpo(run: Config, start_from: str) -> Config:
    """Return settings that train a model to prefer the chosen answers of pairs, with the model itself as the reference.

    Args:
        run: settings of the model's run, as ``import_model`` or training wrote them.
        start_from: that run's folder, or one of its checkpoints.

    Returns:
        As ``sft``, with direct preference optimization at a learning rate of 1e-6 (Rafailov et al., 2023, appendix B).
        ``objective.labels``, what the reference says of the dataset, are yours to name too; with ``objective.source`` orpo
        none are needed.

    Examples:
        >>> found = st.recipes.dpo(st.open_run("runs/mine").config, "runs/mine")
        >>> found.objective.source, found.optim.peak_lr
        ('dpo', 1e-06)
    """
    return _tuned(run, start_from, peak_lr=1e-6).override({"objective.source": "dpo"})


def distill(run: Config, start_from: str) -> Config:
    """Return settings that train a model, the student, on what a teacher says comes next.

    Args:
        run: settings of the student's run, as ``import_model`` or training wrote them.
        start_from: that run's folder, or one of its checkpoints.

    Returns:
        The run's model, tokenizer, rows and precision, with a third of its learning rate. The text is yours to name
        (``corpus.source`` or ``shards.dataset``), and the teacher: ``objective.teacher``, or its ``objective.labels``.

    Examples:
        >>> found = st.recipes.distill(st.open_run("runs/mine").config, "runs/mine")
        >>> found.objective.source, found.train.start_with, found.shards.packing
        ('distill', 'weights', 'concat')
    """
    return _trained_on(run, start_from).override({"objective.source": "distill"})


def continued(run: Config, start_from: str, named: Sequence[str] = ()) -> Config:
    """Return settings that train a model on with new text, a quarter of each batch being replay of the text that it knows; on
    the command line, ``continue``.

    Args:
        run: settings of the model's run, which names its dataset.
        start_from: that run's folder, or one of its checkpoints.
        named: more URLs that the user has typed. ``run`` may come from a stranger, so its datasets must be local or on a
            host of these or of ``start_from``.

    Returns:
        The run's model, tokenizer, rows and precision. A third of its learning rate is reached anew, and falls to a tenth
        of that (Ibrahim et al., "Simple and scalable strategies to continually pre-train large language models", 2024).
        ``corpus.source``, the new text, is yours to name; it is prepared as ``new`` beside ``old``.

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
"""Name -> recipe that takes the settings of the run that it goes on from."""


def _tuned(run: Config, start_from: str, peak_lr: float) -> Config:
    """Return the settings that fine-tuning shares: facts about the model of ``run`` (``inherit``), and a schedule."""
    optim = {"peak_lr": peak_lr, "warmup": 0, "schedule": "cosine", "weight_decay": 0.0}
    changes = {"train.start_from": start_from, "train.start_with": "weights", "train.sample_tokens": 0}
    changes |= {f"optim.{name}": value for name, value in optim.items()}
    return inherited(run).override({**changes, "shards.packing": "best_fit", "shards.mask_across_documents": True})


def _trained_on(run: Config, start_from: str) -> Config:
    """Return the settings that training on with texts shares: rows as those of ``run``, and a rate that rises again."""
    tuned = _tuned(run, start_from, peak_lr=run.optim.peak_lr / 3)
    same = {f"shards.{name}": getattr(run.shards, name) for name in _ROWS}
    optim = {
        "optim.warmup": run.optim.warmup,
        "optim.weight_decay": run.optim.weight_decay,
        "optim.final_lr_ratio": 0.1,
    }
    return tuned.override({**same, **optim})
