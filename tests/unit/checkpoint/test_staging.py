"""What is staged is what the tensors were when it was asked for, whatever becomes of them afterwards."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from springtide.checkpoint.shared_memory import MARK_BYTES, NO_STEP
from springtide.checkpoint.staging import StagingBuffer, StagingPlan
from springtide.checkpoint.tensors import named_tensors
from springtide.errors import CheckpointError


def tensors(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        "wide": torch.randn(300, 1000, generator=generator, dtype=torch.float64),
        "narrow": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "count": torch.tensor(5.0),
        "turned": torch.randn(5, 4, generator=generator).T,
        "none": torch.empty(0, 3),
    }
    return {name: tensor.to(device) for name, tensor in found.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_staged_is_the_state_of_then(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    state, layout = tensors(device), StagingPlan(0, 1)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    mine = layout.of(state)
    assert mine.keys() == state.keys()
    stage = StagingBuffer("/dev/shm", layout.size_bytes)
    for _ in range(3):
        stage.mark(NO_STEP)
        stage.copy(mine, layout.pieces)
        stage.wait()
        for tensor in state.values():  # the next step, which may begin once ``wait`` has returned
            tensor.zero_()
        stage.settle()
        stage.mark(7)
        seen = mmap.mmap(
            os.dup(stage.fd), MARK_BYTES + layout.size_bytes, access=mmap.ACCESS_READ
        )  # as another process
        assert int.from_bytes(seen[:8], "little", signed=True) == 7
        for piece in layout.pieces:
            begin = MARK_BYTES + piece.begin
            assert piece.begin % expected[piece.tensor].element_size() == 0
            found = bytearray(seen[begin : begin + piece.size_bytes])
            want = expected[piece.tensor].contiguous().cpu()
            assert bytes(found) == want.reshape(-1).view(torch.uint8).numpy().tobytes(), piece.tensor
        for name, tensor in state.items():
            tensor.copy_(expected[name])
    stage.close()


def in_memory() -> set[str]:
    """What lies in the shared memory, but for the semaphores of other programs' process pools."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def test_a_stage_that_is_too_large_fails_at_once(tmp_path: Path) -> None:
    """A stage that is too large is an error at once and leaves nothing."""
    free = os.statvfs("/dev/shm")
    before = in_memory()
    with pytest.raises(OSError, match="No space left"):
        StagingBuffer("/dev/shm", free.f_bavail * free.f_frsize + 2**30)
    assert in_memory() <= before


def test_optimizer_state_that_is_no_tensor_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["seen"] = 3
    with pytest.raises(CheckpointError, match=r"optim/weight/seen .*int = 3"):
        named_tensors(model, optimizer)


def test_shared_weights_are_saved_once_without_wrapper_names() -> None:
    """Weights that are shared are saved once and wrappers leave no trace."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert list(named_tensors(model)) == ["model/0.weight"]
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert list(named_tensors(torch.compile(plain))) == list(named_tensors(plain))  # type: ignore[arg-type]
