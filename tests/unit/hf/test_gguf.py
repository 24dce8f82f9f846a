"""``examples/gguf`` writes exports of each family as files that others read: the gguf package, transformers, and llama.cpp
where it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, LENGTH, SHAPE, their_model

from springtide.checkpoint.load import load
from springtide.config.engine import ModelConfig
from springtide.corpus.tokenizer import byte_tokenizer
from springtide.errors import ConfigError
from springtide.hf.hf_config import choose_family
from springtide.model import build
from springtide.run.exchange import export_model, import_model
from springtide.run.folder import Run

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
PROGRAM = Path(__file__).parents[3] / "examples/gguf/to_gguf.py"
sys.path.append(str(PROGRAM.parent))
from gguf_families import gguf_family  # noqa: E402
from to_gguf import convert  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.processes]
IDS, END = 261, 256
"""More than the bytes and the end of a text, and not a multiple of 32."""
NAMES = {
    "llama3": "llama",
    "linear": "llama",
    "yarn": "llama",
    "llama2": "llama",
    "phi4_mini": "phi3",
    "olmo3": "olmo2",
}
REFUSED = {
    "mistral": "model.window = 12",
    "phi3": "model.window = 12",
    "gemma2": "model.score_width = 48",
    "phi35": "model.rope_scaling = 'longrope'",
    "sharpened": r"model.rope_attention_factor = 1\.02\d*",
}
"""What llama.cpp does not compute of these."""
UNREAD: dict[str, dict[str, Any]] = {
    "llama2": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi4_mini": {
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "layer_types": FAMILIES["gemma3"][2]["layer_types"],
        "rope_parameters": FAMILIES["gemma3"][2]["rope_parameters"],
    },
}
"""Families that transformers reads, and what llama.cpp's files say that it does not take from them."""


def imported(family: str, folder: Path, **changes: Any) -> tuple[Any, Run]:
    """Their model and the run of it, with a tokenizer."""
    kind, ours, theirs = FAMILIES[family]
    if family == "gemma2":
        changes = {"query_pre_attn_scalar": 32, **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, (kind, ours, {**theirs, "eos_token_id": END, "bos_token_id": None, **changes}))
        model = their_model(family, IDS)
    model.save_pretrained(folder / "in")
    (folder / "in/tokenizer.json").write_text(byte_tokenizer().to_json())
    return model, import_model(str(folder / "in"), str(folder / "run"))


