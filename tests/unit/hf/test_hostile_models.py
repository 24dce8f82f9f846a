"""What comes from outside is refused by name before anything is written: settings, headers, indexes, tensors, pickles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import their_model
from safetensors.torch import load_file, save_file

from springtide.errors import ConfigError
from springtide.hf.hf_config import read_config
from springtide.run.exchange import import_model

pytestmark = pytest.mark.processes

pytest.importorskip("transformers")
SHAPE = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], **SHAPE, "sliding_window": 8}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], **SHAPE, "sliding_window": 8}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 16}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ([], "is not a JSON object"),
        (
            {**LLAMA, "architectures": ["LlamaForCausalLN"]},
            "known are LlamaForCausalLM.*the nearest is LlamaForCausalLM",
        ),
        ({**LLAMA, "architectures": ["MixtralForCausalLM"]}, "the nearest is MistralForCausalLM"),
        ({**LLAMA, "architectures": ["Zzz"]}, "is not known here; known are Llama[^;]*$"),
        ({**LLAMA, "architectures": ["LlamaForCausalLM"] * 2}, "does not name one architecture"),
        ({**LLAMA, "architectures": None, "model_type": "gpt2"}, "does not name one architecture"),
        ({**LLAMA, "attention_bias": True}, r"attention_bias = True: is not computed here; import a model without"),
        ({**LLAMA, "mlp_bias": 1}, r"mlp_bias = 1: is not computed here"),
        ({**LLAMA, "attention_dropout": 0.1}, r"attention_dropout = 0\.1: .*set it to 0\.0"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act = 'relu': LlamaForCausalLM has silu here"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*dequantise it"),
        (
            {**LLAMA, "num_experts": 8},
            "num_experts = 8: is a key that is not known for LlamaForCausalLM; remove the key",
        ),
        ({**LLAMA, "sliding_window": 8}, "sliding_window = 8: LlamaForCausalLM has no local layers"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size = '64': is not a number"),
        ({**LLAMA, "hidden_size": True}, "hidden_size = True: is not a number"),
        *(
            ({**LLAMA, key: 10**400}, f"{key} = 1000.*: is not a number")
            for key in ("hidden_size", "rms_norm_eps", "num_attention_heads", "max_position_embeddings")
        ),
        (
            {**LLAMA, "rope_parameters": {**YARN, "attention_factor": 10**400}},
            "attention_factor = 1000.*: is not a num",
        ),
        ({**LLAMA, "hidden_size": 64.5}, "must be a whole number"),
        ({**LLAMA, "hidden_size": -64}, "must be a whole number from 1"),
        ({**LLAMA, "hidden_size": 66, "num_attention_heads": 6}, "head_dim = 11.*must be even"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "must be a whole number from 1 to 4096"),
        ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps = nan: is not a number"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "is not true or false"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "vocab_size = None: is missing"),
        ({**LLAMA, "rope_scaling": [1]}, "rope_scaling = .1.: is not a JSON object"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type = 'dynamic': .* has default, linear",
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "factor = None: is missing, and linear needs it"),
        ({**LLAMA, "rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast = 16: is not computed here"),
        ({**LLAMA, "rope_theta": -1}, "rope_theta = -1: is not a number above 0"),
        (
            {**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor = 0\.5: is not computed",
        ),
        ({**LLAMA, "rope_scaling": {"type": "longrope"}}, "'longrope': .*has default"),
        (
            {**PHI3, "rope_scaling": LONGROPE | {"short_factor": [1.0]}},
            "short_factor.*is not a positive factor for each",
        ),
        ({**PHI3, "rope_scaling": LONGROPE | {"long_factor": "x"}}, "long_factor = 'x': is not a list of factors"),
        ({**PHI3, "rope_scaling": LONGROPE | {"long_factor": [0] * 8}}, r"long_factor\.0 = 0: is not a number above 0"),
        (
            {
                **PHI3,
                "original_max_position_embeddings": 1,
                "rope_scaling": LONGROPE | {"original_max_position_embeddings": 1},
            },
            "original_max_position_embeddings = 1: must be at least 2",
        ),
        ({**LLAMA, "rope_parameters": {**YARN, "factor": 1e-5, "mscale": 1, "mscale_all_dim": 1}}, "factor"),
        (
            {**PHI3, "original_max_position_embeddings": None, "rope_scaling": LONGROPE},
            "original_max_position_embeddings = 16: differs from the 4096",
        ),
        ({**GEMMA2, "layer_types": ["full_attention"]}, "is not a list of 2 times sliding_attention or full_attention"),
        ({**GEMMA2, "layer_types": ["chunked_attention"] * 2}, "is not a list of 2 times"),
        (
            {
                **GEMMA2,
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "is not a repeated pattern",
        ),
        (
            {**GEMMA2, "sliding_window": None},
            "sliding_window = None: is missing, and Gemma2ForCausalLM has local layers",
        ),
        ({**GEMMA2, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "scales local layers too"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention = True: is not computed here"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0: is not computed here"),
        ({**LLAMA, "model_type": "mistral"}, "model_type = 'mistral': is not llama"),
        (
            {**LLAMA, "original_max_position_embeddings": 32, "rope_scaling": YARN},
            "original_max_position_embeddings = 16: differs from the 32 beside",
        ),
        (
            {**LLAMA, "rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
            "has another factor than rope_par",
        ),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved = True: is not computed"),
        ({**LLAMA, "pruned_heads": {"0": [1]}}, "pruned_heads = .*: is not computed"),
    ],
)
def test_a_config_beyond_the_decoder_is_refused_by_name(config: Any, problem: str) -> None:
    """A config that the decoder does not compute is refused by name."""
    with pytest.raises(ConfigError, match=problem):
        read_config(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that would be imported."""
    folder = tmp_path_factory.mktemp("model")
    their_model("llama2").save_pretrained(folder)
    return folder


