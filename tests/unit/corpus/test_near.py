"""Near-duplicates: recall and precision against planted ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.corpus.near_duplicates import (
    BANDS,
    BINS,
    SHINGLE,
    SIMILAR,
    NearDuplicates,
    find_near_duplicates,
    hash_runs,
    recall,
    sharing,
    signature,
    similarity,
)


def edited(ids: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """The document with ``share`` of its tokens replaced, one by one."""
    ids = ids.copy()
    places = rng.choice(len(ids), int(share * len(ids)), replace=False)
    ids[places] = rng.integers(0, 4096, len(places))
    return ids


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    sets = [
        {tuple(ids[i : i + SHINGLE]) for i in range(len(ids) - SHINGLE + 1)} for ids in (one.tolist(), other.tolist())
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def share_a_band(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.any(signature(one).bands == signature(other).bands))


def compared(documents: list[np.ndarray], bands: np.ndarray | None = None) -> NearDuplicates:
    """Near-duplicates of documents, with their own bands or given ones, (documents, BANDS)."""
    found = [signature(ids) for ids in documents]
    columns = np.array([one.bands for one in found]).T if bands is None else bands.T
    sketches = np.array([one.sketch for one in found])
    shared = [sharing(column) for column in columns]
    return find_near_duplicates(lambda: shared, lambda _: lambda some: sketches[some], len(documents))


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
    kept = compared(documents).kept
    hits = sum(kept[400 + number] == number for number in range(100))
    false = np.sum(kept[:400] != np.arange(400))
    assert hits >= 98
    assert false == 0


def test_files_with_the_same_licence_and_text_of_their_own_are_kept() -> None:
    """Each pair shares a third of its shingles, so 0.2% of 8 million pairs share a band: joined, they lost 9% of the files."""
    rng = np.random.default_rng(0)
    licence = rng.integers(0, 50_000, 200)
    documents = [np.concatenate([licence, rng.integers(0, 50_000, 200)]) for _ in range(4000)]
    proposed = np.array([signature(ids).bands for ids in documents])
    assert any(len(np.unique(column)) < 3990 for column in proposed.T)
    assert np.array_equal(compared(documents).kept, np.arange(4000))


@pytest.mark.parametrize("length", [12, 60, 400, 3000])
def test_sketches_estimate_the_similarity(length: int) -> None:
    rng = np.random.default_rng(2)
    errors = []
    for _ in range(100):
        one = rng.integers(0, 4096, length)
        other = edited(one, rng.choice([0.01, 0.02, 0.04, 0.1, 0.2]), rng)
        [estimate] = similarity(signature(one).sketch[None], signature(other).sketch[None])
        errors.append(estimate - jaccard(one, other))
    assert abs(np.mean(errors)) < 0.012
    assert np.std(errors) < 0.045


def test_a_document_is_dropped_only_for_one_that_is_kept_and_similar() -> None:
    """A chain: each is similar to the next, the ends share little."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, 4096, 1400)
    chain = [text[begin : begin + 1000] for begin in range(0, 400, 50)]
    everything = np.zeros((len(chain), BANDS), np.uint64)  # all share all bands
    for order in (range(len(chain)), rng.permutation(len(chain))):
        documents = [chain[number] for number in order]
        found = compared(documents, everything)
        for number, other in enumerate(found.kept.tolist()):
            assert found.kept[other] == other <= number
            assert found.similarity[number] >= SIMILAR
            assert abs(jaccard(documents[number], documents[other]) - found.similarity[number]) < 0.15
        assert 1 < np.sum(found.kept == np.arange(len(chain))) < len(chain)


def test_when_the_first_of_a_band_is_dropped_the_next_takes_its_place() -> None:
    rng = np.random.default_rng(4)
    text = rng.integers(0, 4096, 1600)
    first, dropped, one, two = text[:1000], text[120:1120], text[260:1260], text[270:1270]
    assert jaccard(first, one) < SIMILAR - 0.1
    bands = rng.integers(0, 2**63, (4, BANDS)).astype(np.uint64)
    bands[:2, 0] = 1  # the second is dropped for the first
    bands[1:, 1] = 2  # and was the first of this band
    found = compared([first, dropped, one, two], bands)
    assert found.kept.tolist() == [0, 0, 2, 2]


def test_a_band_that_everybody_shares_costs_one_comparison_each() -> None:
    documents, pairs = 3000, 0
    rng = np.random.default_rng(5)
    sketches = rng.integers(1, 256, (documents, BINS)).astype(np.uint8)

    def read(some: np.ndarray) -> np.ndarray:
        nonlocal pairs
        pairs += len(some)
        return sketches[some]

    shared = [sharing(np.zeros(documents, np.uint64))] * BANDS
    find_near_duplicates(lambda: shared, lambda _: read, documents)
    assert pairs == 2 * (documents - 1)  # both documents of each pair are read


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=300))
def test_each_bin_of_a_sketch_holds_its_smallest_hash(ids: list[int]) -> None:
    array = np.array(ids)
    hashes = hash_runs(array.astype(np.uint64), min(SHINGLE, len(ids))).tolist()
    expected = [min((value for value in hashes if value >> 57 == number), default=-1) for number in range(BINS)]
    assert signature(array).sketch.tolist() == [value % 255 + 1 if value >= 0 else 0 for value in expected]


def test_a_short_document_is_one_shingle() -> None:
    assert share_a_band(np.array([1, 2]), np.array([1, 2]))
    assert not share_a_band(np.array([1, 2]), np.array([2, 1]))
    assert signature(np.array([7])).bands.shape == (BANDS,)
