"""The text at the end of a run is written by its ranks, and is what a checkpoint would write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from loops import train

from springtide import config as configs
from springtide.api.train import sample
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.eval import text_model
from springtide.events import Event, Sampled, Stopped, Warned
from springtide.model import make, num_parameters
from springtide.run.folder import open_run
from springtide.storage import Folder
from springtide.storage.host_limits import free_bytes

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]


def short(tiny: Config, **changes: Any) -> Config:
    dotted = {"train.total": 12 * 64 * 4, "optim.warmup": 12 * 64, "train.eval_tokens": 0, "run.id": "sampled"}
    return tiny.override(dotted | changes)


def last_two(events: list[Event]) -> tuple[Event, Event]:
    found = [event for event in events if isinstance(event, Sampled | Warned | Stopped)]
    assert len(found) == 2
    return found[0], found[1]


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (2, {"parallel.recompute": "full"}),
        pytest.param(3, {"shards.sequence_length": 64, "train.sample_tokens": 80}, marks=pytest.mark.full),
    ],
)
def test_ranks_write_what_their_checkpoint_writes(
    tiny: Config, ranks: Ranks, world_size: int, changes: dict[str, Any]
) -> None:
    config = short(tiny, **changes)
    folder = Folder(config.run.root) / config.run.id
    folder.write(configs.RUN_CONFIG, configs.dump(config))
    told = [last_two(events) for events in ranks(world_size, train, config)]
    for sampled, stopped in told:
        assert isinstance(stopped, Stopped)
        assert stopped.status == "finished"
        assert isinstance(sampled, Sampled)
    expected = sample(open_run(folder.url))
    assert {(one.text, one.prompt, one.step) for one, _ in told} == {(expected.text, expected.prompt, 4)}
    assert len(expected.text) > 10


def test_a_vocabulary_that_is_gone_costs_the_sample_and_not_the_run(tiny: Config, ranks: Ranks, tmp_path: Any) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(tiny.shards.dataset, dataset)
    (dataset / "tokenizer.json").unlink()
    for events in ranks(2, train, short(tiny, **{"shards.dataset": str(dataset)})):
        warned, stopped = last_two(events)
        assert isinstance(warned, Warned)
        assert "no sample is written: the tokenizer cannot be read" in warned.reason
        assert isinstance(stopped, Stopped)
        assert stopped.status == "finished"


def test_a_model_larger_than_the_machine_is_refused_by_name(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 4 * num_parameters(make(tiny.model, 257))
    assert free_bytes() > needed
    text_model.check_memory(tiny.model, 257)
    monkeypatch.setattr(text_model, "free_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"model = '2 layers of 64': needs .* in one process, and this machine has"):
        text_model.check_memory(tiny.model, 257)
