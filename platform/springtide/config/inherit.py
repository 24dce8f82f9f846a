"""Settings that a new run takes from the run whose model it starts from.

The run of the model may come from a stranger. So a new run takes only facts about the model, never a place to write to, a host
to call, a kind of machine or an environment variable.
"""

from __future__ import annotations

import json
import shlex
from urllib.parse import urlsplit

from springtide.config.data import CorpusConfig, ShardsConfig, StreamConfig
from springtide.config.elastic import ElasticConfig
from springtide.config.engine import ParallelConfig
from springtide.config.fields import fields
from springtide.config.schema import Config, TrainConfig
from springtide.errors import redacted

INHERITED = {
    "model.*": "the architecture",
    "corpus.tokenizer": "the tokenizer; one that was trained lies in the run's dataset, and is read from there",
    "corpus.end_of_text": "the token that ends a text",
    "corpus.begin_of_text": "the token that begins a text",
    "corpus.chat_template": "the chat template",
    "shards.sequence_length": "the length of a row",
    "shards.token_type": "the width of a stored id",
    "stream.global_batch": "rows of a step",
    "parallel.precision": "the precision of products",
    "parallel.reduction": "the precision of sums",
    "train.micro_batch": "rows computed at once",
    "train.eval_tokens": "held-out tokens to evaluate on",
    "shards.packing": "how documents fill rows (`distill`, `continue`)",
    "shards.mask_across_documents": "attention across documents (`distill`, `continue`)",
    "shards.rows_per_group": "rows of a row group (`distill`, `continue`)",
    "shards.groups_per_shard": "row groups of a file (`distill`, `continue`)",
    "shards.heldout_fraction": "share of held-out documents (`distill`, `continue`)",
    "optim.peak_lr": "the learning rate, of which a third is used (`distill`, `continue`)",
    "optim.warmup": "the length of the warm-up (`distill`, `continue`)",
    "optim.weight_decay": "the weight decay (`distill`, `continue`)",
    "stream.mixture": "datasets to replay (`continue`): local, or on a host that you typed",
    "shards.dataset": "the same of a run with one dataset; its tokenizer",
}
"""Setting -> its meaning, for each setting that a recipe takes from the model's run. SECURITY.md has the same table."""
_USED_TO_BE = ("run.root", "shards.root", "parallel.", "checkpoint.", "elastic.", "track.")
"""Prefixes of the settings that fine-tuning took from the model's run up to commit 9c427aee."""
_MADE_HERE = ("bpe", "bytes")
"""Tokenizers that springtide makes and writes into the dataset."""
_TOKENIZER = "tokenizer.json"


def inherited(run: Config) -> Config:
    """Return a config with the settings of the model's run that every fine-tuning recipe takes. All other settings have their
    defaults."""
    tokenizer = run.corpus.tokenizer
    if tokenizer in _MADE_HERE:
        dataset = run.shards.dataset or next(iter(run.stream.mixture.values()), "")
        tokenizer = f"{dataset.rstrip('/')}/{_TOKENIZER}" if dataset else tokenizer
    ends = {name: getattr(run.corpus, name) for name in ("end_of_text", "begin_of_text", "chat_template")}
    lanes = min(ElasticConfig().max_workers, run.stream.global_batch)
    return Config(
        elastic=ElasticConfig(max_workers=lanes),  # each worker needs at least one row per step
        corpus=CorpusConfig(source="", tokenizer=tokenizer, **ends),
        model=run.model,
        shards=ShardsConfig(sequence_length=run.shards.sequence_length, token_type=run.shards.token_type),
        stream=StreamConfig(global_batch=run.stream.global_batch),
        parallel=ParallelConfig(precision=run.parallel.precision, reduction=run.parallel.reduction),
        train=TrainConfig(micro_batch=run.train.micro_batch, eval_tokens=run.train.eval_tokens),
    )


def left_behind(run: Config, config: Config) -> dict[str, str]:
    """Return settings of ``run`` that a new run from its model does not take over. Versions up to commit 9c427aee did take them
    over, so the user is told how to repeat them. ``config``: the config of the new run.

    Returns:
        Setting -> a line that names its value and the flag that repeats it. Settings with equal values are skipped.
    """
    before, after = run.model_dump(mode="json"), config.model_dump(mode="json")
    found = {}
    for name in fields():
        section, field = name.split(".")
        value = before[section][field]
        if not name.startswith(_USED_TO_BE) or name in INHERITED or value == after[section][field]:
            continue
        flag = f"--{name} {shlex.quote(redacted(_spelled(value)))}"
        runs_code = name == "track.listener" or (name == "elastic.env" and run.elastic.unlisted_env)
        warning = " (it may run code: only if you trust its author)" if runs_code else ""
        found[name] = f"{name} is not taken from the model's run; to repeat its value{warning}: {flag}"
    return found


def is_named(url: str, by: str) -> bool:
    """Return True if ``url`` is a local path, or on the same host as ``by``, a URL that the user typed. In an object store, it
    must be in the same bucket as ``by``.

    Examples:
        >>> is_named("s3://mine/data", "s3://mine/runs/a"), is_named("s3://other/data", "s3://mine/runs/a")
        (True, False)
        >>> is_named("/data", "runs/a"), is_named("https://evil.example/data", "runs/a")
        (True, False)
    """
    place, known = urlsplit(url), urlsplit(by)
    is_local = "::" not in url and place.scheme in ("", "file") and not place.netloc
    return is_local or ("::" not in url and (place.scheme, place.netloc) == (known.scheme, known.netloc))


def _spelled(value: object) -> str:
    """Return a value as the command line accepts it: lists and tables as JSON, which is valid YAML."""
    is_plain = isinstance(value, str) and value.isprintable()  # a line break could forge a line of our output
    return str(value) if is_plain else json.dumps(value, allow_nan=False)
