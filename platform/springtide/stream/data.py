"""The data of a run: its datasets, and the order of their rows."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from springtide.config.data import DataConfig, FeedConfig, ShardsConfig, StreamConfig
from springtide.config.files import nearest
from springtide.config.steps import OrderStep, StepsDone
from springtide.errors import ConfigError, CorpusError, explain
from springtide.shards import TRAIN, Manifest, SplitReader, load_manifest
from springtide.store import Cache, Folder
from springtide.stream.leaks import check_fractions, leaks
from springtide.stream.mixture import WeightTable
from springtide.stream.order import Order
from springtide.stream.reader import RankReader
from springtide.stream.sample_ids import corpus_and_row, join

_OPENED_AT_ONCE = 16
"""Manifests; a store answers each after some 10 to 100 ms."""
_FEW_EPOCHS = 4
"""Until then repeated text is nearly as good as new (Muennighoff et al., "Scaling data-constrained language models", 2023)."""


class Drawn(NamedTuple):
    """What some steps train on of one corpus."""

    rows: int
    """Repeated rows count each time."""
    epochs: float
    """How many times the whole corpus is trained on, with fractions: above 1, rows repeat."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The corpora of a run, in the order of their numbers, and the order of their rows. Pickled as its config, so that a
    process opens the same data once."""

    config: DataConfig
    manifests: tuple[Manifest, ...]
    order: Order
    eval_manifests: tuple[Manifest, ...] = ()
    """Manifests of the datasets that are evaluated on only."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_corpora(self.config))

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Names of the held-out sets: those of the corpora, then those of ``stream.eval_datasets``."""
        return (*self.names, *self.config.stream.eval_datasets)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Warnings about text that may be held out by one dataset and trained on in another."""
        corpora = dict(zip(self.names, self.manifests, strict=True))
        return tuple(leaks(corpora, dict(zip(self.config.stream.eval_datasets, self.eval_manifests, strict=True))))

    @property
    def datasets(self) -> tuple[str, ...]:
        """URL of each corpus's dataset."""
        return tuple(_corpora(self.config).values())

    @property
    def vocab_size(self) -> int:
        return self.manifests[0].vocab_size

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer that all corpora share."""
        return self.manifests[0].tokenizer_digest

    @property
    def token_type(self) -> str:
        """Type of the tokens in memory; their top bit is the loss mask."""
        return self.manifests[0].memory_type

    @property
    def sequence_length(self) -> int:
        """Tokens that one row trains on."""
        return self.manifests[0].sequence_length

    @property
    def eos_id(self) -> int | None:
        """End-of-document id if documents of a row are masked from each other, else None."""
        return self.manifests[0].eos_id

    @property
    def bos_id(self) -> int | None:
        """Begin-of-text id if documents of a row are masked from each other, else None."""
        return self.manifests[0].bos_id

    @property
    def has_loss_mask(self) -> bool:
        """Whether some tokens of some rows are not predicted."""
        return any(manifest.has_loss_mask for manifest in self.manifests)

    def reader(self, rank: int, world_size: int) -> RankReader:
        """Return the reader that fetches the rows of ``rank``."""
        return RankReader(self, rank, world_size)

    def skipping(self, steps: Iterable[OrderStep]) -> Data:
        """Return the same data with these steps of the order skipped, too."""
        skip = tuple(sorted({*self.order.skip, *steps}))
        stream = StreamConfig.model_validate({**self.config.stream.model_dump(), "skip": skip})
        config = dataclasses.replace(self.config, stream=stream)
        return dataclasses.replace(self, config=config, order=dataclasses.replace(self.order, skip=skip))

    def splits(self, split: str) -> list[SplitReader]:
        """Return one reader per corpus for ``split``, and of held-out text also one per dataset that is evaluated on only;
        readers keep their files open."""
        return self._readers(split)

    def rows(self, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored sample ids, uint64 (n,), and the tokens, (n, sequence_length + 1), of these training rows."""
        corpora, rows = corpus_and_row(sample_ids)
        ids = np.empty(len(rows), dtype=np.uint64)
        tokens = np.empty((len(rows), self.sequence_length + 1), self.token_type)
        for corpus in np.unique(corpora).tolist():
            here = corpora == corpus
            found = self.splits(TRAIN)[corpus].read(rows[here])
            if here.all():
                return join(corpus, found.sample_ids), found.tokens
            ids[here], tokens[here] = join(corpus, found.sample_ids), found.tokens
        return ids, tokens

    @functools.cached_property
    def _readers(self) -> Callable[[str], list[SplitReader]]:
        feed = self.config.feed
        cache = Cache(feed.cache or default_cache(), int(feed.cache_bytes)) if feed.cache_bytes else None
        urls = (*self.datasets, *self.config.stream.eval_datasets.values())
        pairs = list(zip(urls, (*self.manifests, *self.eval_manifests), strict=True))
        return functools.cache(
            lambda split: [
                SplitReader(Folder(url), manifest, split, cache) for url, manifest in pairs if split in manifest.splits
            ]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        sections = self.config.stream, self.config.shards, self.config.feed
        return _open_once, tuple(section.model_dump_json() for section in sections)

    def shares(self, done: StepsDone) -> dict[str, float]:
        """Return the share of each corpus in the last of the first ``done`` steps; of the first step before it is done."""
        step = self.order.step_before(done) if done else OrderStep(0)
        weights = next(weights for start, weights in reversed(self.order.schedule) if start <= step)
        return {name: weight / sum(weights) for name, weight in zip(self.names, weights, strict=True) if weight}

    def drawn(self, done: StepsDone) -> dict[str, Drawn]:
        """Return what the first ``done`` steps train on of each corpus: exact, before a run starts or after it has ended."""
        rows, epochs = self.order.drawn(done).tolist(), self.order.epochs(done).tolist()
        return {name: Drawn(*found) for name, *found in zip(self.names, rows, epochs, strict=True)}

    def repeats(self, done: StepsDone) -> list[str]:
        """Return what to tell before a run of ``done`` steps about the corpora that it reads more than once."""
        found = []
        for name, (_, epochs) in self.drawn(done).items():
            if epochs > 1:
                many = f"; beyond {_FEW_EPOCHS} times, text adds less and less" if epochs > _FEW_EPOCHS else ""
                found.append(f"this run reads {name} {epochs:.1f} times{many}")
        return found


def open_data(config: DataConfig) -> Data:
    """Open the datasets that ``config`` names and check that they fit together.

    Raises ConfigError if they do not, CorpusError if one is missing or has no rows to train on.
    """
    corpora = _corpora(config)
    only = config.stream.eval_datasets
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as threads:
        opened = list(threads.map(lambda url: load_manifest(Folder(url)), (*corpora.values(), *only.values())))
    manifests, eval_manifests = tuple(opened[: len(corpora)]), tuple(opened[len(corpora) :])
    for name, manifest in zip(corpora, manifests, strict=True):
        _check_trained(config, name, corpora[name], manifest)
        _check(config, f"stream.mixture.{name}", corpora[name], manifest, manifests[0])
    for name, manifest in zip(only, eval_manifests, strict=True):
        if name in corpora:
            limit, remedy = "is the name of a corpus, too", "give it another name"
            raise ConfigError(explain("stream.eval_datasets", name, limit, remedy))
        _check(config, f"stream.eval_datasets.{name}", only[name], manifest, manifests[0])
    check_fractions(dict(zip(corpora, manifests, strict=True)), corpora)
    rows = [manifest.splits[TRAIN].rows for manifest in manifests]
    order = Order(
        manifests=tuple(manifest.digest for manifest in manifests),
        group_rows=tuple(tuple(manifest.splits[TRAIN].group_rows()) for manifest in manifests),
        seed=config.stream.seed,
        global_batch=config.stream.global_batch,
        lanes=config.stream.num_lanes,
        window=config.window,
        schedule=_schedule(config, dict(zip(corpora, rows, strict=True))),
        ramp=config.ramp.pieces,
        skip=tuple(map(OrderStep, config.stream.skip)),
        skip_samples=tuple((entry.from_step, entry.samples) for entry in config.stream.skip_samples),
    )
    return Data(config, manifests, order, eval_manifests)


@functools.lru_cache(maxsize=4)
def _open_once(stream: str, shards: str, feed: str) -> Data:
    return open_data(
        DataConfig(
            StreamConfig.model_validate_json(stream),
            ShardsConfig.model_validate_json(shards),
            FeedConfig.model_validate_json(feed),
        )
    )


def _corpora(config: DataConfig) -> dict[str, str]:
    return config.stream.mixture or {"corpus": config.shards.dataset}


def default_cache() -> str:
    """Return the folder in which this node's cache creates its own folder."""
    return tempfile.gettempdir()


def _check_trained(config: DataConfig, name: str, url: str, manifest: Manifest) -> None:
    """Raise ConfigError if a dataset cannot be trained on in this mixture."""
    field = f"stream.mixture.{name}" if config.stream.mixture else "shards.dataset"
    if manifest.is_eval_only:
        limit = "holds held-out text only (shards.heldout_fraction = 1)"
        raise ConfigError(explain(field, url, limit, f"evaluate on it: stream.eval_datasets.{name}"))
    if not manifest.splits[TRAIN].rows:
        raise CorpusError(explain(field, url, "has no row to train on", "use shorter sequences or more text"))


def _check(config: DataConfig, field: str, url: str, manifest: Manifest, first: Manifest) -> None:
    if manifest.sequence_length != config.shards.sequence_length:
        raise ConfigError(
            explain(
                "shards.sequence_length",
                config.shards.sequence_length,
                f"the dataset {url} is packed to {manifest.sequence_length}",
                "use that length, or prepare another dataset",
            )
        )
    if manifest.eos_id != first.eos_id:
        raise ConfigError(
            explain(
                field,
                url,
                "masks across documents where the first corpus does not, or vice versa",
                "prepare both with the same shards.mask_across_documents",
            )
        )
    if (manifest.tokenizer_digest, manifest.token_type) != (first.tokenizer_digest, first.token_type):
        raise ConfigError(
            explain(
                field,
                url,
                "has another tokenizer or token type than the first corpus",
                "prepare it with corpus.tokenizer = <the first dataset>/tokenizer.json and the same shards.token_type",
            )
        )
    if (manifest.begin_of_text, manifest.end_of_text) != (first.begin_of_text, first.end_of_text):
        raise ConfigError(
            explain(
                field,
                url,
                f"begins and ends texts with ids {manifest.begin_of_text} and {manifest.end_of_text}, the first corpus with "
                f"{first.begin_of_text} and {first.end_of_text}",
                "prepare both with the same corpus.begin_of_text and corpus.end_of_text",
            )
        )


def _schedule(config: DataConfig, rows: dict[str, int]) -> WeightTable:
    stream = config.stream
    if not stream.weights:
        return ((0, tuple(float(count) for count in rows.values())),)
    pieces: dict[int, tuple[float, ...]] = {}
    for entry in stream.weights:
        for name in entry.shares:
            if name not in rows:
                raise ConfigError(
                    explain("stream.weights", name, "is not a corpus of stream.mixture", nearest(name, rows))
                )
        start = max(entry.from_step, config.steps_to(int(entry.from_tokens)))
        shares = tuple(entry.shares.get(name, 0.0) for name in rows)
        if sum(shares) <= 0:
            raise ConfigError(explain("stream.weights", entry.shares, "are all zero", "give one corpus a weight"))
        if start in pieces:
            raise ConfigError(explain("stream.weights", start, "two tables begin at this step", "remove one"))
        pieces[start] = shares
    if 0 not in pieces:
        raise ConfigError(
            explain("stream.weights", min(pieces), "is the first step with weights", "give a table from step 0")
        )
    return tuple(sorted(pieces.items()))
