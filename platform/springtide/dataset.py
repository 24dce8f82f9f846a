"""Text to a sealed dataset, once: the one place where corpus and shards meet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator

import numpy as np

from springtide.config import Config, override
from springtide.corpus import Document, Source, Vocabulary, open_source, open_vocabulary
from springtide.errors import ConfigError, CorpusError, explain
from springtide.shards import HELDOUT, MANIFEST, TOKENIZER, TRAIN, Manifest, Sealer, load_manifest
from springtide.store import Folder, digest

_VERSION = 3
"""Raise it when the same settings would give other bytes."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def _silent(stage: str, done: int, total: int) -> None:
    pass


def prepare(config: Config, progress: Progress = _silent) -> Config:
    """Find the dataset of ``config`` by fingerprint or make it; returns the config with ``shards.dataset`` filled in. One that
    names its datasets, in ``shards.dataset`` or ``stream.mixture``, comes back as it is.

    ConfigError or CorpusError says what is wrong with the corpus before anything is written.
    """
    if config.shards.dataset or config.stream.mixture:
        return config
    source = open_source(config.corpus.source, config.corpus.max_documents)
    name = fingerprint(config, source)
    dataset = Folder(config.shards.root) / name
    if not dataset.exists(MANIFEST):
        _make(config, source, dataset, name, progress)
    return override(config, {"shards.dataset": dataset.url})


def fingerprint(config: Config, source: Source) -> str:
    """16 hex digits over the settings, the source's files and the version of this code."""
    corpus = config.corpus.model_dump(mode="json")
    shards = config.shards.model_dump(mode="json", exclude={"root", "dataset"})
    text = json.dumps([_VERSION, corpus, shards, source.fingerprint()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _make(config: Config, source: Source, dataset: Folder, name: str, progress: Progress) -> None:
    documents = _documents(config, source, progress)
    vocabulary = open_vocabulary(
        config.corpus.tokenizer, (document.text for document in documents), config.corpus.vocab_size
    )
    limit = np.iinfo(config.shards.token_type).max + 1
    if vocabulary.size > limit:
        raise ConfigError(
            explain(
                "shards.token_type",
                config.shards.token_type,
                f"holds {limit} ids, the vocabulary {config.corpus.tokenizer!r} has {vocabulary.size}",
                "set shards.token_type to uint32",
            )
        )
    dataset.remove()  # what a killed prepare left; without a manifest it is no dataset
    byte_lengths = vocabulary.byte_lengths()
    sealers = {split: Sealer(dataset, split, config.shards, byte_lengths) for split in (TRAIN, HELDOUT)}
    encoded = vocabulary.encode(document.text for document in documents)
    for done, (document, ids) in enumerate(zip(documents, encoded, strict=True), start=1):
        sealers[split_of(document, config.shards.heldout_fraction)].add(ids)
        progress("packing documents", done, len(documents))
    splits = {split: sealer.finish() for split, sealer in sealers.items()}
    for split, sealed in splits.items():
        if sealed.rows == 0:
            raise CorpusError(
                explain(
                    "shards.sequence_length",
                    config.shards.sequence_length,
                    f"the {split} split of {config.corpus.source!r} has only {sealed.tokens} tokens "
                    f"in {sealed.documents} documents, not one row",
                    "shorten the sequence, use more text, or change shards.heldout_fraction",
                )
            )
    manifest = Manifest(
        sequence_length=config.shards.sequence_length,
        token_type=config.shards.token_type,
        vocab_size=vocabulary.size,
        end_of_text=vocabulary.end_of_text,
        tokenizer_digest=digest.of_bytes(vocabulary.to_json().encode()),
        fingerprint=name,
        source={"source": config.corpus.source, "documents": len(documents)},
        splits=splits,
    )
    dataset.write(TOKENIZER, vocabulary.to_json())
    dataset.write_json(MANIFEST, manifest.model_dump(mode="json"))


def _documents(config: Config, source: Source, progress: Progress) -> list[Document]:
    """Every document, in an order keyed by the seed and each document's own digest; duplicates are taken once."""
    key = config.shards.seed.to_bytes(8, "little")
    unique: dict[bytes, Document] = {}
    for done, document in enumerate(source.documents(), start=1):
        unique.setdefault(hashlib.blake2b(document.digest, key=key, digest_size=16).digest(), document)
        progress("reading documents", done, len(source.names))
    if not unique:
        raise CorpusError(
            explain("corpus.source", config.corpus.source, "holds no text", "point it at files that are not empty")
        )
    return [unique[digest] for digest in sorted(unique)]


def split_of(document: Document, heldout_fraction: float) -> str:
    """Which split a document belongs to, from its text alone."""
    share = int.from_bytes(document.digest[:8], "little") / 2**64
    return HELDOUT if share < heldout_fraction else TRAIN


def open_dataset(url: str) -> tuple[Manifest, Vocabulary]:
    """Manifest and vocabulary of a sealed dataset."""
    dataset = Folder(url)
    return load_manifest(dataset), Vocabulary.from_json(dataset.read(TOKENIZER).decode())


def rows_text(rows: np.ndarray, vocabulary: Vocabulary) -> Iterator[str]:
    """Rows of token ids, (rows, length), as text."""
    return (vocabulary.decode(row.tolist()) for row in rows)
