"""A checkpoint of one layout and world size is the same, bit for bit, in every other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import load_another_model, load_in, save_in
from ranks import each, run_here
from safetensors import safe_open

from springtide.checkpoint.format import committed, read_index, read_manifest
from springtide.checkpoint.inspect import inspect
from springtide.storage import Folder

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


SAVED = {4: ["fsdp", "hsdp"], 3: ["columns"]}
"""In which layouts a number of ranks saves the state; a process alone saves it, too."""
LOADED = {
    2: [("fsdp", "fsdp"), ("columns", "fsdp"), ("columns", "columns")],
    3: [("fsdp", "fsdp"), ("fsdp", "columns"), ("hsdp", "fsdp"), ("single", "fsdp")],
    4: [("fsdp", "hsdp"), ("hsdp", "hsdp"), ("single", "hsdp")],
    8: [("fsdp", "fsdp")],
}
"""As saved in which layout, and in which it is loaded by a number of ranks; a process alone loads each, too."""


def test_any_layout_at_any_world_size(tmp_path: Path, ranks: Ranks) -> None:
    for world_size, layouts in SAVED.items():
        ranks(world_size, each, [(save_in, (layout, str(tmp_path / layout))) for layout in layouts])
    run_here(save_in, "single", str(tmp_path / "single"))
    expected = run_here(load_in, "single", str(tmp_path / "single"))
    assert len(expected) == 6 + 4 * 3  # weights and the persistent buffer; two moments and a count of each that trains
    numbers = torch.cat(
        [tensor.double().flatten() for name, tensor in sorted(expected.items()) if "narrow" not in name]
    )
    assert len(numbers.unique()) == len(numbers)
    alone = [("fsdp", "single"), ("hsdp", "single"), ("columns", "single"), ("fsdp", "fsdp")]
    found = {1: [[run_here(load_in, layout, str(tmp_path / saved)) for saved, layout in alone]]}
    for world_size, loads in LOADED.items():
        found[world_size] = ranks(
            world_size, each, [(load_in, (layout, str(tmp_path / saved))) for saved, layout in loads]
        )
    for world_size, of_ranks in found.items():
        for of_rank in of_ranks:
            for load, tensors in zip(LOADED.get(world_size, alone), of_rank, strict=True):
                assert tensors.keys() == expected.keys()
                for name, tensor in expected.items():
                    assert torch.equal(tensors[name], tensor), (load, world_size, name)


def test_another_model_is_refused_and_every_name_is_told(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, save_in, "fsdp", str(tmp_path))
    said = run_here(load_another_model, str(tmp_path))
    assert "the checkpoint lacks " in said
    assert "model/third.bias, model/third.weight" in said
    assert "the model has no place for model/second.weight" in said
    assert "model/narrow is BF16 (5, 4) there and BF16 (5, 3) here" in said
    assert committed(Folder(tmp_path)), "a good checkpoint does not go to quarantine for it"


def test_what_has_not_changed_is_not_written_again(tmp_path: Path, ranks: Ranks) -> None:
    run = Folder(tmp_path)
    for written in ranks(2, each, [(save_in, ("fsdp", str(tmp_path), step)) for step in (5, 10, 15, 20)]):
        assert all(written)
    assert committed(run) == ["step-0000000015", "step-0000000020"]
    first, last = read_manifest(run, "step-0000000015"), read_manifest(run, "step-0000000020")
    assert first.size_bytes == last.size_bytes
    where = {}
    for name in last.indexes:
        _, pieces = read_index(run / "checkpoints" / "step-0000000020", name)
        where |= {(piece.tensor, piece.offsets): piece.file.split("/")[0] for piece in pieces}
    assert {where[place] for place in where if place[0] in ("model/frozen", "model/table")} == {"step-0000000005"}
    assert {where[place] for place in where if place[0] == "model/first.weight"} == {"step-0000000020"}
    # what is referred to outlives the checkpoint that it was written for, and nothing else of that does
    left = {f"step-0000000005/{name}" for name in (run / "checkpoints" / "step-0000000005").names()}
    assert left == {name for name in {*first.refers, *last.refers} if name.startswith("step-0000000005")}
    assert [one.state for one in inspect(run, verify=True)] == ["referred", "referred", "committed", "committed"]
    # on another number of ranks the boxes of what is sharded are others, those of what is not are the same
    ranks(3, each, [(save_in, ("fsdp", str(tmp_path), step)) for step in (25, 30)])
    refers = read_manifest(run, "step-0000000030").refers
    assert {name.split("/")[0] for name in refers} == {"step-0000000005", "step-0000000025"}
    assert len((run / "checkpoints" / "step-0000000005").names()) == 1


def test_any_tool_that_knows_safetensors_opens_the_files(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, save_in, "fsdp", str(tmp_path))
    alone = run_here(load_in, "single", str(tmp_path))
    seen = set()
    for file in tmp_path.glob("checkpoints/*/*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                seen.add(name)
                assert opened.get_tensor(name).dtype == alone[name].dtype
    assert seen == alone.keys()
