"""A run that trains from an imported model, at several world sizes, and the model that it exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import their_model
from loops import train

from springtide import config as configs
from springtide.checkpoint.format import read_manifest
from springtide.checkpoint.load import load
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.model import build
from springtide.run.exchange import export_model, import_model
from springtide.run.folder import Run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.start_check import check_start, check_tensors

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
IDS = 330
"""More than the dataset has, and not a multiple of 64."""


def test_a_run_from_an_import_exports_the_same_bytes_at_1_and_3_workers(
    tiny: Config, tmp_path: Path, ranks: Ranks
) -> None:
    theirs = their_model("qwen3", IDS)
    theirs.save_pretrained(tmp_path / "in")
    text = (Path(tiny.shards.dataset) / "tokenizer.json").read_text()
    (tmp_path / "in/tokenizer.json").write_text(text)
    imported = import_model(str(tmp_path / "in"), str(tmp_path / "imported"))
    assert imported.config.corpus.tokenizer == str(tmp_path / "imported/tokenizer.json")
    assert (tmp_path / "imported/tokenizer.json").read_text() == text

    changes = {f"model.{key}": value for key, value in imported.config.model.model_dump().items()}
    changes |= {"train.start_from": f"{tmp_path}/imported/checkpoints/step-0000000000", "optim.warmup": 0}
    changes |= {"train.start_with": "weights", "train.total": 3 * tiny.tokens_per_step, "train.eval_tokens": 0}
    changes |= {"checkpoint.every_steps": 3, "parallel.reduction": "fp64"}
    config = tiny.override(changes)
    data = open_data(config.data)
    check_start(config, data.order.identity_at, data.tokenizer_digest)
    check_tensors(config, data)
    with pytest.raises(ConfigError, match=r"holds imported weights and no state of an optimizer.*start_with = weights"):
        check_start(config.override({"train.start_with": "state"}), data.order.identity_at, "")

    weights = []
    for workers in (1, 3):
        mine = config.override({"run.id": f"tuned-{workers}"})
        ranks(workers, train, mine)
        run = Run(Folder(mine.run.root) / mine.run.id)
        run.folder.write(configs.RUN_CONFIG, configs.dump(mine))
        assert read_manifest(run.folder, run.checkpoints[-1]).meta.world_size == workers
        found = export_model(run, str(tmp_path / f"out-{workers}"))
        assert (found.architecture, found.remarks) == ("Qwen3ForCausalLM", ())
        weights.append((tmp_path / f"out-{workers}/model.safetensors").read_bytes())
    assert weights[0] == weights[1]

    model, tokens = build(config.model, data.vocab_size), torch.randint(0, data.vocab_size, (2, 32))
    load(run.folder, run.checkpoints[-1], model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out-3", attn_implementation="eager").eval()
    with torch.no_grad():
        trained, exported, before = model(tokens), again(tokens).logits, theirs(tokens).logits
    torch.testing.assert_close(exported, trained, atol=1e-5, rtol=0.0)
    assert (trained - before).abs().max() > 1e-3

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out-3")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    assert tokenizer.eos_token_id == again.config.eos_token_id == data.corpora[0].manifest.end_of_text
    card = (tmp_path / "out-3/README.md").read_text()
    meta = read_manifest(run.folder, run.checkpoints[-1]).meta
    digest = data.corpora[0].manifest.digest
    for told in ("tuned-3", meta.chain, digest, "step-0000000003", "imported/checkpoints/step-0000000000"):
        assert told in card


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param("qwen3", "dora", marks=pytest.mark.full), ("phi4_mini", "lora")]
)
def test_an_adapter_goes_out_merged_and_alone(
    family: str, kind: str, tiny: Config, tmp_path: Path, ranks: Ranks
) -> None:
    theirs = their_model(family, IDS)
    theirs.save_pretrained(tmp_path / "in")
    imported = import_model(str(tmp_path / "in"), str(tmp_path / "imported"))
    changes = {f"model.{key}": value for key, value in imported.config.model.model_dump().items()}
    changes |= {"train.start_from": f"{tmp_path}/imported/checkpoints/step-0000000000", "optim.warmup": 0}
    changes |= {"train.start_with": "weights", "train.total": 3 * tiny.tokens_per_step, "train.eval_tokens": 0}
    changes |= {"model.adapter": kind, "model.adapter_rank": 4, "optim.peak_lr": 1e-2, "optim.ema_half_life": 5000}
    config = tiny.override({**changes, "model.adapter_targets": ["*.query.*", "*.value.*", "blocks.1.ffn.down.*"]})
    ranks(2, train, config)
    run = Run(Folder(config.run.root) / config.run.id)
    run.folder.write(configs.RUN_CONFIG, configs.dump(config))
    model, tokens = build(config.model, IDS), torch.randint(0, IDS, (2, 32))
    load(run.folder, run.checkpoints[-1], model)
    export_model(run, str(tmp_path / "merged"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        trained, exported, before = model(tokens), again(tokens).logits, theirs(tokens).logits
    torch.testing.assert_close(exported, trained, atol=1e-5, rtol=0.0)
    assert (trained - before).abs().max() > 1e-3
    if family == "phi4_mini":
        with pytest.raises(ConfigError, match=r"query.weight is adapted, a part of a matrix there.*use hf"):
            export_model(run, str(tmp_path / "alone"), format="peft")
        assert not (tmp_path / "alone").exists()
        return
    found = export_model(run, str(tmp_path / "alone"), format="peft")
    assert found.size_bytes < 0.2 * (tmp_path / "merged/model.safetensors").stat().st_size
    assert str(tmp_path / "in") in found.remarks[0]
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "alone").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, trained, atol=1e-5, rtol=0.0)
    both = import_model(str(tmp_path / "in"), str(tmp_path / "both"), str(tmp_path / "alone"))
    assert set(both.config.model.adapter_targets) == {
        *("blocks.*.attention.query.weight", "blocks.*.attention.value.weight", "blocks.1.ffn.down.weight"),
    }
    load(both.folder, both.checkpoints[-1], model)
    with torch.no_grad():
        assert torch.equal(model(tokens), trained)
    further = config.override({"run.id": "further", "train.start_from": f"{tmp_path}/both/checkpoints/step-0000000000"})
    ranks(2, train, further)  # its adapter is trained on
    last = Run(Folder(further.run.root) / "further")
    load(last.folder, last.checkpoints[-1], model)
    with torch.no_grad():
        assert (model(tokens) - trained).abs().max() > 1e-4
    averaged = export_model(run, str(tmp_path / "averaged"), ema=True, format="peft")
    assert averaged.size_bytes == found.size_bytes
    weights = [(tmp_path / one / "adapter_model.safetensors").read_bytes() for one in ("alone", "averaged")]
    assert weights[0] != weights[1]
    export_model(run, str(tmp_path / "alone"))  # replaces it
    assert not list((tmp_path / "alone").glob("adapter*"))
    with pytest.raises(ConfigError, match="needs an adapter, and this run has none"):
        export_model(imported, str(tmp_path / "none"), format="peft")
