"""A run that begins with another's weights has its vocabulary, and is told what else makes them compute something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from prepared import prepare

from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import Meta
from springtide.checkpoint.retention import Rule
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.run.find import remarks_on
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.start_check import check_start


@pytest.fixture
def trunk(tiny: Config) -> str:
    """The URL of a run of ``tiny`` with a checkpoint after five steps, without tensors."""
    run, data = Folder(tiny.run.root) / "trunk", open_data(tiny.data)
    meta = Meta(
        step=5,
        tokens=5 * tiny.tokens_per_step,
        world_size=1,
        order_identity=data.order.identity_at(5),
        config_fingerprint="c",
        tokenizer_digest=data.tokenizer_digest,
    )
    job = CommitJob(run.url, leases.claim(run, "me").term, 0, meta, tiny.model_dump(mode="json"), [], Rule(3))
    PieceWriter(run).write(job, lambda _: memoryview(b""), lambda: False)
    return run.url


def begun(config: Config, trunk: str, **changes: object) -> tuple[Config, list[str]]:
    """What the trunk was saved under, and what is said of a run with its weights and these changes."""
    begins = {
        "run.id": "tuned",
        "train.start_from": f"{trunk}/checkpoints/step-0000000005",
        "train.start_with": "weights",
    }
    config = config.override({**begins, **{key.replace("__", "."): value for key, value in changes.items()}})
    data = open_data(config.data)
    saved = check_start(config, data.order.identity_at, data.tokenizer_digest)
    return saved, remarks_on(saved, config)


@pytest.mark.processes
def test_weights_of_another_vocabulary_are_refused(tiny: Config, poems: str, trunk: str, tmp_path: Path) -> None:
    assert begun(tiny, trunk, shards__dataset=poems) == (tiny, [])
    changes = {"shards.dataset": "", "shards.root": str(tmp_path), "corpus.tokenizer": "bpe", "corpus.vocab_size": 300}
    other = prepare(tiny.override(changes))
    held = sorted((Folder(trunk) / "checkpoints" / "readers").names())
    remedy = f"prepare the new text with corpus.tokenizer = {tiny.shards.dataset}/tokenizer.json"
    with pytest.raises(ConfigError, match=rf"train\.start_from = .*tokenizer .*{remedy}"):
        begun(other, trunk)
    assert sorted((Folder(trunk) / "checkpoints" / "readers").names()) == held
    # what the remedy says works
    mended = {"shards.dataset": "", "corpus.tokenizer": f"{tiny.shards.dataset}/tokenizer.json"}
    begun(prepare(other.override(mended)), trunk)


def test_settings_that_have_weights_compute_something_else_are_told(tiny: Config, trunk: str) -> None:
    changes = {"model__rope_theta": 500_000.0, "model__activation": "gelu", "model__norm_eps": 1e-6}
    _, said = begun(tiny, trunk, **changes, model__init_seed=5, optim__peak_lr=1e-5)
    assert len(said) == 3
    assert all("something else" in one for one in said)
    assert any(one.startswith("model.rope_theta was 10000.0 in ") and " and is 500000.0 here" in one for one in said)


def test_a_new_adapter_changes_nothing_that_is_told(tiny: Config, trunk: str) -> None:
    assert begun(tiny, trunk, model__adapter="lora", model__adapter_rank=2)[1] == []
