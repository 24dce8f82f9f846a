"""Token ids that people have already train to the losses of the text they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import token_files
from loops import train_each
from prepared import prepare, write_corpus

from springtide.config import Config
from springtide.corpus import open_tokenizer
from springtide.events import Evaluated, StepDone

pytestmark = pytest.mark.distributed
LAYOUTS = ("text", "megatron", "mds", "npy")


@pytest.mark.full
def test_each_layout_trains_to_the_same_losses(tiny: Config, tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    folders = {name: tmp_path / name for name in LAYOUTS}
    texts = write_corpus(folders["text"])
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(open_tokenizer("bpe", texts, 400).to_json())
    vocabulary = open_tokenizer(str(tokenizer), (), 0)
    ids = [one[:-1] for one in vocabulary.encode(texts)]
    for name in LAYOUTS[1:]:
        folders[name].mkdir()
    token_files.megatron(folders["megatron"], ids)
    token_files.mds(folders["mds"], ids)
    np.save(folders["npy"] / "a.npy", token_files.array(ids, vocabulary.end_of_text))

    changes = {"shards.dataset": "", "corpus.max_files": 0, "corpus.tokenizer": str(tokenizer)}
    runs = [
        prepare(tiny.override({**changes, "corpus.source": str(folder), "run.id": name}))
        for name, folder in folders.items()
    ]
    assert len({run.shards.dataset for run in runs}) == len(LAYOUTS), "none is the other's dataset"
    [trained] = ranks(1, train_each, runs)
    losses = [[(event.step, event.loss) for event in events if isinstance(event, StepDone)] for events in trained]
    assert [step for step, _ in losses[0]] == list(range(1, runs[0].num_steps + 1))
    assert losses[0][0][1] > losses[0][-1][1]
    assert losses.count(losses[0]) == len(LAYOUTS), "the same bits"
    held_out = [[event.losses for event in events if isinstance(event, Evaluated)] for events in trained]
    assert held_out.count(held_out[0]) == len(LAYOUTS)
