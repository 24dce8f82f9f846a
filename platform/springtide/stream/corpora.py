"""The corpora of a run: each source (named part) of each dataset is a corpus. A corpus has its own weight, epochs and held-out
set."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from springtide.config.data import WHOLE, DataConfig
from springtide.errors import ConfigError, CorpusError, explain
from springtide.shards import HELDOUT, TRAIN, Labels, Manifest, check_labels, load_labels, load_manifest
from springtide.storage import Cache, Folder
from springtide.stream.chain import MOST_CORPORA

_OPENED_AT_ONCE = 16
"""Number of manifests that are opened in parallel, because an object store takes some 10 to 100 ms per request."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus of a run: one source (named part) of a dataset."""

    name: str
    """For a source of ``shards.dataset``: the name of the source. Otherwise: the dataset's name in the config,
    or ``dataset/source`` if the dataset has several sources."""
    dataset: str
    """Name of the corpus's dataset in the config."""
    url: str
    """URL of the dataset."""
    whole: Manifest
    """Manifest of the dataset, with all its sources."""
    source: str
    identity: str
    """Text that identifies the corpus's rows: the digest of the dataset's manifest, plus the source's name if the dataset has
    several sources."""

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The dataset's manifest, reduced to the rows of this source."""
        return self.whole.of(self.source)

    @property
    def rows(self) -> int:
        """Number of rows to train on."""
        return self.whole.sources[self.source][TRAIN].rows

    @property
    def holds_out(self) -> bool:
        """True if the corpus has held-out rows to evaluate on."""
        return HELDOUT in self.whole.sources[self.source]


def open_corpora(config: DataConfig, cache: Cache | None = None) -> tuple[tuple[Corpus, ...], tuple[Corpus, ...]]:
    """Return the corpora that ``config`` trains on, and the corpora that it only evaluates on. A corpus's number is its index
    in the first tuple. ``cache``: this node's cache, for the datasets' row group indexes.

    Raises ConfigError if the corpora do not fit together, CorpusError if a corpus is missing or has no rows to train on.
    """
    datasets, only = config.stream.mixture or {WHOLE: config.shards.dataset}, config.stream.eval_datasets
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as threads:
        opened = list(threads.map(lambda url: load_manifest(Folder(url), cache), (*datasets.values(), *only.values())))
    manifests = dict(zip(datasets, opened, strict=False))
    eval_manifests = dict(zip(only, opened[len(datasets) :], strict=True))
    for name, manifest in manifests.items():
        _check_trained(config, name, datasets[name], manifest)
        _check(config, f"stream.mixture.{name}", datasets[name], manifest, opened[0])
    for name, manifest in eval_manifests.items():
        _check(config, f"stream.eval_datasets.{name}", only[name], manifest, opened[0])
    check_fractions(manifests, datasets)
    corpora = tuple(_sources(datasets, manifests, alone=not config.stream.mixture))
    eval_corpora = tuple(_sources(only, eval_manifests))
    _check_names(corpora, eval_corpora)
    return corpora, eval_corpora


def open_labels(url: str, corpora: tuple[Corpus, ...]) -> Labels:
    """Return the manifest of a model's labels, stored at ``url``, for the dataset of ``corpora``. Raises CorpusError if the
    labels are missing or belong to another dataset."""
    labels = load_labels(Folder(url))
    check_labels(labels, url, corpora[0].whole, corpora[0].url)
    return labels


def by_dataset(corpora: Iterable[Corpus]) -> dict[str, Manifest]:
    """Return a dictionary of the datasets of ``corpora``: name of the dataset -> its manifest."""
    return {corpus.dataset: corpus.whole for corpus in corpora}


def _sources(urls: Mapping[str, str], manifests: Mapping[str, Manifest], alone: bool = False) -> Iterator[Corpus]:
    """Yield each source of each dataset as a corpus. ``alone``: the config names a single dataset and no mixture, so a corpus's
    name does not begin with the dataset's name."""
    for dataset, manifest in manifests.items():
        digest, several = manifest.digest, len(manifest.sources) > 1
        for source in manifest.sources:
            name = source if alone else f"{dataset}/{source}" if several else dataset
            identity = f"{digest}/{source}" if several else digest
            yield Corpus(name, dataset, urls[dataset], manifest, source, identity)


