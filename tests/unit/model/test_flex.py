"""Documents attend apart by FlexAttention as by a mask. On a CPU its reference runs, which makes all scores; the blocks of
scores that a GPU's kernel would skip are compared by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex

from springtide.checkpoint.tensors import local
from springtide.config.engine import ModelConfig, ParallelConfig
from springtide.distributed import compiled
from springtide.distributed.compiled import compiled_flex, flex_kernel
from springtide.distributed.fsdp import parallelize, recomputed
from springtide.model import Decoder, KVCache, build
from springtide.model.flex import BLOCK, FlexKernel, block_mask, lowest_keys
from springtide.model.positions import document_firsts, documents
from springtide.training.preflight import _alone

EOS, BOS = 7, 6
CONFIG = ModelConfig(num_layers=2, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=48, max_sequence_length=320)


def rows(seed: int, length: int, count: int = 2) -> Tensor:
    """Ids of which some end documents."""
    found = torch.randint(0, 6, (count, length), generator=torch.Generator().manual_seed(seed))
    found[torch.rand(count, length, generator=torch.Generator().manual_seed(seed + 1)) < 0.02] = EOS
    return found


def seen_by(length: int, tokens: Tensor, window: int) -> Tensor:
    """Which keys each query attends to, bool (B, L, L), by definition."""
    dense = documents(tokens, EOS, BOS)[1][:, 0]
    index = torch.arange(length)
    return dense & (index[:, None] - index < window) if window else dense


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 700), window=st.sampled_from([0, 1, 100, 128, 200]))
def test_blocks_of_scores_are_those_that_the_mask_has(seed: int, length: int, window: int) -> None:
    tokens = rows(seed, length)
    found = block_mask(lowest_keys(document_firsts(tokens, EOS, BOS)[0], window))
    blocks = -(-length // BLOCK)
    dense = torch.zeros(2, blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    dense[:, :length, :length] = seen_by(length, tokens, window)
    tiles = dense.view(2, blocks, BLOCK, blocks, BLOCK).transpose(2, 3).flatten(3)
    full, some = tiles.all(-1), tiles.any(-1)
    for count, index, wanted in (
        (found.kv_num_blocks, found.kv_indices, some & ~full),
        (found.full_kv_num_blocks, found.full_kv_indices, full),
        (found.q_num_blocks, found.q_indices, (some & ~full).transpose(1, 2)),
        (found.full_q_num_blocks, found.full_q_indices, full.transpose(1, 2)),
    ):
        assert count is not None
        assert index is not None
        assert torch.equal(count[:, 0], wanted.sum(-1, dtype=torch.int32))
        for row in range(2):
            for block in range(blocks):
                listed = index[row, 0, block, : int(count[row, 0, block])]
                assert torch.equal(listed.long(), wanted[row, block].nonzero()[:, 0])
    index = torch.arange(length)
    visible = found.mask_mod(torch.arange(2)[:, None, None], torch.tensor(0), index[:, None], index)
    assert torch.equal(visible, seen_by(length, tokens, window))


def test_the_blocks_are_those_of_torchs_own_masks() -> None:
    tokens = rows(3, 300)
    ours = block_mask(document_firsts(tokens, EOS, BOS)[0])
    theirs = torch_flex.create_block_mask(ours.mask_mod, 2, None, 300, 300, device="cpu")
    assert ours.shape == theirs.shape == (2, 1, 300, 300)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_flex_attention_is_for_gpus_that_can_compile_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, capability = torch.device("cuda", 0), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability[0])
    monkeypatch.setattr(compiled, "_compilers", lambda: {"Triton": True, "a C compiler": True})
    assert flex_kernel(CONFIG, "bf16", torch.device("cpu")) is None
    assert flex_kernel(CONFIG, "bf16", gpu) is not None
    assert flex_kernel(CONFIG, "fp32", gpu) is None
    assert flex_kernel(CONFIG.model_copy(update={"dim": 32}), "bf16", gpu) is None  # heads of 8
    assert not caplog.records
    monkeypatch.setattr(compiled, "_compilers", lambda: {"Triton": True, "a C compiler": False})
    assert flex_kernel(CONFIG, "bf16", gpu) is None
    assert "C compiler" in caplog.text
    capability[0] = (7, 5)
    assert flex_kernel(CONFIG, "bf16", gpu) is None


OPTIONS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "a window": {"window": 40, "global_every": 2, "local_rope_theta": 1000.0},
    "capped scores": {"attention_cap": 3.0, "attention_scale": 0.3},
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlexKernel]:
    """FlexAttention as a GPU gets it, but for its kernels. torch refuses gradients on CPUs, where its reference has them."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    dynamo.reset()
    counters.clear()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield compiled_flex()
    dynamo.reset()
    counters.clear()


