"""Local layers: what a window hides, in whole rows, between documents, and in a text that is read in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from springtide import config as configs
from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError
from springtide.model import Decoder, KVCache, build, flops_per_token, hardware_flops_per_token, skeleton
from springtide.model import attention as attention_of
from springtide.planning import step_memory as memory_estimate
from springtide.planning.step_memory import predicted_bytes

SIZES: dict[str, Any] = {"num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}
LOCAL = ModelConfig(**SIZES, max_sequence_length=64, window=5, global_every=3, local_rope_theta=100.0)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
"""Of logits of some tens."""
TOKENS = torch.randint(0, 98, (2, 40), generator=torch.Generator().manual_seed(1))


def lively(config: ModelConfig, **options: Any) -> Decoder:
    """A model whose attention is far from uniform."""
    model = build(config, 100, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    return model


@pytest.fixture(params=[512, 6], ids=["one part", "parts"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_of, "_QUERIES_AT_ONCE", request.param)


def test_local_layers_follow_the_pattern() -> None:
    windows = [LOCAL.model_copy(update={"global_every": every}) for every in (0, 1, 2, 3)]
    found = [[config.window_of(layer) for layer in range(4)] for config in windows]
    assert found == [[5, 5, 5, 5], [0, 0, 0, 0], [5, 0, 5, 0], [5, 5, 0, 5]]


@given(length=st.integers(1, 20), known=st.integers(0, 20), window=st.integers(1, 12), cap=st.sampled_from([0.0, 2.0]))
def test_a_window_is_a_mask(length: int, known: int, window: int, cap: float) -> None:
    config = LOCAL.model_copy(update={"attention_cap": cap})
    generator = torch.Generator().manual_seed(length)
    local, dense = attention_of.Attention(config, window), attention_of.Attention(config)
    q, k, v = (torch.randn(2, heads, known + length, 8, generator=generator) for heads in (4, 2, 2))
    index = torch.arange(known + length)
    distance = index[:, None] - index
    near = ((distance >= 0) & (distance < window))[None, None]
    apart = (index[:, None] // 7 == index // 7)[None, None]
    for mask in (None, apart):
        expected = dense._attend(q, k, v, near if mask is None else near & mask)[:, :, known:]
        causal = None if mask is None and not known else (distance >= 0)[None, None] & (True if mask is None else mask)
        here = None if causal is None else causal[:, :, known:]
        for least in (512, 3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attention_of, "_QUERIES_AT_ONCE", least)
                torch.testing.assert_close(local._attend(q[:, :, known:], k, v, here), expected)


@pytest.mark.usefixtures("at_once")
def test_a_token_reaches_no_further_than_the_windows_of_its_layers() -> None:
    model = lively(LOCAL.model_copy(update={"global_every": 0, "num_layers": 2}))
    changed = TOKENS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 98
    differs = (model(TOKENS) != model(changed)).any(-1).any(0).nonzero().flatten().tolist()
    assert differs == list(range(10, 10 + 2 * (5 - 1) + 1))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_documents_packed_into_a_row_are_computed_as_if_alone(cap: float) -> None:
    config = LOCAL.model_copy(update={"attention_cap": cap})
    ends = torch.tensor([99])
    parts = [torch.cat([ends, TOKENS[0, :length], ends]) for length in (9, 1, 21)]
    packed = lively(config, eos_id=99, bos_id=99)(torch.cat(parts)[None])
    alone = torch.cat([lively(config)(part[None]) for part in parts], dim=1)
    torch.testing.assert_close(packed, alone, **CLOSE)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("eos_id", [None, 99])
def test_a_text_read_in_parts_has_the_logits_of_the_whole(eos_id: int | None) -> None:
    model, tokens = lively(LOCAL, eos_id=eos_id), TOKENS[:1].clone()
    tokens[0, [6, 7, 13, 14]] = 99
    past, parts = KVCache(LOCAL.num_layers), []
    with torch.no_grad():
        for begin, end in ((0, 8), (8, 9), (9, 10), (10, 25), (25, 40)):
            parts.append(model(tokens[:, begin:end], past=past))
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), **CLOSE)
    kept = [block._seen[0].shape[2] for block in past.blocks if block._seen is not None]
    assert kept == [4, 4, 40]  # what the next token attends to, and itself


def test_flops_and_products_know_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_of, "_QUERIES_AT_ONCE", 8)
    config = LOCAL.model_copy(update={"window": 8, "max_sequence_length": 512})
    everything = config.model_copy(update={"window": 0, "global_every": 0, "local_rope_theta": 0.0})
    model, whole = skeleton(config, 100), skeleton(everything, 100)
    length = 512
    pairs = 2 * sum(min(token + 1, 8) for token in range(length)) + sum(range(1, length + 1))
    promised = flops_per_token(model, length) - flops_per_token(whole, length)
    assert promised == pytest.approx(12 * 32 * (pairs / length - 3 * length / 2), rel=0.01)
    again = hardware_flops_per_token(model, length, "full") - flops_per_token(model, length)
    assert again < hardware_flops_per_token(whole, length, "full") - flops_per_token(whole, length)
    rows, counted = torch.zeros(1, length, dtype=torch.int64), []
    for one in (build(config, 100), build(everything, 100)):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            one(rows)
        counted.append(counter.get_total_flops())
    spared = counted[1] - counted[0]  # two of three layers compute at most 15 keys a query, not 512
    assert spared == pytest.approx(2 * 4 * 32 * length * (length - 15), rel=0.01)


def test_the_memory_forecast_knows_windows_and_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_of, "_QUERIES_AT_ONCE", 128)
    sizes = {"model.num_layers": 5, "shards.sequence_length": 512, "train.micro_batch": 2, "stream.global_batch": 2}
    base = configs.recipes.tiny().override({**sizes, "elastic.max_workers": 1})

    def foretold(**changes: Any) -> int:
        return predicted_bytes(base.override({f"model.{name}": value for name, value in changes.items()}), 257, None, 1)

    local = {"attention_cap": 50.0, "window": 128, "global_every": 5}
    scores = 5 * 2 * 4 * 512**2 * 4
    capped, windows = foretold(attention_cap=50.0), foretold(**local)
    assert capped - foretold() > scores
    assert windows < capped - scores / 3
    # deeper models are extrapolated from their local and their global layers
    monkeypatch.setattr(memory_estimate, "_MORE", 99)
    assert foretold(**local) == pytest.approx(windows, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"global_every": 2}, r"model\.global_every = 2: needs local layers.*set model\.window"),
        ({"local_rope_theta": 1e4}, r"model\.local_rope_theta = 10000\.0: needs local layers"),
        ({"rotary_fraction": 0.4}, r"model\.rotary_fraction = 0\.4: rotates 3\.2 of 8 features.*even number"),
        ({"rope_scaling": "yarn", "rope_theta": 1.0}, r"model\.rope_theta = 1\.0: .*yarn.*use more than 1"),
        ({"base_width": 16, "score_width": 8}, r"model\.base_width = 16: .*model\.score_width = 8 fixes its scale"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], problem: str) -> None:
    sizes = {f"model.{name}": value for name, value in {**SIZES, **changes}.items()}
    with pytest.raises(ConfigError, match=problem):
        configs.Config().override(sizes)