def exported(run: Run, folder: Path, dtype: str = "") -> list[str]:
    """Export a run and write the export as ``model.gguf`` of a folder of its own; the remarks."""
    folder.mkdir()
    return convert(export_model(run, str(folder.parent / "export")).url, str(folder / "model.gguf"), dtype)


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a file, as the gguf package reads them, tensors as fp32."""
    reader = gguf.GGUFReader(folder / "model.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    return fields, {name: torch.from_numpy(np.array(data, dtype=np.float32)) for name, data in tensors.items()}


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def loaded(folder: Path, **changes: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
    for key, value in changes.items():
        setattr(config, key, value)
    options = {"gguf_file": "model.gguf", "config": config, "attn_implementation": "eager", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def plain(name: str, tensor: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
    """A tensor as transformers has it."""
    kind = metadata["general.architecture"]
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1
    if kind == "llama" and (".attn_q." in name or ".attn_k." in name):
        width = metadata["llama.attention.key_length"]
        return tensor.view(-1, width // 2, 2, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED or one == "gemma2"])
def test_every_tensor_is_where_llama_cpp_looks_for_it(family: str, tmp_path: Path) -> None:
    theirs, run = imported(family, tmp_path)
    assert exported(run, tmp_path / "out") == []
    metadata, tensors = written(tmp_path / "out")
    assert metadata["general.architecture"] == NAMES.get(family, family)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == metadata["general.architecture"])
    names = gguf.get_tensor_name_map(arch, theirs.config.num_hidden_layers)
    expected = {}
    for name, tensor in theirs.state_dict().items():
        base, _, kind = name.rpartition(".")
        if base != "lm_head" or not theirs.config.tie_word_embeddings:
            expected[f"{names.get_name(base)}.{kind}"] = tensor
    extra = {"rope_freqs.weight"} if family == "llama3" else set()
    assert tensors.keys() == expected.keys() | extra
    for name, tensor in expected.items():
        torch.testing.assert_close(plain(name, tensors[name], metadata), tensor, atol=2e-7, rtol=0.0)
    assert metadata["GGUF.version"] == 3
    assert metadata["general.file_type"] == 0
    assert metadata["tokenizer.ggml.tokens"][END:] == ["<|endoftext|>", "[PAD257]", "[PAD258]", "[PAD259]", "[PAD260]"]
    assert metadata["tokenizer.ggml.token_type"] == [1] * END + [3, 5, 5, 5, 5]
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.bos_token_id"] == END
    assert metadata["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("family", UNREAD)
def test_transformers_reads_the_same_logits(family: str, tmp_path: Path) -> None:
    _, run = imported(family, tmp_path)
    exported(run, tmp_path / "out")
    again, tokens = loaded(tmp_path / "out", **UNREAD[family]), torch.randint(0, IDS, (2, LENGTH))
    model = build(run.config.model, IDS)
    load(run.folder, run.checkpoints[-1], model)
    torch.testing.assert_close(logits(again, tokens), logits(model, tokens), atol=1e-5, rtol=0.0)
    assert again.config.eos_token_id == END


def test_llama_3_stretches_the_wavelengths_that_transformers_does(tmp_path: Path) -> None:
    theirs, run = imported("llama3", tmp_path)
    exported(run, tmp_path / "out")
    _, tensors = written(tmp_path / "out")
    usual = 1.0 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(usual / tensors["rope_freqs.weight"], theirs.model.rotary_emb.inv_freq)
    again = loaded(tmp_path / "out", rope_parameters=FAMILIES["llama3"][2]["rope_parameters"])
    tokens = torch.randint(0, IDS, (2, LENGTH))
    torch.testing.assert_close(logits(again, tokens), logits(theirs, tokens), atol=1e-5, rtol=0.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "olmo3": {
        "olmo2.rope.scaling.type": "yarn",
        "olmo2.rope.scaling.factor": 4.0,
        "olmo2.rope.scaling.original_context_length": 16,
        "olmo2.attention.sliding_window": 12,
        "olmo2.attention.sliding_window_pattern": [True, True, False],
    },
    "gemma2": {
        "gemma2.attn_logit_softcapping": 0.5,
        "gemma2.final_logit_softcapping": 3.0,
        "gemma2.attention.key_length": 32,
        "gemma2.context_length": 64,
        "gemma2.vocab_size": IDS,
    },
    "gemma3": {
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.attention.head_count_kv": 2,
    },
    "phi4_mini": {"phi3.rope.dimension_count": 12, "phi3.feed_forward_length": 96, "phi3.block_count": 3},
}


@pytest.mark.parametrize("family", SETTINGS)
def test_settings_of_a_file_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    _, run = imported(family, tmp_path)
    exported(run, tmp_path / "out")
    metadata, _ = written(tmp_path / "out")
    assert {key: metadata[key] for key in SETTINGS[family]} == SETTINGS[family]


def test_a_tied_head_is_written_where_llama_cpp_needs_one(tmp_path: Path) -> None:
    theirs, run = imported("olmo2", tmp_path, tie_word_embeddings=True)
    exported(run, tmp_path / "out")
    _, tensors = written(tmp_path / "out")
    assert torch.equal(tensors["output.weight"], theirs.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused(family: str, tmp_path: Path) -> None:
    _, run = imported(family, tmp_path, **({"query_pre_attn_scalar": 48} if family == "gemma2" else {}))
    with pytest.raises(ConfigError, match=rf"{REFUSED[family]}: .*llama\.cpp"):
        exported(run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("gemma", {"tied_head": False}, "tied_head"),
        ("gemma2", {"attention_cap": 0.0}, "attention_cap"),
        ("gemma2", {"logit_cap": 0.0}, "logit_cap"),
        ("gemma2", {"num_layers": 46}, "score_width"),
        ("qwen2", {"rope_scaling": "llama3"}, "rope_scaling"),
        ("qwen2", {"head_dim": 32}, "head_dim"),
        ("olmo3", {"local_rope_theta": 1e3, "rope_scaling": "none"}, "local_rope_theta"),
    ],
)
def test_settings_that_would_be_lost_are_refused(family: str, changes: dict[str, Any], field: str) -> None:
    settings = {**SHAPE, **FAMILIES[family][1], "score_width": 0}
    gguf_family(choose_family(ModelConfig(**settings)), ModelConfig(**settings))
    model = ModelConfig(**{**settings, **changes})
    with pytest.raises(ConfigError, match=rf"model\.{field} = .*llama\.cpp"):
        gguf_family(choose_family(model), model)


@pytest.mark.parametrize(("dtype", "kind", "closeness"), [("bf16", 32, 2**-8), ("fp16", 1, 2**-11), ("q8_0", 7, 0.005)])
def test_matrices_are_narrowed_and_vectors_are_not(dtype: str, kind: int, closeness: float, tmp_path: Path) -> None:
    theirs, run = imported("qwen2", tmp_path)
    exported(run, tmp_path / "out", dtype)
    reader = gguf.GGUFReader(tmp_path / "out/model.gguf")
    assert reader.fields["general.file_type"].contents() == kind
    types = {one.name: one.tensor_type.name for one in reader.tensors}
    narrow = {"bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}[dtype]
    assert {types[one] for one in types if one.endswith(("norm.weight", ".bias"))} == {"F32"}
    assert {types[one] for one in types if not one.endswith(("norm.weight", ".bias"))} == {narrow}
    expected = theirs.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    [data] = [one.data for one in reader.tensors if one.name == "blk.1.ffn_down.weight"]
    assert np.array_equal(data, gguf.quantize(expected, gguf.GGMLQuantizationType[narrow]))
    _, tensors = written(tmp_path / "out")
    largest = np.abs(expected).max()
    np.testing.assert_allclose(tensors["blk.1.ffn_down.weight"].numpy(), expected, atol=closeness * largest)


def test_types_that_hold_not_all_numbers_are_refused(tmp_path: Path) -> None:
    _, run = imported("llama2", tmp_path, intermediate_size=72)
    with pytest.raises(ConfigError, match=r"dtype = 'q8_0': .* 32\b.*blk\.0\.ffn_down\.weight"):
        exported(run, tmp_path / "out", "q8_0")
    with pytest.raises(ConfigError, match=r"dtype = 'int4': .*fp32, bf16, fp16, q8_0"):
        exported(run, tmp_path / "other", "int4")
    theirs = their_model("llama2", IDS)
    with torch.no_grad():
        theirs.model.layers[0].mlp.up_proj.weight[3, 3] = 1e9
    theirs.save_pretrained(tmp_path / "large")
    for dtype in ("fp16", "q8_0"):
        with pytest.raises(ConfigError, match=r"room .*blk\.0\.ffn_up\.weight"):
            convert(str(tmp_path / "large"), str(tmp_path / "out/model.gguf"), dtype)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_program_says_what_it_wrote_or_why_not(tmp_path: Path) -> None:
    _, run = imported("llama2", tmp_path)
    export, target = export_model(run, str(tmp_path / "export")).url, tmp_path / "model.gguf"
    for dtype, status, said in (("q8_0", 0, f"wrote {target}: 0.1 MiB"), ("int4", 2, "dtype = 'int4': is not one of")):
        command = [sys.executable, str(PROGRAM), export, str(target), "--dtype", dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert said in done.stdout + done.stderr
    assert written(tmp_path)[0]["general.name"] == "export"


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED or one == "gemma2"])
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("xllamacpp")
    _, run = imported(family, tmp_path)
    exported(run, tmp_path / "out")
    settings = llama_cpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(tmp_path / "out/model.gguf"), 64, 1
    settings.warmup, settings.verbosity = False, 0
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server, model = llama_cpp.Server(settings), build(run.config.model, IDS)
    load(run.folder, run.checkpoints[-1], model)
    tokens = torch.randint(0, END, (47,)).tolist()
    asked = {"prompt": tokens, "max_tokens": 1, "logprobs": IDS, "temperature": 1.0, "cache_prompt": False}
    for seed in range(100):  # one that ends the text comes without
        found = server.handle_completions({**asked, "seed": seed})["choices"][0]["logprobs"]
        if found:
            break
    expected = torch.log_softmax(logits(model, torch.tensor([tokens]))[0, -1], -1)
    top = found["content"][0]["top_logprobs"]
    got = torch.tensor([one["logprob"] for one in sorted(top, key=lambda one: one["id"])])
    # its GELU is a table in fp16
    torch.testing.assert_close(got, expected, atol=1e-3 if family.startswith("gemma") else 1e-5, rtol=0.0)
