"""Near-duplicates: recall and precision against planted ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.corpus.near_duplicates import BANDS, BINS, SHINGLE, _minima, bands, clusters, recall


def edited(ids: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """The document with ``share`` of its tokens replaced, one by one."""
    ids = ids.copy()
    places = rng.choice(len(ids), int(share * len(ids)), replace=False)
    ids[places] = rng.integers(0, 4096, len(places))
    return ids


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    sets = [{tuple(ids[i : i + SHINGLE]) for i in range(len(ids) - SHINGLE + 1)} for ids in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def share_a_band(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.any(bands(one) == bands(other)))


@pytest.mark.parametrize("length", [60, 400, 3000])
def test_recall_follows_the_curve_that_is_stated(length: int) -> None:
    rng = np.random.default_rng(0)
    found: dict[int, list[tuple[bool, float]]] = {}
    for _ in range(500):
        one = rng.integers(0, 4096, length)
        other = edited(one, rng.choice([0.01, 0.02, 0.04, 0.06, 0.1]), rng)
        similarity = jaccard(one, other)
        found.setdefault(int(similarity * 10), []).append((share_a_band(one, other), similarity))
    for pairs in found.values():
        if len(pairs) >= 40:
            expected = np.mean([recall(similarity) for _, similarity in pairs])
            spread = 4 * np.sqrt(max(expected * (1 - expected), 0.01) / len(pairs))
            # an estimate from few shingles scatters more, which flattens the curve a little
            assert abs(np.mean([hit for hit, _ in pairs]) - expected) < spread + 0.1


def test_planted_near_duplicates_are_found_and_others_are_left() -> None:
    rng = np.random.default_rng(1)
    originals = [rng.integers(0, 4096, rng.integers(50, 2000)) for _ in range(400)]
    copies = [edited(ids, 0.01, rng) for ids in originals[:100]]
    documents = [*originals, *copies]
    signatures = np.array([bands(ids) for ids in documents])
    cluster = clusters(signatures.T, len(documents))
    hits = sum(cluster[number] == cluster[400 + number] for number in range(100))
    false = len(originals) - len(np.unique(cluster[:400]))
    assert hits >= 98
    assert false == 0


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300))
def test_each_bin_holds_its_smallest_hash_and_no_bin_is_empty(hashes: list[int]) -> None:
    found = _minima(np.array(hashes, dtype=np.uint64)).tolist()
    assert len(found) == BINS
    for number in range(BINS):
        mine = [value for value in hashes if value >> 57 == number]
        assert found[number] == min(mine) if mine else found[number] in hashes


def test_a_short_document_is_one_shingle() -> None:
    assert share_a_band(np.array([1, 2]), np.array([1, 2]))
    assert not share_a_band(np.array([1, 2]), np.array([2, 1]))
    assert bands(np.array([7])).shape == (BANDS,)


def test_clusters_are_the_connected_documents() -> None:
    columns = [np.array([1, 1, 2, 3, 4], np.uint64), np.array([5, 6, 6, 7, 8], np.uint64)]
    cluster = clusters(columns, 5)
    assert cluster[0] == cluster[1] == cluster[2]
    assert len(np.unique(cluster)) == 3
