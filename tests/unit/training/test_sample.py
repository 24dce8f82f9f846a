"""Text that a run's newest checkpoint writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prepared import prepare
from tokenizers import Tokenizer, processors

from springtide import config as configs
from springtide.api import train
from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import Meta, StagedPiece
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.tensors import named_tensors, raw, type_name
from springtide.config import Config
from springtide.corpus import open_tokenizer
from springtide.dataset import open_dataset
from springtide.eval import Sampling, write
from springtide.model import whole
from springtide.run.folder import Run, open_run
from springtide.storage import Folder
from springtide.stream import open_data
from springtide.training.state import initialize

pytestmark = pytest.mark.processes


def saved(config: Config, model: torch.nn.Module) -> Folder:
    """A run whose only checkpoint has the weights of ``model``."""
    run, tensors, data = Folder(config.run.root) / "sampled", named_tensors(model), open_data(config.data)
    pieces = [
        StagedPiece(name, type_name(tensor.dtype), shape, (0,) * len(shape), shape, 0, raw(tensor).numel())
        for name, tensor in tensors.items()
        if (shape := tuple(tensor.shape))
    ]
    meta = Meta(step=7, tokens=7, world_size=1, order_identity=data.order.identity, config_fingerprint="c")
    job = CommitJob(run.url, leases.claim(run, "me").term, 0, meta, config.model_dump(mode="json"), pieces, Rule(3))
    PieceWriter(run).write(job, lambda piece: memoryview(raw(tensors[piece.tensor]).numpy()), lambda: False)
    run.write(configs.RUN_CONFIG, configs.dump(config))
    return run


def test_a_sample_reads_its_prompt_as_training_would_and_ends_with_its_document(tiny: Config, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(open_tokenizer("bytes", [], 0).to_json())
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A <s>", special_tokens=[("<s>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number}: two roads diverged in a wood. " * 20)
    changes = {"corpus.source": str(tmp_path / "text"), "shards.heldout_fraction": 0.3, "corpus.near_duplicates": False}
    changes |= {"shards.dataset": "", "shards.root": str(tmp_path)}
    changes |= {"corpus.tokenizer": str(tmp_path / "tokenizer.json")}
    config = prepare(tiny.override(changes))
    manifest, vocabulary = open_dataset(config.shards.dataset)
    model = whole(config.model, manifest.vocab_size, manifest.eos_id)
    initialize(model, config.model, manifest.vocab_size, manifest.eos_id)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # so that what was read before shows in what is drawn
    run = open_run(saved(config, model).url)

    def expected(ids: list[int], length: int, temperature: float, seed: int) -> list[int]:
        size, length_of_row = manifest.vocab_size, manifest.sequence_length
        how, ends = Sampling(temperature, seed=seed), [vocabulary.end_of_text]
        return write(model, [ids], length, max_context=length_of_row, vocab_size=size, sampling=how, ends=ends)[0]

    letters = [vocabulary.tokenizer.token_to_id(letter) for letter in "def\u0120"]  # a byte-level space
    prompt = [vocabulary.end_of_text, *letters]  # a text begins after the end of another
    found = train.sample(run, "def ", 24, temperature=0.0)
    assert (found.step, found.prompt) == (7, "def ")
    assert found.text == vocabulary.decode(expected(prompt, 24, 0.0, 0))
    assert found.text != vocabulary.decode(expected([begin, *letters, begin], 24, 0.0, 0))
    # an empty prompt begins a document
    assert train.sample(run, "", 24, 1.0).text == vocabulary.decode(expected([vocabulary.end_of_text], 24, 1.0, 0))
    [seed, ends] = next((seed, one) for seed in range(200) if len(one := expected(prompt, 9, 1000.0, seed)) < 9)
    assert train.sample(run, "def ", 9, temperature=1000.0, seed=seed).text == vocabulary.decode(ends)


def test_a_checkpoint_that_comes_meanwhile_is_not_what_the_sample_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def generate(self: Run, prompt: str, tokens: int, *_: Any, step: int | None = None, **__: Any) -> list[Any]:
        asked.append(step)
        monkeypatch.setattr(Run, "checkpoints", ["step-0000000007", "step-0000000008"])
        return [SimpleNamespace(text="written")]

    monkeypatch.setattr(Run, "checkpoints", ["step-0000000007"])
    monkeypatch.setattr(Run, "generate", generate)
    found = train.sample(Run(Folder(tmp_path)), "def ", 4)
    assert (found.step, asked, found.text) == (7, [7], "written")
