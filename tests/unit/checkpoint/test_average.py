"""Averages of the weights of checkpoints: the mean of each element, in bounded memory, as a checkpoint that others can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from springtide.checkpoint import Checkpointer
from springtide.checkpoint.averages import AVERAGE, MissingAverage
from springtide.checkpoint.checkpoint_mean import average_checkpoints
from springtide.checkpoint.format import AVERAGED, committed
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.load import Mismatch, load
from springtide.config import Config
from springtide.errors import CheckpointError, ConfigError
from springtide.storage import Folder
from springtide.training.start_check import check_start

pytestmark = pytest.mark.processes

STEPS = (1, 2, 3)


class Odd(nn.Module):
    """Tensors of several types and sizes."""

    def __init__(self, wide: int = 300) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(7, wide))
        self.short = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def saved(
    folder: Folder, wide: int = 300, steps: tuple[int, ...] = STEPS, ema: bool = True
) -> list[dict[str, torch.Tensor]]:
    """Save random weights at each step; return them."""
    model, found = Odd(wide), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(folder.url, keep_last=9) as checkpoints:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
                if ema:
                    optimizer.state[parameter][AVERAGE] = parameter.detach() * 2
            model.count.fill_(step)
            checkpoints.save(step, model, optimizer)
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize("part_bytes", [1, 1300, 2**20])
def test_each_element_is_the_mean_however_small_the_parts(tmp_path: Path, part_bytes: int) -> None:
    run, to = Folder(str(tmp_path / "run")), Folder(str(tmp_path / "to"))
    weights = saved(run)
    names = committed(run)[-2:]
    manifest = average_checkpoints(run, names, to, {}, part_bytes=part_bytes)
    assert committed(to) == [names[-1]]
    assert manifest.meta.labels[AVERAGED] == " ".join(names)
    assert manifest.meta.chain == ""
    files = [size["size_bytes"] for file, size in manifest.files.items() if file.endswith("safetensors")]
    assert len(files) == manifest.meta.world_size == {1: 15, 1300: 7, 2**20: 1}[part_bytes]
    assert [one.state for one in inspect(to, verify=True)] == ["committed"]
    model = Odd()
    load(to, names[-1], model)
    for name, value in model.state_dict().items():
        mean = torch.stack([one[name].double() for one in weights[-2:]]).mean(0)
        expected = weights[-1][name] if name == "count" else mean.to(value.dtype)
        assert torch.equal(value, expected), name
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(Mismatch, match="optim/"):
        load(to, names[-1], model, optimizer)


def test_moving_averages_of_one_checkpoint_are_written_as_they_are(tmp_path: Path) -> None:
    run, to = Folder(str(tmp_path / "run")), Folder(str(tmp_path / "to"))
    weights, model = saved(run), Odd()
    average_checkpoints(run, committed(run)[-1:], to, {}, ema=True)
    load(to, committed(to)[0], model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[-1][name] * (1 if name == "count" else 2)), name
    plain = Folder(str(tmp_path / "plain"))
    saved(plain, ema=False)
    with pytest.raises(MissingAverage):
        average_checkpoints(plain, committed(plain), Folder(str(tmp_path / "none")), {}, ema=True)
    assert not (tmp_path / "none").exists()


def test_other_models_and_bad_bytes_write_no_checkpoint(tmp_path: Path) -> None:
    run, to = Folder(str(tmp_path / "run")), Folder(str(tmp_path / "to"))
    saved(run, wide=300, steps=(1,))
    other = Folder(str(tmp_path / "other"))
    saved(other, wide=301, steps=(2,))
    (tmp_path / "other/checkpoints/step-0000000002").rename(tmp_path / "run/checkpoints/step-0000000002")
    with pytest.raises(CheckpointError, match=r"step-0000000002.*step-0000000001.*model/matrix"):
        average_checkpoints(run, committed(run), to, {})
    assert not (tmp_path / "to").exists()
    [file] = (tmp_path / "run/checkpoints/step-0000000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 1000] ^= 1  # in the matrix
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="digest expected"):
        average_checkpoints(run, ["step-0000000001"], to, {})
    assert committed(to) == []


def test_a_branch_cannot_begin_with_weights_alone(tmp_path: Path) -> None:
    run, to = Folder(str(tmp_path / "run")), Folder(str(tmp_path / "to"))
    saved(run)
    average_checkpoints(run, committed(run), to, {})
    config = Config().override({"train.start_from": f"{to.url}/checkpoints/{committed(to)[0]}"})
    with pytest.raises(ConfigError, match=r"step-.*train\.start_with = weights"):
        check_start(config, lambda _: "", "")
    assert check_start(config.override({"train.start_with": "weights"}), lambda _: "", "") == Config()
