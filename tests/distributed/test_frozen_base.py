"""A 4-bit base: packed as it is read, the same bits at any world size, through resizes and restores; merged on its way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import train, train_each
from torch import Tensor

from springtide.checkpoint.format import checkpoints, committed, read_manifest
from springtide.checkpoint.load import by_tensor, read_boxes, read_pieces
from springtide.checkpoint.tensors import Box, type_of
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.events import Event, StepDone
from springtide.hf import open_model, read_weights
from springtide.model import as_held, converted, make, merged, packed_shapes
from springtide.run.exchange import export_model
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.evaluate import evaluate_checkpoint
from springtide.training.start_check import check_tensors

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 4


def losses(events: list[Event]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepDone)}


def stored(run: Folder) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint."""
    name = committed(run)[-1]
    found = {}
    for tensor, pieces in by_tensor(read_pieces(run, name, read_manifest(run, name))).items():
        found[tensor] = torch.empty(pieces[0].shape, dtype=type_of(pieces[0].dtype))
        read_boxes(checkpoints(run), pieces, found[tensor], Box((0,) * found[tensor].dim(), pieces[0].shape))
    return found


@pytest.mark.full
def test_a_packed_base_leaves_no_trace_of_resizes_and_goes_out_merged(tiny: Config, ranks: Ranks) -> None:
    step, runs = tiny.tokens_per_step, Folder(tiny.run.root)
    fixed = {"run.id": "base", "parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 0}
    fixed["checkpoint.stage"] = "/dev/shm"
    trunk = tiny.override({**fixed, "train.total": step, "optim.warmup": 0, "train.sample_tokens": 0})
    changes = {"run.id": "whole", "train.start_from": f"{runs.url}/base/checkpoints/step-0000000001"}
    changes |= {"train.start_with": "weights", "train.total": STEPS * step, "checkpoint.every_steps": 2}
    changes |= {"model.adapter": "lora", "model.adapter_rank": 4, "model.adapter_targets": ["*.ffn.*"]}
    whole = trunk.override({**changes, "model.base_precision": "nf4", "optim.peak_lr": 1e-2})
    resized = whole.override({"run.id": "resized"})
    expected = losses(ranks(1, train_each, [trunk, whole])[0][1])
    found = losses(ranks(2, train, resized, 2)[0])
    assert len(found) == 2
    assert found | losses(ranks(1, train, resized)[0]) == expected

    before, state, other = (stored(runs / name) for name in ("base", "whole", "resized"))
    assert other.keys() == state.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    held = {name: one for name, one in state.items() if name in before and name.startswith("model/")}
    assert {one.dtype for one in held.values()} == {torch.float32, torch.bfloat16, torch.uint8}
    for name, one in held.items():
        assert torch.equal(one, as_held(before[name], one.dtype)), f"{name} is what was read, held in fewer bits"
    names = committed(runs / "whole")
    pieces = read_pieces(runs / "whole", names[-1], read_manifest(runs / "whole", names[-1]))
    assert {one.file.split("/")[0] for one in pieces if one.dtype == "U8"} == {names[0]}, "it is written once"

    data = open_data(whole.data)
    check_tensors(whole, data)
    with pytest.raises(ConfigError, match=r"key.weight is F32 .* there and BF16"):
        check_tensors(
            trunk.override({**changes, "model.base_precision": "bf16", "train.start_with": "optimizer"}), data
        )
    counted = whole.override({"train.eval_tokens": 6 * tiny.shards.sequence_length})
    assert evaluate_checkpoint(runs / "whole", counted, names[-1]).heldout_loss > 0
    check_exports(Run(runs / "whole"), whole, state)


def check_exports(run: Run, config: Config, state: dict[str, Tensor]) -> None:
    """Merged, the weights are those of the base that was trained on; alone, the adapter says what that is."""
    run.write_config(config)
    exported, shapes = export_model(run, f"{config.run.root}/merged"), packed_shapes(make(config.model, 257))
    assert shapes
    for name, one in read_weights(open_model(Folder(exported.url))):
        own, prefix = state[f"model/{name}"], f"model/{name.removesuffix('weight')}"
        wanted = converted(own, shapes[name][1], torch.float32) if name in shapes else own.float()
        if f"{prefix}lora_a" in state:
            assert state[f"{prefix}lora_b"].any()
            scale = config.model.adapter_alpha / config.model.adapter_rank
            wanted = merged(wanted, state[f"{prefix}lora_a"], state[f"{prefix}lora_b"], scale)
        assert torch.equal(one, wanted), name
    assert "nf4 in blocks of 64" in Folder(exported.url).read("README.md").decode()
    alone = export_model(run, f"{config.run.root}/alone", format="peft")
    assert "held as nf4 in blocks of 64" in alone.remarks[0]
    assert "Weights under the adapter" in Folder(alone.url).read("README.md").decode()
