"""The data of a run: its corpora and the order of their rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from springtide.config.data import DataConfig, FeedConfig, Ramp, ShardsConfig, StreamConfig
from springtide.config.files import nearest
from springtide.config.steps import OrderStep, StepsDone
from springtide.errors import ConfigError, CorruptShard, explain
from springtide.shards import HELDOUT, TRAIN, Columns, LabelReader, Labels, Manifest, SplitReader
from springtide.storage import Cache, Folder
from springtide.stream.chain import corpus_and_row, join
from springtide.stream.corpora import Corpus, by_dataset, leaks, open_corpora, open_labels
from springtide.stream.mixture import MixtureSchedule, WeightTable
from springtide.stream.order import Order

_FEW_EPOCHS = 4
"""Up to this many epochs, repeated text is nearly as good as new text (Muennighoff et al., "Scaling data-constrained language
models", 2023)."""


class Drawn(NamedTuple):
    """Amount of one corpus that a number of steps trains on."""

    rows: int
    """Number of rows; a repeated row counts each time."""
    epochs: float
    """How many times the whole corpus is trained on, with fractions: above 1, rows repeat."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The corpora of a run and the order of their rows. A corpus's number is its index in ``corpora``. Only the config is
    pickled: a process that unpickles an equal config again reuses the data that it has already opened."""

    config: DataConfig
    corpora: tuple[Corpus, ...]
    order: Order
    eval_corpora: tuple[Corpus, ...] = ()
    """Corpora that are evaluated on and not trained on."""
    labels: Labels | None = None
    """Manifest of a model's labels for the training rows (``shards/labels.py``); None without labels."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(corpus.name for corpus in self.corpora)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """For each corpus, the manifest of its dataset, reduced to the corpus's own rows."""
        return tuple(corpus.manifest for corpus in self.corpora)

    @functools.cached_property
    def heldout(self) -> tuple[Corpus, ...]:
        """Corpora with held-out rows: first those that are trained on, then those that are only evaluated on."""
        return tuple(one for one in (*self.corpora, *self.eval_corpora) if one.holds_out)

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Names of the held-out sets."""
        return tuple(corpus.name for corpus in self.heldout)

    @property
    def leaks(self) -> tuple[str, ...]:
        """Warnings about text that may be held out by one dataset and trained on in another."""
        return tuple(leaks(by_dataset(self.corpora), by_dataset(self.eval_corpora)))

    @property
    def datasets(self) -> dict[str, str]:
        """Datasets that are trained on: URL -> digest of the manifest."""
        return {corpus.url: corpus.identity.partition("/")[0] for corpus in self.corpora}

    @property
    def vocab_size(self) -> int:
        return self.corpora[0].whole.vocab_size

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer that all corpora share."""
        return self.corpora[0].whole.tokenizer_digest

    @property
    def token_type(self) -> str:
        """Type of the tokens in memory, such as uint16. The top bit of a token is its loss mask: if set, the token is not
        predicted."""
        return self.corpora[0].whole.memory_type

    @property
    def sequence_length(self) -> int:
        """Number of tokens that one row trains on: L, of L + 1 ids in the row."""
        return self.corpora[0].whole.sequence_length

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document. None if attention may cross the documents of a row, so that models need not find them."""
        return self.corpora[0].whole.eos_id

    @property
    def bos_id(self) -> int | None:
        """Id that begins a document, if there is one. None if attention may cross the documents of a row."""
        return self.corpora[0].whole.bos_id

    @property
    def document_ids(self) -> tuple[int | None, int | None, bool]:
        """(eos_id, bos_id, whether all documents are whole), from which models find the documents of a row. Documents of chats
        are whole: no document is cut at the end of a row. A mixture of chats and texts counts as cut: an end-of-document id
        then ends a document even inside a chat."""
        return self.eos_id, self.bos_id, all(corpus.whole.whole_documents for corpus in self.corpora)

    @property
    def has_loss_mask(self) -> bool:
        """True if some tokens of the rows are not predicted."""
        return any(corpus.whole.has_loss_mask for corpus in self.corpora)

    def skipping(self, steps: Iterable[OrderStep]) -> Data:
        """Return this data with an order of rows that also skips the given steps."""
        skip = tuple(sorted({*self.order.skip, *steps}))
        stream = StreamConfig.model_validate({**self.config.stream.model_dump(), "skip": skip})
        config = dataclasses.replace(self.config, stream=stream)
        return dataclasses.replace(self, config=config, order=dataclasses.replace(self.order, skip=skip))

    def splits(self, split: str) -> list[SplitReader]:
        """Return open readers: one per corpus if ``split`` is ``TRAIN``, one per held-out set if it is ``HELDOUT``. Readers
        keep their files open."""
        return self._readers(split)

    def rows(self, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the training rows with these sample ids: the ids as stored, uint64 (n,), and the tokens, (n, sequence_length +
        1)."""
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

    def columns(self, sample_ids: np.ndarray) -> Columns:
        """Return a model's labels for the training rows with these sample ids: name of a column -> array. Empty if the run uses
        no labels. Raises CorruptShard if the stored labels belong to other rows."""
        if self.labels is None:
            return {}
        corpora, rows = corpus_and_row(sample_ids)
        shapes = self.labels.layout.columns(len(rows))
        found = {name: np.empty(shape, kind) for name, (kind, shape) in shapes.items()}
        for corpus in np.unique(corpora).tolist():
            here = corpora == corpus
            stored, columns = self._label_readers[corpus].read(rows[here])
            if (stored != rows[here]).any():
                raise CorruptShard(
                    f"{self.config.labels}: the labels belong to other rows than those of the dataset; write them again"
                )
            if here.all():
                return columns
            for name, column in columns.items():
                found[name][here] = column
        return found

    @functools.cached_property
    def _cache(self) -> Cache | None:
        return _cache_of(self.config.feed)

    @functools.cached_property
    def _label_readers(self) -> list[LabelReader]:
        assert self.labels is not None
        folder = Folder(self.config.labels)
        return [LabelReader(folder, self.labels, one.manifest.splits[TRAIN], self._cache) for one in self.corpora]

    @functools.cached_property
    def _readers(self) -> Callable[[str], list[SplitReader]]:
        corpora = {TRAIN: self.corpora, HELDOUT: self.heldout}
        return functools.cache(
            lambda split: [SplitReader(Folder(one.url), one.manifest, split, self._cache) for one in corpora[split]]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        sections = self.config.stream, self.config.shards, self.config.feed
        return _open_once, (*(section.model_dump_json() for section in sections), self.config.total, self.config.labels)

    def shares(self, done: StepsDone) -> dict[str, float]:
        """Return the shares of the corpora in the last of the ``done`` steps trained so far: name of a corpus -> share, with
        sum 1. If ``done`` is 0, return the shares of the first step."""
        step = self.order.step_before(done) if done else OrderStep(0)
        weights = next(weights for start, weights in reversed(self.order.schedule) if start <= step)
        return {name: weight / sum(weights) for name, weight in zip(self.names, weights, strict=True) if weight}

    def heldout_shares(self, done: StepsDone) -> dict[str, float]:
        """Return the shares of the corpora that have held-out rows, scaled to sum 1. If none of these corpora has a share in
        the mixture, their shares are equal. If every corpus of the mixture has held-out rows, return ``shares`` unchanged."""
        shares, names = self.shares(done), [corpus.name for corpus in self.corpora if corpus.holds_out]
        if all(name in names for name in shares):
            return shares
        there = {name: shares[name] for name in names if name in shares} or dict.fromkeys(names, 1.0)
        return {name: share / math.fsum(there.values()) for name, share in there.items()}

    def drawn(self, done: StepsDone) -> dict[str, Drawn]:
        """Return how much of each corpus the first ``done`` steps train on. The numbers are exact, and can be computed before
        the run starts."""
        rows, epochs = self.order.drawn(done).tolist(), self.order.epochs(done).tolist()
        return {name: Drawn(*found) for name, *found in zip(self.names, rows, epochs, strict=True)}

    def repeats(self, done: StepsDone) -> list[str]:
        """Return a remark for each corpus that a run of ``done`` steps reads more than once."""
        found = []
        for name, (_, epochs) in self.drawn(done).items():
            if epochs > 1:
                many = f"; beyond {_FEW_EPOCHS} times, text adds less and less" if epochs > _FEW_EPOCHS else ""
                found.append(f"this run reads {name} {epochs:.1f} times{many}")
        return found

    def check_epochs(self, done: StepsDone) -> None:
        """Raise ConfigError if a run of ``done`` steps reads a corpus more than ``stream.max_epochs`` times."""
        limit = self.config.stream.max_epochs
        over = {name: epochs for name, (_, epochs) in self.drawn(done).items() if epochs > limit}
        if over:
            most = math.ceil(max(over.values()) * 10) / 10
            each = ", ".join(f"{name} {epochs:.1f} times" for name, epochs in over.items())
            mixes = len(self.corpora) > 1
            others = "lower its weight (stream.weights), cap it (stream.epoch_caps), " if mixes else ""
            remedy = f"give it more text, {others}lower train.total, or set stream.max_epochs to {most:g}"
            raise ConfigError(explain("stream.max_epochs", limit, f"this run reads {each}", remedy))


def open_data(config: DataConfig) -> Data:
    """Open the datasets that ``config`` names and check that they fit together.

    Raises ConfigError if they do not, CorpusError if one is missing or has no rows to train on.
    """
    corpora, eval_corpora = open_corpora(config, _cache_of(config.feed))
    labels = open_labels(config.labels, corpora) if config.labels else None
    of = f" labels {labels.digest}" if labels else ""  # the same rows with other labels make a different run
    order = Order(
        manifests=tuple(f"{corpus.identity}{of}" for corpus in corpora),
        group_rows=tuple(corpus.manifest.splits[TRAIN].group_rows() for corpus in corpora),
        seed=config.stream.seed,
        global_batch=config.stream.global_batch,
        lanes=config.stream.num_lanes,
        window=config.window,
        schedule=_capped(config, corpora, _schedule(config, corpora)),
        ramp=config.ramp.pieces,
        skip=tuple(map(OrderStep, config.stream.skip)),
        skip_samples=tuple((entry.from_step, entry.samples) for entry in config.stream.skip_samples),
    )
    return Data(config, corpora, order, eval_corpora, labels)


@functools.lru_cache(maxsize=4)
def _open_once(stream: str, shards: str, feed: str, total: int, labels: str) -> Data:
    return open_data(
        DataConfig(
            StreamConfig.model_validate_json(stream),
            ShardsConfig.model_validate_json(shards),
            FeedConfig.model_validate_json(feed),
            total,
            labels,
        )
    )


def _cache_of(feed: FeedConfig) -> Cache | None:
    return Cache(feed.cache or default_cache(), int(feed.cache_bytes)) if feed.cache_bytes else None


def default_cache() -> str:
    """Return the folder in which this node's cache creates its own subfolder."""
    return tempfile.gettempdir()


def _schedule(config: DataConfig, corpora: Sequence[Corpus]) -> WeightTable:
    stream = config.stream
    if not stream.weights:
        return ((0, tuple(float(corpus.rows) for corpus in corpora)),)
    pieces: dict[int, tuple[float, ...]] = {}
    for entry in stream.weights:
        start = max(entry.from_step, config.steps_to(int(entry.from_tokens)))
        shares = _shares(entry.shares, corpora)
        if sum(shares) <= 0:
            raise ConfigError(explain("stream.weights", entry.shares, "are all zero", "set a weight above 0"))
        if start in pieces:
            raise ConfigError(explain("stream.weights", start, "two tables begin at this step", "remove one"))
        pieces[start] = shares
    if 0 not in pieces:
        raise ConfigError(
            explain("stream.weights", min(pieces), "is the first step with weights", "give a table from step 0")
        )
    return tuple(sorted(pieces.items()))


def _capped(config: DataConfig, corpora: Sequence[Corpus], schedule: WeightTable) -> WeightTable:
    """Return the mixture's weights, lowered where needed so that no corpus is read more often than ``stream.epoch_caps``
    allows."""
    limits: dict[int, int] = {}
    for name, cap in config.stream.epoch_caps.items():
        found = [number for number, corpus in enumerate(corpora) if name in (corpus.name, corpus.dataset)]
        if not found:
            known = [name for corpus in corpora for name in (corpus.name, corpus.dataset)]
            raise ConfigError(explain("stream.epoch_caps", name, "is not a corpus of this run", nearest(name, known)))
        for number in found:
            limits[number] = min(limits.get(number, 2**62), int(cap * corpora[number].rows))
    if not limits or not config.total:
        return schedule
    steps = config.steps_to(config.total)
    try:
        return capped(schedule, config.ramp, steps, limits)
    except CapsTooSmall as error:
        wanted, allowed = (rows * config.shards.sequence_length for rows in (error.wanted, error.allowed))
        problem = f"leave {allowed:,} tokens of the {wanted:,} that are drawn from step {error.step} on"
        remedy = "raise them, leave one corpus without, or lower train.total"
        raise ConfigError(explain("stream.epoch_caps", config.stream.epoch_caps, problem, remedy)) from None


def _shares(shares: Mapping[str, float], corpora: Sequence[Corpus]) -> tuple[float, ...]:
    """Return the weight of each corpus. A dataset's weight is divided among its sources in proportion to their rows."""
    found = dict.fromkeys((corpus.name for corpus in corpora), 0.0)
    for name, weight in shares.items():
        if name in found:
            found[name] = weight
            continue
        sources = {corpus.name: corpus.rows for corpus in corpora if corpus.dataset == name}
        if not sources:
            known = [*found, *(corpus.dataset for corpus in corpora)]
            raise ConfigError(explain("stream.weights", name, "is not a corpus of this run", nearest(name, known)))
        if twice := sources.keys() & shares.keys():
            limit = f"is a source of {name}, which has a weight, too"
            raise ConfigError(explain("stream.weights", min(twice), limit, "remove one of these weights"))
        rows = sum(sources.values())
        found |= {source: weight * count / rows for source, count in sources.items()}
    return tuple(found.values())


# Weights under which no corpus is read more often than its cap, the largest number of epochs that the config allows for it.
# They are computed before a run starts.
#
# Rows that a corpus would draw beyond its cap go to the other corpora, in proportion to their weights (water filling, as in
# UniMax, Chung et al., 2023). The weights are lowered for the whole run, so no corpus runs out early. They depend only on the
# length of the run, so the order of rows stays a function of the step.

_MOST_ROUNDS = 100


class CapsTooSmall(ValueError):
    """Every corpus with a weight is capped, and the caps together allow fewer rows than the run draws."""

    def __init__(self, step: int, wanted: int, allowed: int) -> None:
        super().__init__(step, wanted, allowed)
        self.step, self.wanted, self.allowed = step, wanted, allowed


@dataclasses.dataclass(frozen=True)
class _Table:
    """Weights of the corpora from step ``start`` until the next table's start."""

    start: int
    weights: tuple[float, ...]
    rows: int
    """Number of rows, of all corpora together, that are drawn while these weights apply."""

    @property
    def drawn(self) -> list[float]:
        """Number of rows of each corpus that are drawn while these weights apply."""
        total = math.fsum(self.weights)
        return [self.rows * weight / total for weight in self.weights]


def capped(schedule: WeightTable, ramp: Ramp, num_steps: int, limits: Mapping[int, int]) -> WeightTable:
    """Return weights under which ``num_steps`` steps never draw more rows of a corpus than ``limits`` (corpus -> rows).

    Where several tables of weights apply in turn, a corpus's limit is divided among the tables in proportion to the rows that
    each table would draw of the corpus without limits. A table that stays within its part of every limit does not change. A
    run replaces skipped steps by further steps at its end. These may exceed a limit by the rows of the skipped steps.

    Raises:
        CapsTooSmall: all corpora with a weight reach their limits before the run has all its rows.

    Examples:
        >>> ramp = Ramp(((0, 8),))
        >>> capped(((0, (1.0, 1.0, 2.0)),), ramp, 100, {0: 50})
        ((0, (50.0, 250.0, 500.0)),)
    """
    starts = [start for start, _ in schedule]
    bounds = [min(start, num_steps) for start in (*starts, num_steps)]
    rows = [ramp.before(end) - ramp.before(begin) for begin, end in itertools.pairwise(bounds)]
    tables = [_Table(start, weights, many) for (start, weights), many in zip(schedule, rows, strict=True)]
    targets = dict(limits)
    for _ in range(_MOST_ROUNDS):
        found = _with_targets(tables, targets)
        drawn = _drawn(found, ramp, num_steps)
        over = {corpus: drawn[corpus] - limit for corpus, limit in limits.items() if drawn[corpus] > limit}
        if not over:
            return found
        # a corpus exceeds its limit by a few rows at most, because draws are whole rows
        for corpus, rows_over in over.items():
            targets[corpus] = max(0, targets[corpus] - rows_over)
    raise AssertionError(f"found no weights under which each corpus draws at most its limit of rows: {limits}")


def _with_targets(tables: Sequence[_Table], targets: Mapping[int, int]) -> WeightTable:
    without = [math.fsum(one) for one in zip(*(table.drawn for table in tables), strict=True)]
    found = []
    for table in tables:
        limits = {
            corpus: target * table.drawn[corpus] / without[corpus]
            for corpus, target in targets.items()
            if table.rows and table.weights[corpus]
        }
        found.append((table.start, _filled(table, limits)))
    return tuple(found)


def _filled(table: _Table, limits: Mapping[int, float]) -> tuple[float, ...]:
    """Return the number of rows that each corpus gets, used as weights. A corpus whose share exceeds its limit gets the limit;
    the corpora below their limits share the remaining rows by their weights."""
    drawn = table.drawn
    if all(drawn[corpus] <= limit for corpus, limit in limits.items()):
        return table.weights
    # water filling: visit the corpora in the order in which they reach their limits; rows that a full corpus cannot supply are
    # drawn from the remaining corpora
    order = sorted(limits, key=lambda corpus: (limits[corpus] / table.weights[corpus], corpus))
    unlimited = math.fsum(weight for corpus, weight in enumerate(table.weights) if corpus not in limits)
    open_weights = [*itertools.accumulate((table.weights[one] for one in reversed(order)), initial=unlimited)][::-1]
    full, rest = 0, float(table.rows)
    while full < len(order) and limits[order[full]] * open_weights[full] < rest * table.weights[order[full]]:
        rest -= limits[order[full]]
        full += 1
    if open_weights[full] <= 0:
        raise CapsTooSmall(table.start, table.rows, int(math.fsum(limits.values())))
    rows = [rest * weight / open_weights[full] for weight in table.weights]
    for corpus in order[:full]:
        rows[corpus] = limits[corpus]
    return tuple(rows)


def _drawn(schedule: WeightTable, ramp: Ramp, num_steps: int) -> list[int]:
    counts = np.zeros(len(schedule[0][1]), dtype=np.int64)
    for piece, begin, end in ramp.runs(0, num_steps):
        mixture = MixtureSchedule(ramp.pieces[piece][1], schedule)
        counts += mixture.counts(OrderStep(begin), OrderStep(end))
    return [int(count) for count in counts]
