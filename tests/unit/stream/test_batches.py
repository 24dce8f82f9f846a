"""The batches of a loop of one's own."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

import springtide as st
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.stream import Batch, Read
from springtide.stream.reader import growing


def rows_of(dataset: str, size: int, step: int, steps: int) -> list[list[int]]:
    """Per step the ids of the rows of all ranks."""
    ranks = [st.stream.batches(dataset, global_batch=12, rank=rank, size=size, step=step) for rank in range(size)]
    found: list[tuple[Batch, ...]] = [tuple(map(next, ranks)) for _ in range(steps)]
    assert [batch.step for batch, *_ in found] == list(range(step, step + steps))
    return [sorted(np.concatenate([batch.sample_ids for batch in batches]).tolist()) for batches in found]


def test_any_number_of_ranks_gets_the_same_rows(tiny: Config) -> None:
    """Any number of ranks gets the rows of one and a step is all there is to remember."""
    dataset = tiny.shards.dataset
    whole = rows_of(dataset, 1, 0, 150)
    assert [len(rows) for rows in whole] == [12] * 150
    for size, step in ((2, 0), (5, 37), (12, 149), (3, 64)):
        assert rows_of(dataset, size, step, 150 - step) == whole[step:]


def test_another_seed_is_another_order(tiny: Config) -> None:
    """Another seed is another order and a row has one token more than it trains on."""
    first, other = (
        next(st.stream.batches(tiny.shards.dataset, global_batch=12, seed=seed)) for seed in (tiny.stream.seed, 1)
    )
    assert first.sample_ids.tolist() != other.sample_ids.tolist()
    assert first.tokens.shape == (12, tiny.shards.sequence_length + 1)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 13)])
def test_a_rank_that_cannot_be_is_refused_at_once(tiny: Config, rank: int, size: int) -> None:
    with pytest.raises(st.ConfigError, match=rf"rank = {rank}: .*size = {size} .*12 lanes"):
        st.stream.batches(tiny.shards.dataset, global_batch=12, rank=rank, size=size)


def test_a_step_before_the_first_is_refused(tiny: Config) -> None:
    with pytest.raises(st.ConfigError, match="step = -3"):
        st.stream.batches(tiny.shards.dataset, global_batch=12, step=-3)


@pytest.mark.processes
def test_a_process_that_ends_while_it_reads_ends_well(tiny: Config) -> None:
    program = f"import springtide as st; print(next(st.stream.batches({tiny.shards.dataset!r}, global_batch=12)).step)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_read_is_a_bounded_number_of_steps(tiny: Config) -> None:
    batches = st.stream.batches(tiny.shards.dataset, global_batch=12, step=10**7)
    assert [batch.step for batch in islice(batches, 3)] == [10**7, 10**7 + 1, 10**7 + 2]


def test_the_first_step_waits_for_its_own_rows_alone() -> None:
    """The first step waits for its own rows alone and no step is missed."""
    for first, last in ((0, 1), (7, 9), (40, 2728)):
        parts = list(growing(Read(StepsDone(first), StepsDone(last))))
        assert parts[0].steps == [first]
        assert [step for part in parts for step in part.steps] == list(range(first, last))
        assert len(parts) <= 2 + (last - first).bit_length()
    assert not list(growing(Read(StepsDone(3), StepsDone(3))))
