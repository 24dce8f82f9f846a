"""Models of each family come in from transformers and go out again with the same logits; nothing here needs transformers but
the models that are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, LENGTH, VOCABULARY, their_model

from springtide.checkpoint.format import committed
from springtide.checkpoint.load import load
from springtide.config.engine import ModelConfig
from springtide.errors import CheckpointError, ConfigError
from springtide.hf import export_checkpoint, export_files, open_model, write_checkpoint
from springtide.hf.hf_config import choose_family, read_config
from springtide.model import build
from springtide.run.exchange import export_model, import_model
from springtide.storage import Folder

transformers = pytest.importorskip("transformers")
SAME = {"mistral": "Mistral", "llama2": "Llama", "phi3": "Mistral"}
"""phi3 has a window and no more: the first family that computes it is Mistral's."""


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def decoder(run: Any) -> Any:
    model = build(run.config.model, run.config.model.vocab_size)
    load(run.folder, run.checkpoints[-1], model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_in_and_goes_out_with_its_logits(family: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARY + 5  # no multiple of what embeddings are padded to
    theirs = their_model(family, vocabulary)
    theirs.save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    tokens = torch.randint(0, vocabulary, (2, LENGTH))
    expected = logits(theirs, tokens)
    torch.testing.assert_close(logits(decoder(run), tokens), expected, atol=1e-5, rtol=0.0)
    found = export_model(run, str(tmp_path / "out"))
    kind = FAMILIES[family][0].removesuffix("Text")
    assert found.architecture == f"{SAME.get(family, kind)}ForCausalLM"
    again = loaded(tmp_path / "out")
    torch.testing.assert_close(logits(again, tokens), expected, atol=1e-5, rtol=0.0)
    assert again.config.vocab_size == vocabulary
    back = import_model(str(tmp_path / "out"), str(tmp_path / "back"))
    assert back.config.model == run.config.model


@pytest.mark.parametrize("length", [12, 16, 17])
def test_rows_up_to_the_original_length_have_their_own_factors(length: int, tmp_path: Path) -> None:
    """Phi 3.5 has one table of factors for short texts and one for long ones."""
    theirs = their_model("phi35")
    theirs.save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    tokens = torch.randint(0, VOCABULARY, (2, length))
    torch.testing.assert_close(logits(decoder(run), tokens), logits(theirs, tokens), atol=1e-5, rtol=0.0)
    assert run.config.model.written_length == 16  # a text that is written stays within the table of its beginning


@pytest.mark.parametrize("family", ["llama3", "phi4_mini", "gemma3"])
def test_bf16_comes_in_and_goes_out_bit_by_bit(family: str, tmp_path: Path) -> None:
    theirs = their_model(family).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    export_model(run, str(tmp_path / "out"), dtype="bf16")
    again = loaded(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    export_model(run, str(tmp_path / "wide"))
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    expected_BLV = logits(loaded(tmp_path / "in", dtype=torch.float32), tokens)
    torch.testing.assert_close(logits(loaded(tmp_path / "wide"), tokens), expected_BLV, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_a_config_json_are_those_of_the_decoder(family: str, tmp_path: Path) -> None:
    theirs = their_model(family)
    theirs.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = [type(theirs).__name__]
    found = read_config(config)[1]
    mine = ModelConfig(**FAMILIES[family][1])
    for field, value in FAMILIES[family][1].items():
        if field == "head_dim" and value == 16:
            continue
        assert getattr(found, field) == getattr(mine, field), (field, value)


def test_the_form_of_transformers_4_is_read_too() -> None:
    shape = {"vocab_size": 128, "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4}
    shape |= {"intermediate_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    gemma = {"architectures": ["Gemma3ForCausalLM"], **shape, "head_dim": 16, "query_pre_attn_scalar": 16}
    gemma |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma |= {"sliding_window": 12, "sliding_window_pattern": 3, "hidden_activation": "gelu_pytorch_tanh"}
    found = read_config(gemma)[1]
    assert (found.global_every, found.window, found.score_width) == (3, 12, 0)
    assert (found.rope_theta, found.local_rope_theta, found.rope_scaling, found.rope_factor) == (1e6, 1e4, "linear", 8)
    llama = {"architectures": ["LlamaForCausalLM"], **shape, "rope_theta": 5e5}
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama["rope_scaling"] = {**scaled, "original_max_position_embeddings": 16}
    found = read_config(llama)[1]
    assert (found.rope_theta, found.rope_scaling, found.rope_original_length) == (5e5, "llama3", 16)
    gemma2 = {"architectures": ["Gemma2ForCausalLM"], **shape, "sliding_window": 12, "attn_logit_softcapping": None}
    found = read_config(gemma2)[1]
    assert (found.attention_cap, found.logit_cap) == (0.0, 30.0)  # null is no cap, and no key the usual one
    qwen = {"architectures": ["Qwen2ForCausalLM"], **shape, "sliding_window": 32, "use_sliding_window": False}
    assert read_config({**qwen, "max_window_layers": 6})[1].window == 0


def test_a_sharded_export_has_an_index_and_replaces_the_last(tmp_path: Path) -> None:
    """An export of several files has an index and replaces the one before."""
    theirs = their_model("olmo2")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    out, name = Folder(str(tmp_path / "out")), run.checkpoints[-1]
    export_checkpoint(run.folder, name, run.config.model, out, {"run": run.id}, shard_bytes=60_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    assert torch.equal(logits(loaded(tmp_path / "out"), tokens), logits(theirs, tokens))
    (tmp_path / "out/NOTES").write_text("mine")
    export_model(run, out.url)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"NOTES", "README.md", "config.json", "model.safetensors", "springtide.json"}
    assert torch.equal(logits(loaded(tmp_path / "out"), tokens), logits(theirs, tokens))


def test_a_folder_of_others_is_not_touched(tmp_path: Path) -> None:
    their_model("llama2").save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    for out in ("in", "run"):
        before = {path: path.read_bytes() for path in (tmp_path / out).rglob("*") if path.is_file()}
        with pytest.raises(ConfigError, match="no export"):
            export_model(run, str(tmp_path / out))
        assert before == {path: path.read_bytes() for path in (tmp_path / out).rglob("*") if path.is_file()}
        with pytest.raises(ConfigError, match="not empty"):
            import_model(str(tmp_path / "in"), str(tmp_path / out))


class Killed(BaseException):
    """As a signal that nothing catches."""


@pytest.mark.parametrize("again", [False, True])
def test_a_killed_export_never_looks_finished(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    their_model("llama2").save_pretrained(tmp_path / "in")
    run, out = import_model(str(tmp_path / "in"), str(tmp_path / "run")), Folder(str(tmp_path / "out"))
    if again:
        export_model(run, out.url)
    writes = 0

    def stop_at(limit: int) -> None:
        for name in ("put_stream", "remove"):  # all writes are streams
            real = getattr(Folder, name)

            def counted(self: Folder, *arguments: Any, _real: Any = real, **options: Any) -> Any:
                nonlocal writes
                if self.url == out.url:
                    writes += 1
                    if writes > limit:
                        raise Killed
                return _real(self, *arguments, **options)

            monkeypatch.setattr(Folder, name, counted)

    for limit in range(1, 20):
        writes = 0
        with monkeypatch.context() as patch:
            monkeypatch, kept = patch, monkeypatch
            stop_at(limit)
            try:
                export_model(run, out.url)
                ended = True
            except Killed:
                ended = False
            monkeypatch = kept
        names = set(out.names())
        if ended:
            assert out.read_json(export_files.MARKER)["complete"] is True
            break
        assert out.read_json(export_files.MARKER)["complete"] is False or limit == 1
        if "config.json" in names:  # whole, though not yet said to be: or that of the export before
            assert loaded(tmp_path / "out") is not None
    assert limit > 3


def test_bytes_that_are_not_those_committed_are_not_exported(tmp_path: Path) -> None:
    their_model("llama2").save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    [file] = (tmp_path / "run/checkpoints").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="digest expected"):
        export_model(run, str(tmp_path / "out"))
    assert not {"config.json", "model.safetensors"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_what_no_architecture_computes_is_told_with_the_nearest(tmp_path: Path) -> None:
    for changes, problem in (
        ({"qk_norm": "head", "qkv_bias": True}, r"the nearest, Qwen2.*model\.qk_norm = head, which is none there"),
        ({"base_width": 96}, r"model\.base_width = 96, which scales"),
        (
            {"qk_norm": "head", "window": 8, "global_every": 2, "rope_scaling": "yarn"},
            "local_rope_theta or rope_scaling",
        ),
        ({"source": "mine:model"}, r"model\.source"),
    ):
        with pytest.raises(ConfigError, match=problem):
            choose_family(ModelConfig(**changes))


def test_numbers_that_fp16_has_no_room_for_are_refused(tmp_path: Path) -> None:
    theirs = their_model("llama2")
    with torch.no_grad():
        theirs.model.norm.weight[3] = 1e5
    theirs.save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"dtype = 'fp16': .*model\.norm\.weight"):
        export_model(run, str(tmp_path / "out"), dtype="fp16")
    with pytest.raises(ConfigError, match="fp32, bf16, fp16"):
        export_model(run, str(tmp_path / "out"), dtype="int4")


@pytest.mark.processes
def test_neither_way_needs_transformers(tmp_path: Path) -> None:
    their_model("phi3").save_pretrained(tmp_path / "in")
    program = f"""
import sys
for name in ("transformers", "safetensors", "ray"):
    sys.modules[name] = None
from springtide.cli.main import main
assert main(["model", "import", {str(tmp_path / "in")!r}, "--out", {str(tmp_path / "run")!r}]) == 0
assert main(["model", "export", {str(tmp_path / "run")!r}, "--to", "hf", "--out", {str(tmp_path / "out")!r}]) == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--train.start-with weights" in done.stdout
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    before = logits(loaded(tmp_path / "in"), tokens)
    torch.testing.assert_close(logits(loaded(tmp_path / "out"), tokens), before, atol=1e-5, rtol=0.0)


def test_small_parts_make_the_same_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    their_model("phi4_mini").save_pretrained(tmp_path / "in")
    found, to = open_model(Folder(str(tmp_path / "in"))), Folder(str(tmp_path / "run"))
    manifest = write_checkpoint(found, to, {}, "", part_bytes=3000)
    assert manifest.meta.world_size > 20
    model, whole = build(found.model, VOCABULARY), import_model(str(tmp_path / "in"), str(tmp_path / "whole"))
    load(to, committed(to)[0], model)
    expected = decoder(whole).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    monkeypatch.setattr(export_files, "PART_BYTES", 5000)
    export_checkpoint(to, committed(to)[0], found.model, Folder(str(tmp_path / "out")), {"run": "x"})
    export_model(whole, str(tmp_path / "out-whole"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "out-whole")]
    assert files[0] == files[1]


def test_object_stores_are_written_and_read_as_folders_are(tmp_path: Path, s3: str) -> None:
    their_model("gemma").save_pretrained(tmp_path / "in")
    run = import_model(str(tmp_path / "in"), str(tmp_path / "run"))
    export_model(run, str(tmp_path / "out"))
    expected = (tmp_path / "out/model.safetensors").read_bytes()
    for url in (f"{s3}/exports/gemma", "memory://exports/gemma"):
        export_model(run, url)
        export_model(run, url)
        assert Folder(url).read("model.safetensors") == expected
        assert Folder(url).read("config.json") == (tmp_path / "out/config.json").read_bytes()
    again = import_model(f"{s3}/exports/gemma", f"{s3}/runs/imported")
    export_model(again, str(tmp_path / "again"))
    assert (tmp_path / "again/model.safetensors").read_bytes() == expected
