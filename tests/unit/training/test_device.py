"""Batches on their way to the device: one ahead where that helps, none lost, errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from springtide.config.engine import ParallelConfig
from springtide.shards import signed
from springtide.stream import Batch, ahead
from springtide.training.device import choose_kernels, to_device


def batches(number: int) -> Iterator[Batch]:
    for step in range(number):
        tokens = np.random.default_rng(step).integers(0, 60_000, (step % 3, 9)).astype(np.uint16)
        yield Batch(step, np.arange(step % 3, dtype=np.uint64), tokens)


def all_ended() -> bool:
    """Whether every thread that draws ahead ends; it may still be in its last line when its last item is here."""
    threads = [thread for thread in threading.enumerate() if thread.name == "springtide-ahead"]
    for thread in threads:
        thread.join(30)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_tokens_arrive_as_they_are(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = list(to_device(batches(20), torch.device(device)))
    for (batch, tokens_NL, columns), expected in zip(found, batches(20), strict=True):
        assert batch.step == expected.step
        assert columns == {}
        assert tokens_NL.dtype == torch.int64
        assert tokens_NL.device.type == device
        assert np.array_equal(tokens_NL.cpu().numpy(), signed(expected.tokens))
    assert all_ended()


def test_kernels_are_deterministic_where_that_is_asked_for_and_else_as_they_were() -> None:
    try:
        choose_kernels(ParallelConfig())
        assert not torch.are_deterministic_algorithms_enabled()
        choose_kernels(ParallelConfig(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        choose_kernels(ParallelConfig())
        assert torch.are_deterministic_algorithms_enabled(), "own code may have asked for it"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_the_next_item_is_drawn_while_the_last_is_used() -> None:
    drawn = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for item in range(3):
            yield item
            drawn.release()

    for item in ahead(items()):
        assert item == 2 or drawn.acquire(timeout=30)


def test_an_error_comes_in_its_place_and_ends_the_thread() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ConnectionError("the store is gone")

    found: list[int] = []
    with pytest.raises(ConnectionError, match="the store is gone"):
        found.extend(ahead(items()))
    assert found == [1, 2]
    assert all_ended()


def test_who_stops_early_leaves_no_thread() -> None:
    endless = ahead(iter(int, 1))
    assert next(endless) == 0
    endless.close()
    assert all_ended()
