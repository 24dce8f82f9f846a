"""Ids and the bit that says that they are not predicted, in one integer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared import SEALED

from springtide.config.data import WHOLE, ShardsConfig
from springtide.shards import (
    TRAIN,
    Manifest,
    Split,
    SplitReader,
    ids_of,
    is_predicted,
    masked,
    memory_type,
    most_ids,
    signed,
    write_shard,
)
from springtide.shards.shard_table import RowGroup, RowGroupView
from springtide.storage import Folder
from springtide.stream import Batch


@given(st.sampled_from(["uint16", "uint32"]), st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans())))
def test_a_mask_changes_no_id(token_type: str, pairs: list[tuple[int, bool]]) -> None:
    ids = np.array([index % most_ids(token_type, True) for index, _ in pairs], dtype=token_type)
    counts = np.array([is_target for _, is_target in pairs], dtype=bool)
    tokens = np.where(counts, ids, masked(ids))
    assert tokens.dtype == ids.dtype
    assert np.array_equal(ids_of(tokens), ids)
    assert np.array_equal(is_predicted(tokens), counts)
    rows = signed(tokens)
    assert rows.dtype == np.int64
    assert np.array_equal(rows >= 0, counts)
    assert np.array_equal(np.where(rows < 0, ~rows, rows), ids)
    batch = Batch(0, np.empty(1), tokens[None])
    assert np.array_equal(batch.ids, ids[None])
    assert np.array_equal(batch.labels, np.where(counts, ids.astype(np.int64), -100)[None])


@pytest.mark.parametrize(("vocab_size", "read_as"), [(2**15, "uint16"), (2**15 + 1, "uint32"), (2**16, "uint32")])
def test_ids_that_need_all_bits_are_read_wider(vocab_size: int, read_as: str) -> None:
    assert memory_type("uint16", vocab_size) == read_as
    folder = Folder("memory://wide")
    tokens = np.array([[0, vocab_size - 1, 1]], dtype=np.uint16)
    shard = write_shard(folder, "train-00000.parquet", ShardsConfig(sequence_length=2), 0, np.ones(1), tokens)
    split = Split(documents=1, tokens=1, num_bytes=1, rows=1, shards=(shard,))
    manifest = Manifest(
        sequence_length=2, token_type="uint16", vocab_size=vocab_size, sources={WHOLE: {TRAIN: split}}, **SEALED
    )
    found = SplitReader(folder, manifest, TRAIN).read(np.zeros(1, dtype=np.int64)).tokens
    assert found.dtype == read_as
    assert is_predicted(found).all()
    assert signed(found).tolist() == [[0, vocab_size - 1, 1]]
    folder.remove()


def test_a_manifest_with_a_mask_has_a_bit_for_it() -> None:
    record = {"sequence_length": 2, "token_type": "uint16", "vocab_size": 2**15 + 1, "sources": {WHOLE: {}}, **SEALED}
    record |= {"heldout_fraction": 1.0}  # of a dataset to evaluate on
    assert Manifest.model_validate(record)
    with pytest.raises(ValueError, match=r"32769 .*32768 ids"):
        Manifest.model_validate({**record, "has_loss_mask": True})


@given(st.integers(2, 2**31), st.sampled_from(["uint16", "uint32"]), st.booleans(), st.integers(0, 2**32))
def test_an_id_above_the_last_is_found_in_the_planes(
    vocab_size: int, token_type: str, is_masked: bool, seed: int
) -> None:
    """An id above the last is found in the planes of a row group."""
    is_masked = is_masked or token_type == "uint32"
    vocab_size = min(vocab_size, most_ids(token_type, is_masked))
    kind, rng = memory_type(token_type, vocab_size), np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (5, 7)).astype(token_type)
    stored = np.where(rng.random((5, 7)) < is_masked / 2, masked(tokens), tokens) if kind == token_type else tokens
    data = [np.zeros(60, np.uint8), *((stored >> 8 * plane).astype(np.uint8) for plane in range(stored.itemsize))]
    parts = np.concatenate([one.reshape(-1) for one in data])
    group = RowGroup(rows=5, sample_ids=0, num_bytes=40, tokens=60, end=len(parts), digest="0" * 32)
    view, largest = RowGroupView(parts, group, token_type, kind), int(tokens.max())
    lasts = {
        0,
        vocab_size - 1,
        *tokens.reshape(-1).tolist(),
        *(max(0, largest + one) for one in (-257, -1, 1, 255, 256)),
    }
    assert [view.exceeds(last) for last in lasts] == [largest > last for last in lasts]
