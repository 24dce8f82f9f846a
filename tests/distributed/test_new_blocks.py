"""New blocks between those of a model change nothing at first, learn alone, and go on after a restart at another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import train
from torch import nn

from springtide.checkpoint.format import committed, read_manifest
from springtide.checkpoint.load import load, read_pieces
from springtide.config import Config
from springtide.config.recipes import grow
from springtide.errors import ConfigError
from springtide.events import Evaluated, Started, StepDone
from springtide.model import build
from springtide.run.find import remarks_on
from springtide.storage import Folder
from springtide.stream import Data, open_data
from springtide.training.start_check import check_adapter, check_tensors

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
NEW = (1, 3)
FROM = "step-0000000002"


def base(tiny: Config) -> Config:
    fixed = {"run.id": "base", "parallel.reduction": "fp64", "stream.lanes": 6, "train.eval_tokens": 6 * 64}
    return tiny.override({**fixed, "train.total": 2 * tiny.tokens_per_step, "optim.warmup": 0, "model.num_layers": 2})


def grown(config: Config, name: str, **changes: Any) -> Config:
    groups = [{"match": f"blocks.{number}.*"} for number in NEW] + [{"match": "*", "frozen": True}]
    fixed: dict[str, Any] = {"run.id": name, "train.start_from": f"{config.run.root}/base/checkpoints/{FROM}"}
    fixed |= {"train.start_with": "weights", "train.total": 4 * config.tokens_per_step, "optim.peak_lr": 1e-2}
    fixed |= {"train.new_blocks": NEW, "model.num_layers": 4, "optim.groups": groups, "checkpoint.every_steps": 2}
    return config.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def loaded(run: Folder, config: Config, data: Data, new_blocks: tuple[int, ...] = ()) -> nn.Module:
    """The model of a run's newest checkpoint."""
    model = build(config.model, data.vocab_size, *data.document_ids)
    load(run, committed(run)[-1], model, new_blocks=new_blocks)
    return model


@pytest.mark.full
def test_new_blocks_change_nothing_at_first_and_learn_alone(tiny: Config, ranks: Ranks) -> None:
    trunk = base(tiny)
    last = ranks(1, train, trunk)[0]
    data, run = open_data(trunk.data), Folder(trunk.run.root) / "base"
    config = grown(trunk, "grown")
    ids = torch.from_numpy(data.rows(data.order.batch(data.order.step_after(0)))[1][:2, :64].astype("int64"))
    old, new = loaded(run, trunk, data), loaded(run, config, data, NEW)
    with torch.no_grad():
        assert torch.equal(old(ids), new(ids))
    check_tensors(config, data)
    assert remarks_on(trunk, config) == []
    expected = ranks(1, train, config)[0]
    begun = next(one for one in expected if isinstance(one, Evaluated))
    ended = [one for one in last if isinstance(one, Evaluated)][-1]
    assert (begun.step, begun.heldout_loss) == (0, ended.heldout_loss)
    folder = Folder(config.run.root) / "grown"
    state = loaded(folder, config, data).state_dict()
    places = {0: 0, 1: 2}  # block of the base -> of the grown model
    for name, tensor in old.state_dict().items():
        number, _, rest = name.removeprefix("blocks.").partition(".")
        here = f"blocks.{places[int(number)]}.{rest}" if name.startswith("blocks.") else name
        assert torch.equal(state[here], tensor), f"{here} is frozen"
    for number in NEW:
        for output in ("attention.out.weight", "ffn.down.weight"):
            assert state[f"blocks.{number}.{output}"].abs().max() > 0
    name = committed(folder)[-1]
    pieces = [one.tensor for one in read_pieces(folder, name, read_manifest(folder, name))]
    assert {one.split("/")[1].split(".")[1] for one in pieces if one.startswith("optim/")} == {"1", "3"}
    found = {}
    resized = grown(trunk, "resized")
    for size, stop in ((2, 2), (1, 0)):
        events = ranks(size, train, resized, stop)[0]
        assert [one.step for one in events if isinstance(one, Started)] == [len(found)]
        found |= {one.step: one.loss for one in events if isinstance(one, StepDone)}
    assert found == {one.step: one.loss for one in expected if isinstance(one, StepDone)}
    other = loaded(Folder(config.run.root) / "resized", resized, data).state_dict()
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    for changes, said in (
        ({"train__new_blocks": (1,)}, "the checkpoint lacks"),
        ({"train__new_blocks": (0, 1, 3)}, "the model has no place for"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_tensors(grown(trunk, "other", **changes), data)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__start_with": "state"}, "are put between weights of another run"),
        ({"model__adapter": "lora"}, r"not for model\.adapter = 'lora'"),
        ({"objective__anchor": "l2sp"}, "have no weights to be kept near to"),
        ({"train__new_blocks": (3, 1)}, r"new_blocks = \[3, 1\]: are not some of the 4 blocks"),
        ({"train__new_blocks": (4,)}, "are not some of the 4 blocks"),
        ({"train__new_blocks": (0, 1, 2, 3)}, "are not some of the 4 blocks"),
        ({"model__window": 32, "model__global_every": 2}, "make block 2 another kind of layer than it was"),
    ],
)
def test_new_blocks_that_cannot_be_are_refused_by_name(tiny: Config, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_adapter(grown(base(tiny), "other", **changes))


def test_the_recipe_puts_a_new_block_after_every_four(tiny: Config) -> None:
    found = grow(tiny.override({"model.num_layers": 8}), "runs/mine")
    assert (found.train.new_blocks, found.model.num_layers) == ((4, 9), 10)
    assert [(one.match, one.frozen) for one in found.optim.groups] == [
        *(("blocks.4.*", False), ("blocks.9.*", False), ("*", True)),
    ]
