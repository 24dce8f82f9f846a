"""Texts that a model writes: with a cache as without one, in a batch as one by one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from families import FAMILIES, SHAPE, VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from springtide.config.engine import ModelConfig
from springtide.errors import CheckpointError, ConfigError
from springtide.eval import Sampling, write, writer
from springtide.eval.sampling import draw
from springtide.model import Decoder, KVCache, build, merged

END, BEGIN, LENGTH = 5, 6, 16
GREEDY = Sampling(temperature=0)
CACHED = [
    (family, False) for family in ("llama3", "linear", "yarn", "qwen3", "mistral", "phi4_mini", "olmo3", "gemma3")
]
CACHED += [(family, True) for family in ("llama2", "gemma2", "phi3")]
"""Families, and whether documents of a row are masked from each other."""
SEPARATORS = [("llama2", ids) for ids in ((END, BEGIN), (BEGIN, BEGIN), (BEGIN, None), (0, 0))]
SEPARATORS += [("mistral", (BEGIN, BEGIN)), ("gemma3", (BEGIN, BEGIN))]
"""Families, and ids that end and that begin a document; 0 is also what pads."""


def model_of(
    family: str = "llama2", documents: bool = False, ids: tuple[int, int | None] = (END, BEGIN), **changes: Any
) -> Decoder:
    """A model with random weights, so large that what was read shows in what is written. ``ids``: that end and that begin a
    document."""
    config = ModelConfig(**{**SHAPE, **FAMILIES[family][1], "tied_head": False, **changes})
    model = build(config, VOCABULARY, *(ids if documents else (None, None))).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


def prompts_of(*lengths: int) -> list[list[int]]:
    torch.manual_seed(2)
    found = [torch.randint(7, VOCABULARY, (length,)).tolist() for length in lengths]
    for ids in found:
        ids[0] = BEGIN
        if len(ids) > 12:
            ids[9:11] = [END, BEGIN]  # another document
    return found


def written(model: nn.Module, prompts: list[list[int]], sampling: Sampling = GREEDY, **more: Any) -> list[list[int]]:
    given = {"max_context": 64, "vocab_size": VOCABULARY, **more}
    return write(model, prompts, given.pop("length", LENGTH), sampling=sampling, **given)


@torch.no_grad()
def without_cache(model: nn.Module, prompt: list[int], length: int = LENGTH) -> list[int]:
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids]))[0, -1, :VOCABULARY].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("family", "documents"), CACHED)
def test_a_cached_batch_of_unequal_prompts_equals_single_texts(family: str, documents: bool) -> None:
    """A batch of unequal prompts is written with a cache as each is alone without one."""
    model, prompts = model_of(family, documents), prompts_of(3, 29, 14, 1)
    together = written(model, prompts)
    assert together == [without_cache(model, prompt) for prompt in prompts]
    assert len({tuple(ids) for ids in together}) == 4
    assert len({drawn for ids in together for drawn in ids}) > 8


@pytest.mark.parametrize(("family", "ids"), SEPARATORS)
def test_a_prompt_reads_its_begin_of_text_in_any_batch(family: str, ids: tuple[int, int | None]) -> None:
    """A prompt reads its begin of text whatever its batch mates are."""
    model, prompts = model_of(family, documents=True, ids=ids), prompts_of(3, 29, 14, 1, 28)
    end, begin = ids[0], ids[0] if ids[1] is None else ids[1]
    prompts = [[{END: end, BEGIN: begin}.get(one, one) for one in prompt] for prompt in prompts]
    assert written(model, prompts) == [without_cache(model, prompt) for prompt in prompts]
    padding = [29 - len(prompt) for prompt in prompts]
    rows = torch.tensor([[0] * pads + prompt for pads, prompt in zip(padding, prompts, strict=True)])
    with torch.no_grad():
        together = model(rows, past=KVCache(len(model.blocks), torch.tensor(padding)))
        for row, prompt in enumerate(prompts):
            alone = model(torch.tensor([prompt]))[0]
            torch.testing.assert_close(together[row, padding[row] :], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "documents"), [("llama2", True), ("gemma2", False), ("gemma3", True)])
def test_long_prompts_are_read_in_parts_which_bound_the_attention_mask(
    family: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = model_of(family, documents), prompts_of(3, 29, 14, 1, 40)
    whole = written(model, prompts, max_context=48)  # outgrown while they are written
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[1]))
    for pairs, most in ((700, 3), (1, 1)):
        sizes.clear()
        monkeypatch.setattr(writer, "_MASK_PAIRS", pairs)
        assert written(model, prompts, max_context=48) == whole
        assert max(sizes) == most


def test_a_draw_depends_on_the_seed_and_its_row_alone() -> None:
    """What is drawn depends on the seed and on no other row."""
    model, prompts = model_of(), prompts_of(4, 20, 9)
    for sampling in (Sampling(1.3, seed=5), Sampling(1.3, 9, seed=5), Sampling(1.3, 0, 0.7, seed=5)):
        together = written(model, prompts, sampling)
        assert together == written(model, prompts, sampling)
        for row, prompt in enumerate(prompts):
            alone = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, 5 + row)
            assert together[row] == written(model, [prompt], alone)[0]
    assert len({tuple(written(model, prompts[:1], Sampling(1.3, seed=seed))[0]) for seed in range(8)}) == 8


@pytest.mark.parametrize("sampling", [Sampling(0.7), GREEDY, Sampling(1.3, 9), Sampling(1.3, 0, 0.8)])
def test_the_same_logits_and_seed_give_the_same_id(sampling: Sampling) -> None:
    """The same logits and seed give the same id whatever the other rows are."""
    torch.manual_seed(3)
    logits = torch.randn(8, 50)
    together = draw(logits, sampling, sampling.generators(8))
    seeds = [dataclasses.replace(sampling, seed=row) for row in range(8)]
    alone = [draw(logits[row : row + 1], one, one.generators(1))[0] for row, one in enumerate(seeds)]
    assert together == alone
    assert len(set(together)) > 3


def test_a_text_that_outgrows_the_context_keeps_its_later_half() -> None:
    """A text that outgrows the context goes on from its later half."""
    model, prompts = model_of(), prompts_of(8, 3)
    long = written(model, prompts, max_context=12)
    assert [len(ids) for ids in long] == [LENGTH, LENGTH]
    ids = list(prompts[0])
    begin = 0
    with torch.no_grad():
        for _ in range(LENGTH):
            if len(ids) - begin > 12:
                begin = len(ids) - 6
            ids.append(int(model(torch.tensor([ids[begin:]]))[0, -1, :VOCABULARY].argmax()))
    assert long[0] == ids[8:]
    assert [written(model, [prompt], max_context=12)[0] for prompt in prompts] == long


def test_a_row_that_has_ended_leaves_the_others_as_they_are() -> None:
    model, prompts = model_of(), prompts_of(5, 16, 9)
    whole = written(model, prompts)
    end = whole[1][6]
    cut = [ids[: ids.index(end)] if end in ids else ids for ids in whole]
    assert written(model, prompts, ends=[end]) == cut
    seen: list[tuple[int, int]] = []

    def listen(row: int, drawn: int) -> bool:
        seen.append((row, drawn))
        return row == 0 and len([one for one in seen if one[0] == 0]) == 3

    assert written(model, prompts, listen=listen) == [whole[0][:3], *whole[1:]]
    assert [drawn for row, drawn in seen if row == 2] == whole[2]
    assert written(model, prompts, length=0) == [[], [], []]


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_an_adapted_model_writes_what_the_merged_one_does(adapter: str) -> None:
    model = model_of(adapter=adapter, adapter_rank=4, adapter_alpha=8.0)
    plain = model_of()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".magnitude"):
                parameter.add_(1.0)
        for name, parameter in plain.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            weight = model.get_parameter(name)
            if hasattr(module, "lora_a"):
                weight = merged(weight, module.lora_a, module.lora_b, module.scale, module.magnitude)
            parameter.copy_(weight)
    prompts = prompts_of(4, 15)
    assert written(model, prompts) == written(plain, prompts)
    assert written(model, prompts) != written(model_of(), prompts)


def test_a_model_of_ones_own_needs_no_cache() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of("mistral")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids)

    prompts = prompts_of(4, 15, 9)
    assert written(Own(), prompts) == written(model_of("mistral"), prompts)


def test_draws_come_from_the_likeliest() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()[None]

    def drawn(**how: Any) -> list[float]:
        sampling = Sampling(seed=0, **how)
        generators = sampling.generators(1)
        found = [draw(logits, sampling, generators)[0] for _ in range(1000)]
        return [found.count(index) / len(found) for index in range(4)]

    assert drawn() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.05)
    assert drawn(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.05)
    assert drawn(top_p=0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.05)
    assert drawn(top_p=1e-9) == [0, 1, 0, 0]
    assert drawn(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30], abs=0.05)
    assert drawn(temperature=0.0, top_k=3) == [0, 1, 0, 0]
    assert drawn(top_k=100) == drawn()


EXTREMES = [5e-324, 1e-46, 1e-45, 1e-38, 2e-38, 1e-30, 1e-7, 0.5, 1.0]


@given(
    temperature=st.one_of(st.sampled_from([0.0, *EXTREMES, 1e38, 1e300]), st.floats(0, allow_infinity=False)),
    top_k=st.sampled_from([0, 1, 2, 5, 10**30]),
    top_p=st.one_of(st.sampled_from(EXTREMES), st.floats(0, 1, exclude_min=True)),
    logits=st.lists(
        st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.just(-math.inf)), max_size=9
    ),
)
def test_no_sampling_that_is_allowed_fails(temperature: float, top_k: int, top_p: float, logits: list[float]) -> None:
    row = torch.tensor([*logits, 1.0])
    sampling = Sampling(temperature, top_k, top_p)
    [found] = draw(row[None], sampling, sampling.generators(1))
    assert row[found] > -math.inf
    if temperature < 1e-38 or top_p < 1e-30:
        assert row[found] == row.max()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, r"temperature = -1\.0: must be at least 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1: must be at least 0"),
        ({"top_p": 0.0}, r"top_p = 0\.0: is not above 0 and at most 1"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**how)
    nothing = Sampling()
    for logit in (math.nan, math.inf):
        with pytest.raises(CheckpointError, match="logits"):
            draw(torch.tensor([[1.0, logit, 2.0]]), nothing, nothing.generators(1))
