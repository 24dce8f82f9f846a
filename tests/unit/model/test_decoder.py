"""The decoder against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from summed_loss import token_loss
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from springtide.config.engine import ModelConfig
from springtide.distributed.fsdp import recomputed
from springtide.errors import ConfigError
from springtide.model import KVCache, build, flops_per_token, hardware_flops_per_token, initial, num_parameters
from springtide.model.attention import Attention, Linear, RMSNorm, attention_as_on
from springtide.model.positions import rotary_table, rotate
from springtide.training.losses import loss_mask

CONFIG = ModelConfig(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, max_sequence_length=64)
TOKENS = torch.randint(0, 100, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_have_a_column_an_id_padded_to_sixty_four(tied: bool) -> None:
    model = build(CONFIG.model_copy(update={"tied_head": tied}), vocab_size=100)
    assert model(TOKENS).shape == (3, 20, 128)
    head = 0 if tied else 128 * 32
    assert num_parameters(model) == 128 * 32 + head + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32) + 32


def test_rows_of_weights_from_elsewhere_stay_as_they_are() -> None:
    config = CONFIG.model_copy(update={"vocab_size": 107})
    assert build(config, vocab_size=100)(TOKENS).shape == (3, 20, 107)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 107: .*108 ids"):
        build(config, vocab_size=108)


def test_no_position_sees_a_later_one() -> None:
    model = build(CONFIG, vocab_size=100)
    changed = TOKENS.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 100
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_documents_packed_into_a_row_are_computed_as_if_alone() -> None:
    parts = [TOKENS[0, :7] % 98, TOKENS[1, :1] % 98, TOKENS[2, :9] % 98]
    for model, bos in ((build(CONFIG, 100, eos_id=99), 99), (build(CONFIG, 100, eos_id=99, bos_id=98), 98)):
        apart = [torch.cat([torch.tensor([bos]), part, torch.tensor([99])]) for part in parts]
        tail = torch.cat([TOKENS[1, 5:9] % 98, torch.tensor([99])])  # of a cut document: it has no begin-of-text
        for whole in ([*apart, tail], [tail, *apart], [tail, tail], [tail[-1:], *apart]):
            packed = model(torch.cat(whole)[None])
            alone = torch.cat([build(CONFIG, vocab_size=100)(part[None]) for part in whole], dim=1)
            torch.testing.assert_close(packed, alone)
        row = torch.cat(apart)[None]
        assert not torch.allclose(build(CONFIG, vocab_size=100)(row)[:, 9:], model(row)[:, 9:])


class Seen(TorchFunctionMode):
    """What attention was asked for: query heads, key heads, whether they differ by intent."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, bool]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            self.calls.append((args[0].shape[1], args[1].shape[1], kwargs["enable_gqa"]))
            return torch.empty_like(args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "expected"),
    [
        ("cuda", torch.bfloat16, False, (4, 2, True)),  # FlashAttention
        ("cuda", torch.bfloat16, True, (4, 4, False)),
        ("cuda", torch.float16, False, (4, 4, False)),
        ("cuda", torch.float32, False, (4, 4, False)),
        ("cpu", torch.float32, True, (4, 2, True)),
    ],
)
def test_grouped_heads_go_to_no_kernel_that_makes_score_matrices(
    device: str, dtype: torch.dtype, masked: bool, expected: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "forward", lambda layer, x: x.new_empty(*x.shape[:-1], layer.out_features))
    with torch.device("meta"):
        block = Attention(CONFIG)
    with FakeTensorMode(), torch.device(device), torch.no_grad():
        x_BLD, table = torch.empty(2, 20, 32, dtype=dtype), torch.empty(20, 4)
        with Seen() as seen:
            block(x_BLD, table, table, torch.empty(2, 1, 20, 20, dtype=torch.bool) if masked else None)
    assert seen.calls == [expected]


def test_repeated_heads_attend_as_grouped_ones() -> None:
    model, rows = build(CONFIG, vocab_size=100, eos_id=7), TOKENS

    def logits_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logits = model(rows)
        logits.logsumexp(-1).sum().backward()
        gradient = model.blocks[0].attention.key.weight.grad
        assert gradient is not None
        return logits.detach(), gradient.clone()

    grouped = logits_and_gradient()
    with attention_as_on("cuda"):
        repeated = logits_and_gradient()
    torch.testing.assert_close(repeated, grouped)
    assert all(torch.equal(one, other) for one, other in zip(logits_and_gradient(), grouped, strict=True))


def test_the_loss_of_packed_documents_is_that_of_the_documents() -> None:
    begin, end = torch.tensor([~99]), torch.tensor([99])
    parts = [torch.cat([begin, TOKENS[row, :length] % 99, end]) for row, length in ((0, 7), (1, 3), (2, 9))]
    row = torch.cat([*parts, torch.tensor([~99, ~99])])[None]  # two of padding
    packed, _ = token_loss(build(CONFIG, 100, eos_id=99), row)
    alone = sum(token_loss(build(CONFIG, 100), part[None])[0] for part in parts)
    torch.testing.assert_close(packed, alone)
    assert int(loss_mask(row).sum()) == sum(len(part) - 1 for part in parts)