def _check_names(corpora: Iterable[Corpus], eval_corpora: Iterable[Corpus]) -> None:
    names: set[str] = set()
    for field, some in (("stream.mixture", corpora), ("stream.eval_datasets", eval_corpora)):
        for corpus in some:
            if corpus.name in names:
                limit, remedy = "is the name of a corpus, too", "give it another name"
                raise ConfigError(explain(field, corpus.name, limit, remedy))
            names.add(corpus.name)
    if len(names) > MOST_CORPORA:
        remedy = "put several together when you prepare them: files of one source need no name each"
        raise ConfigError(explain("stream.mixture", len(names), f"is more than {MOST_CORPORA} sources", remedy))


def _check_trained(config: DataConfig, name: str, url: str, manifest: Manifest) -> None:
    """Raise ConfigError if a dataset holds only held-out text, CorpusError if it has no rows to train on."""
    field = f"stream.mixture.{name}" if config.stream.mixture else "shards.dataset"
    if manifest.is_eval_only:
        limit = "holds held-out text only (shards.heldout_fraction = 1)"
        raise ConfigError(explain(field, url, limit, f"move it to stream.eval_datasets.{name}"))
    if not all(splits[TRAIN].rows for splits in manifest.sources.values()):
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
                "masks the documents of a row from each other and the first corpus does not, or vice versa",
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
    if manifest.whole_documents != first.whole_documents and (manifest.holds_ends_inside or first.holds_ends_inside):
        problem = "holds chats with the end of a text inside, or is mixed with such chats, and the others are texts"
        remedy = "name another special token as corpus.end_of_text and prepare both again, or mix chats only"
        raise ConfigError(explain(field, url, problem, remedy))
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


# Rules for whether a run may train on text that another of its datasets holds out.
#
# Two datasets are decontaminated against each other if one of them was prepared with the URL of the other in
# ``corpus.apart_from``. Then neither dataset trains on text that the other holds out. Otherwise, near copies of held-out text
# leak into training. Exact copies leak too if the two datasets hold out different fractions, because the hash of a document's
# text decides whether it is held out.

_REMEDY = "prepare the later one with the other's URL in corpus.apart_from"


def check_fractions(corpora: Mapping[str, Manifest], urls: Mapping[str, str]) -> None:
    """Raise ConfigError if exact copies of a text may be held out in one dataset and trained on in another."""
    for held, trained in _not_apart(corpora, corpora):
        here, there = corpora[trained].heldout_fraction, corpora[held].heldout_fraction
        if here != there:
            limit = (
                f"holds out {here:.6g} of its documents and {held} {there:.6g} (shards.heldout_fraction, less if that is more "
                "than shards.heldout_tokens), so copies of a text are held out in one and trained on in the other"
            )
            remedy = f"{_REMEDY}, or both with the smaller fraction"
            raise ConfigError(explain(f"stream.mixture.{trained}", urls[trained], limit, remedy))


def leaks(corpora: Mapping[str, Manifest], eval_only: Mapping[str, Manifest]) -> Iterator[str]:
    """Yield a warning for each held-out set whose text, or a near copy of it, may be in the training text of another
    dataset."""
    found: dict[str, list[str]] = {}
    for held, trained in (*_not_apart(corpora, corpora), *_not_apart(eval_only, corpora)):
        found.setdefault(held, []).append(trained)
    for held, where in found.items():
        yield f"stream.mixture: the held-out text of {held} may be in the training text of {', '.join(where)}: {_REMEDY}"


def _not_apart(held: Mapping[str, Manifest], trained: Mapping[str, Manifest]) -> Iterator[tuple[str, str]]:
    """Yield (name of a dataset with held-out text, name of a dataset to train on) for each pair that was not prepared apart
    (``corpus.apart_from``). Two datasets of ``trained`` make one pair, not two."""
    records = {name: (one.digest, frozenset(one.apart_from)) for name, one in {**held, **trained}.items()}
    places = {name: place for place, name in enumerate(trained)}
    for name in held:
        digest, known = records[name]
        for other, place in places.items():
            if other != name and places.get(name, -1) < place:
                theirs, known_there = records[other]
                if digest != theirs and digest not in known_there and theirs not in known:
                    yield name, other
