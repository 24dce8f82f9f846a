"""Where documents are apart each begins with a begin-of-text id, which is never predicted and predicts the first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prepared import prepare
from summed_loss import token_loss
from tokenizers import Tokenizer

from springtide import config as configs
from springtide.config import Config
from springtide.corpus import open_tokenizer
from springtide.dataset import open_dataset
from springtide.errors import ConfigError
from springtide.model import whole
from springtide.shards import Manifest, SplitReader, ids_of, is_predicted, signed
from springtide.storage import Folder
from springtide.stream import open_data

pytestmark = pytest.mark.processes

LENGTH = 64
APART = {"shards.mask_across_documents": True}
FITTED = {**APART, "shards.packing": "best_fit"}
NAMED = {"corpus.begin_of_text": "<s>"}


def write_texts(folder: Path) -> list[str]:
    """Texts of which most are shorter than a row and some much longer, each with another first letter than it goes on with."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    texts = [
        "Q" + "".join(rng.choice(list("abcdefghij klmnop"), size)) for size in (*rng.integers(5, 60, 70), 150, 200, 330)
    ]
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return texts


def tokenizer_file(path: Path) -> str:
    tokenizer = Tokenizer.from_str(open_tokenizer("bytes", [], 0).to_json())
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_texts(tmp_path / "text")
    return configs.recipes.tiny().override(
        {
            "corpus.source": str(tmp_path / "text"),
            "corpus.tokenizer": tokenizer_file(tmp_path / "tokenizer.json"),
            "corpus.near_duplicates": False,
            "corpus.max_files": 0,
            "shards.root": str(tmp_path / "data"),
            "shards.sequence_length": LENGTH,
            "shards.rows_per_group": 8,
            "shards.heldout_fraction": 0.2,
            "stream.global_batch": 2,
            "stream.lanes": 2,
            "model.max_sequence_length": LENGTH,
        }
    )


def rows_of(dataset: str) -> tuple[Manifest, dict[str, Any], np.ndarray]:
    """The manifest, the bytes that each row counts, and all rows."""
    manifest = open_dataset(dataset)[0]
    found = {
        name: SplitReader(Folder(dataset), manifest, name).read(np.arange(split.rows))
        for name, split in manifest.splits.items()
    }
    return manifest, found, np.concatenate([one.tokens for one in found.values()])


@pytest.mark.parametrize("layout", [APART, FITTED, {**FITTED, **NAMED}, {**APART, **NAMED}])
def test_each_document_is_predicted_after_its_begin_of_text(
    config: Config, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Each document is predicted from its begin of text to its end."""
    dataset = prepare(config.override(layout)).shards.dataset
    manifest, found, rows = rows_of(dataset)
    vocabulary = open_dataset(dataset)[1]
    bos, eos = manifest.begin_of_text, manifest.end_of_text
    assert bos == (vocabulary.tokenizer.token_to_id("<s>") if "corpus.begin_of_text" in layout else eos)
    ids, predicted = ids_of(rows), is_predicted(rows)
    first = ids == vocabulary.tokenizer.token_to_id("Q")
    assert first[:, 1:].sum() >= 60
    assert predicted[first].all()
    assert (ids[:, :-1][first[:, 1:]] == bos).all()
    assert not predicted[:, :-1][first[:, 1:]].any()  # nothing predicts a begin-of-text
    assert (ids[:, 1:][predicted[:, 1:]] != bos).all() or bos == eos
    lengths = vocabulary.byte_lengths()
    for one in found.values():
        counted = np.where(is_predicted(one.tokens), lengths[ids_of(one.tokens)], 0)[:, 1:].sum(axis=1)
        assert np.array_equal(one.num_bytes, counted)
    if "shards.packing" in layout:
        texts = [path.read_text() for path in (tmp_path / "text").iterdir()]
        assert sum(split.num_bytes for split in manifest.splits.values()) == sum(map(len, texts))
        assert (ids[:, 1:][predicted[:, 1:]] == eos).sum() == len(texts)


def test_documents_end_to_end_are_separated_as_they_were(config: Config) -> None:
    manifest, _, rows = rows_of(prepare(config).shards.dataset)
    assert not manifest.has_loss_mask
    assert is_predicted(rows).all()
    assert manifest.begin_of_text == manifest.end_of_text
    following = ids_of(rows)[:, 1:][ids_of(rows)[:, :-1] == manifest.end_of_text]
    assert set(following.tolist()) == {ord("Q") - ord("!")}


def test_a_named_begin_of_text_stands_before_documents_end_to_end(config: Config) -> None:
    manifest, _, rows = rows_of(prepare(config.override(NAMED)).shards.dataset)
    assert manifest.has_loss_mask
    assert np.array_equal(ids_of(rows) == manifest.begin_of_text, ~is_predicted(rows))


@pytest.mark.parametrize("layout", [APART, FITTED])
def test_the_first_token_is_trained_from_the_begin_of_text(config: Config, layout: dict[str, Any]) -> None:
    """Also by a model of the user's own that knows of no end-of-document id."""
    ready = prepare(config.override(layout))
    data = open_data(ready.data)
    _, _, rows = rows_of(ready.shards.dataset)
    rows_BL = torch.from_numpy(signed(rows))
    model = whole(ready.model, data.vocab_size, *data.document_ids)
    total, _ = token_loss(model, rows_BL)
    total.backward()
    assert model.embedding.weight.grad[data.bos_id].norm() > 1.0
    plain = whole(ready.model, data.vocab_size)
    logits = plain(torch.from_numpy(ids_of(rows).astype(np.int64)[:, :-1]))
    targets = torch.from_numpy(ids_of(rows).astype(np.int64)[:, 1:])
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    counted = each[torch.from_numpy(is_predicted(rows))[:, 1:].flatten()].sum()
    own = torch.nn.Module()
    own.forward = plain.forward  # type: ignore[method-assign]
    torch.testing.assert_close(token_loss(own, rows_BL)[1], counted.detach())


def test_a_vocabulary_that_leaves_no_bit_for_the_mask_is_refused(config: Config) -> None:
    big = config.override({"corpus.tokenizer": "bpe", "corpus.vocab_size": 40_000})
    assert big.corpus.vocab_size == 40_000
    for changes in (FITTED, NAMED):
        with pytest.raises(ConfigError, match=r"32768 ids.*shards\.token_type.*uint32"):
            big.override(changes)
    assert big.override({**FITTED, "shards.token_type": "uint32"})


def test_a_begin_of_text_that_the_tokenizer_lacks_is_named(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"corpus\.begin_of_text = '<bos>': .*token.* <s>"):
        prepare(config.override({"corpus.begin_of_text": "<bos>"}))


def test_corpora_that_begin_texts_otherwise_do_not_mix(config: Config) -> None:
    fitted, named = prepare(config.override(FITTED)), prepare(config.override({**FITTED, **NAMED}))
    mixture = {"one": fitted.shards.dataset, "other": named.shards.dataset}
    with pytest.raises(ConfigError, match=r"stream.mixture.other = .* the same corpus.begin_of_text"):
        open_data(fitted.override({"stream.mixture": mixture}).data)