@pytest.mark.parametrize("eos_id", [None, 99])
def test_a_text_read_in_parts_has_the_logits_of_the_whole(eos_id: int | None) -> None:
    model = build(CONFIG, vocab_size=100, eos_id=eos_id)
    tokens = TOKENS[:1].clone()
    tokens[0, [6, 7, 13, 14]] = 99
    past, parts = KVCache(CONFIG.num_layers), []
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 15), (15, 20)):
            parts.append(model(tokens[:, begin:end], past=past))
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_weights_depend_on_the_seed_alone() -> None:
    first, second = build(CONFIG, 100), build(CONFIG, 100)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    other = build(CONFIG.model_copy(update={"init_seed": 1}), 100)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@given(
    begin=st.integers(0, 200), end=st.integers(0, 200), name=st.sampled_from(["head.weight", "norm.weight", "key.bias"])
)
def test_any_rows_of_a_first_weight_are_those_of_the_whole(begin: int, end: int, name: str) -> None:
    shape = (200, 8) if name == "head.weight" else (200,)
    whole = initial(CONFIG, name, shape, 0, 200)
    assert torch.equal(initial(CONFIG, name, shape, begin, max(begin, end)), whole[begin : max(begin, end)])


def test_first_weights_are_normal_and_norms_change_nothing() -> None:
    """First weights are normal smaller where they add to the stream and norms change nothing."""

    def spread(name: str) -> float:
        return float(initial(CONFIG, name, (512, 64), 0, 512).std())

    assert spread("blocks.0.ffn.up.weight") == pytest.approx(0.02, rel=0.05)
    assert spread("blocks.0.ffn.down.weight") == pytest.approx(0.02 / math.sqrt(2 * CONFIG.num_layers), rel=0.05)
    assert spread("blocks.0.ffn.up.weight") != spread("blocks.1.ffn.up.weight")
    x = torch.randn(4, 32)
    for around_one in (False, True):
        norm = RMSNorm(32, 1e-5, around_one)
        config = CONFIG.model_copy(update={"norm_unit_offset": around_one})
        norm.weight.data = initial(config, "norm.weight", (32,), 0, 32)
        torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), eps=1e-5))


def test_attention_is_softmax_of_scaled_products_with_shared_key_heads() -> None:
    attention = build(CONFIG, 100).blocks[0].attention
    x = torch.randn(2, 7, 32)
    cos, sin = rotary_table(CONFIG, 7)
    q = rotate(attention.query(x).view(2, 7, 4, 8).transpose(1, 2), cos, sin)
    k = rotate(attention.key(x).view(2, 7, 2, 8).transpose(1, 2), cos, sin).repeat_interleave(2, dim=1)
    v = attention.value(x).view(2, 7, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 32))
    torch.testing.assert_close(attention(x, cos, sin), expected)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cos, sin = rotary_table(CONFIG, 64)
    q, k = torch.randn(8), torch.randn(8)

    def product(i: int, j: int) -> float:
        return float(rotate(q, cos[i], sin[i]) @ rotate(k, cos[j], sin[j]))

    assert product(10, 3) == pytest.approx(product(47, 40), abs=1e-5)
    assert product(10, 3) != pytest.approx(product(10, 4), abs=1e-5)


def test_rms_norm_is_torchs() -> None:
    norm = RMSNorm(32, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 32)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-5))


@pytest.mark.parametrize("tied", [True, False])
def test_the_flops_promised_are_those_counted(tied: bool) -> None:
    model = build(CONFIG.model_copy(update={"tied_head": tied}), vocab_size=100)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(TOKENS).sum().backward()
    # plain matmuls compute the whole square of attention, of which the mask keeps half
    attention = 6 * CONFIG.num_layers * 20 * CONFIG.dim
    counted = counter.get_total_flops() / TOKENS.numel()
    dense = flops_per_token(model, 20) - attention
    assert counted == pytest.approx(dense + 2 * attention, rel=1e-9)


def test_hardware_flops_are_what_torch_counts_when_blocks_are_computed_again() -> None:
    model = build(CONFIG, 100)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = recomputed(block, "full")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(TOKENS).sum().backward()
    # of the last product of a block the result is not needed again, and torch leaves it out
    early_stop = 2 * CONFIG.num_layers * CONFIG.dim * CONFIG.ffn_dim
    attention = 8 * CONFIG.num_layers * 20 * CONFIG.dim
    counted = counter.get_total_flops() / TOKENS.numel()
    assert counted == pytest.approx(hardware_flops_per_token(model, 20, "full") + attention - early_stop, rel=1e-9)
    assert hardware_flops_per_token(model, 20, "selective") == flops_per_token(model, 20)