def copied(model: Path, to: Path) -> Path:
    to.mkdir()
    for path in model.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the header of the file and leave its data."""

    def spoil(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = json.dumps(change(header) or header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return spoil


def with_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Save other tensors."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def with_index(weight_map: Any) -> Callable[[Path], None]:
    """Add an index; ``weight_map`` may be a function of the right one."""

    def spoil(folder: Path) -> None:
        right = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        found = weight_map(right) if callable(weight_map) else weight_map
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))

    return spoil


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the file."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def with_a_second_model(folder: Path) -> None:
    """A model in one file, and an index of another one."""
    with_index(lambda right: dict.fromkeys(right, "other.safetensors"))(folder)
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def piped(folder: Path) -> None:
    import os

    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


NORM, HEAD = "model.norm.weight", "lm_head.weight"


def moved(header: dict[str, Any]) -> None:
    begin, end = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [begin - 4, end - 4]


def past_the_end(header: dict[str, Any]) -> None:
    header["more"] = {"dtype": "F32", "shape": [2**40], "data_offsets": [2**20, 2**20 + 2**42]}


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (pickled, r"pytorch_model\.bin.*are pickles, which run code when read; .*save_pretrained"),
        (no_config, r"has no config\.json"),
        (deep_config, r"config\.json.*is not JSON"),
        (bad_tokenizer, r"tokenizer\.json.*is not a tokenizer"),
        (piped, "is not a regular file"),
        (with_bytes(lambda data: b""), "length of the header"),
        (with_bytes(lambda data: b"\xff" * 8 + data[8:]), "length of the header = 18446744073709551615"),
        (with_bytes(lambda data: data[:-4]), r"is not the \d+ bytes that its header describes"),
        (with_bytes(lambda data: data + b"more"), r"is not the \d+ bytes that its header describes"),
        (with_bytes(lambda data: data[:8] + b"[" * 64 + data[72:]), "is not JSON"),
        (with_header(lambda header: [1]), "is not a JSON object"),
        (with_header(lambda header: header[NORM].update(dtype="F31")), r"model\.norm\.weight: dtype = 'F31'"),
        (with_header(lambda header: header[NORM].update(shape=[-1])), r"shape = \[-1\]: is not a list"),
        (with_header(lambda header: header[NORM].update(shape=[2**60])), "shape = .*is not a list"),
        (with_header(lambda header: header[NORM].update(shape=64)), "shape = 64: is not a list"),
        (with_header(lambda header: header[NORM].update(data_offsets=[0])), "data_offsets = .0.: is not a begin"),
        (with_header(lambda header: header[NORM].update(data_offsets=[9, 3])), "data_offsets"),
        (with_header(lambda header: header.update({NORM: 3})), "does not describe a tensor"),
        (with_header(moved), "overlaps|leaves a gap"),
        (with_header(past_the_end), "leaves a gap after"),
        (with_tensors(lambda found: found.pop(NORM)), r"folder = \['model\.norm\.weight'\]: lacks 1 tensors"),
        (with_tensors(lambda found: found.update(adapter=torch.ones(2))), r"\['adapter'\]: are tensors that LlamaFor"),
        (with_tensors(lambda found: found.update({NORM: torch.ones(63)})), r"\[63\]: its config\.json makes it \[64\]"),
        (
            with_tensors(lambda found: found.update({NORM: torch.ones(64, dtype=torch.int8)})),
            "dtype = 'I8': is not one of F32, BF16, F16, F64; dequantise",
        ),
        (with_tensors(lambda found: found[NORM].fill_(float("nan"))), "has numbers that are not finite"),
        (
            with_index({"x": "../../etc/passwd"}),
            "'../../etc/passwd': is not the name of a safetensors file in this folder",
        ),
        (with_index({"x": "/etc/passwd"}), "is not the name of a safetensors file"),
        (with_index({"x": "a/../model.safetensors"}), "is not the name of a safetensors file"),
        (with_index({"x": ["model.safetensors"]}), "is not the name of a safetensors file"),
        (with_index({"x": "other.safetensors"}), r"names other\.safetensors and the folder has no such file"),
        (with_index([]), "is not a table of files by tensor"),
        (
            with_index(lambda right: {**right, "ghost": "model.safetensors"}),
            r"\['ghost'\]: is not in model\.safetensors",
        ),
        (with_index(lambda right: {HEAD: right[HEAD]}), "the index has it in no file"),
        (with_a_second_model, r"other\.safetensors.*transformers would read model\.safetensors"),
    ],
)
def test_a_damaged_or_hostile_folder_is_refused(
    spoil: Callable[[Path], None], problem: str, model: Path, tmp_path: Path
) -> None:
    """A folder that is damaged or hostile is refused and nothing is written."""
    folder = copied(model, tmp_path / "in")
    spoil(folder)
    with pytest.raises((ConfigError, OSError, ValueError), match=problem):
        import_model(str(folder), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_head_shared_with_the_embedding_must_equal_it(model: Path, tmp_path: Path) -> None:
    """A head beside the embedding that it shares must be the same."""
    folder = copied(model, tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight = .*model\.embed_tokens\.weight"):
        import_model(str(folder), str(tmp_path / "run"))
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert import_model(str(folder), str(tmp_path / "run")).config.model.tied_head


def test_a_tokenizer_with_more_ids_than_rows_is_refused(model: Path, tmp_path: Path) -> None:
    from springtide.corpus.tokenizer import byte_tokenizer

    folder = copied(model, tmp_path / "in")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    with pytest.raises(ConfigError, match=r"tokenizer\.json = 257: .*128 rows"):
        import_model(str(folder), str(tmp_path / "run"))


def test_added_tokens_without_a_row_become_text(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3 of a billion parameters has a token for images, and no row for it."""
    from springtide.corpus.tokenizer import Tokenizer, byte_tokenizer

    folder = copied(model, tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 264}))
    tensors = load_file(folder / "model.safetensors")
    grown = {name: torch.cat([tensors[name], torch.zeros(136, 64)]) for name in (HEAD, "model.embed_tokens.weight")}
    save_file({**tensors, **grown}, folder / "model.safetensors")
    whole = byte_tokenizer(("<|endoftext|>", *(f"<{number}>" for number in range(7)), "<image>"))
    assert whole.size == 265
    (folder / "tokenizer.json").write_text(whole.to_json())
    run = import_model(str(folder), str(tmp_path / "run"))
    assert "1 added tokens have no row in the embedding and are left out: <image>" in caplog.text
    found = Tokenizer.from_json(run.folder.read("tokenizer.json").decode())
    assert found.size == 264
    [ids] = found.encode(["<image>"])
    assert found.decode(ids) == "<image>"
    assert len(ids) == len("<image>") + 1


def test_keys_that_change_nothing_come_in() -> None:
    """Keys of SmolLM2 and of DeepSeek's distilled models, and defaults that transformers 4 wrote."""
    harmless = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    harmless |= {"use_mrope": False, "use_bfloat16": False, "pruned_heads": {}, "num_beams": 1, "rope_scaling": {}}
    assert read_config({**LLAMA, **harmless}) == read_config(LLAMA)