def pair(changes: dict[str, Any], kernel: FlexKernel) -> tuple[Decoder, Decoder]:
    """The same model with masks, and with the kernel."""
    config = CONFIG.model_copy(update=changes)
    masked, flexed = build(config, 64, EOS, BOS), build(config, 64, EOS, BOS)
    flexed.attend_by(kernel)
    return masked, flexed


def outcome(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """The loss and all gradients."""
    loss, _ = model(tokens[:, :-1], tokens[:, 1:].contiguous())
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Sums over 600 tokens in fp32, in another order."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("option", OPTIONS)
def test_losses_and_gradients_are_those_of_the_mask(option: str, recompute: str, on_cpu: FlexKernel) -> None:
    masked, flexed = pair(OPTIONS[option], on_cpu)
    for index, block in enumerate(flexed.blocks):
        if recompute != "none":
            flexed.blocks[index] = recomputed(block, recompute)
    for seed in (1, 5):
        alike(outcome(flexed, rows(seed, 301)), outcome(masked, rows(seed, 301)))


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_meet_other_documents_without_another_graph(recompute: str, on_cpu: FlexKernel) -> None:
    masked, flexed = pair(OPTIONS["a window"], on_cpu)
    for index, block in enumerate(flexed.blocks):
        if recompute != "none":
            flexed.blocks[index] = recomputed(block, recompute)
        flexed.blocks[index].compile(dynamic=False)
    graphs = []
    for seed in (1, 5, 9):
        alike(outcome(flexed, rows(seed, 301)), outcome(masked, rows(seed, 301)))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0, counters["graph_break"]


@pytest.mark.full
def test_a_text_read_in_parts_takes_masks(on_cpu: FlexKernel) -> None:
    masked, flexed = pair({}, on_cpu)
    tokens, past = rows(2, 40), KVCache(CONFIG.num_layers)
    with torch.no_grad():
        parts = [flexed(tokens[:, :25], past=past), flexed(tokens[:, 25:], past=past)]
        torch.testing.assert_close(torch.cat(parts, 1), masked(tokens))
        torch.testing.assert_close(flexed(tokens), masked(tokens))


@pytest.mark.full
@pytest.mark.parametrize("compiles", [False, True])
def test_sharded_blocks_hand_the_mask_on(compiles: bool, on_cpu: FlexKernel) -> None:
    """FSDP looks into what a block is called with; a process alone has it with fp64 sums."""
    settings, found = ParallelConfig(reduction="fp64", recompute="selective", compile=compiles), []
    with _alone("cpu") as here:
        for kernel in (None, on_cpu):
            model = build(CONFIG, 64, EOS, BOS)
            weights = [one.detach().clone() for one in model.parameters()]
            parallelize(model, settings, here)
            for one, was in zip(model.parameters(), weights, strict=True):
                local(one.data).copy_(was)
            model.attend_by(kernel)
            loss, _ = model(rows(1, 301)[:, :-1], rows(1, 301)[:, 1:].contiguous())
            loss.backward()
            found.append(
                [loss.detach(), *(local(one.grad).float() for one in model.parameters() if one.grad is not None)]
            )
    assert len(found[0]) > 10
    alike(found[1], found[0])
