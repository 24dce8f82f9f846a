"""LoRA and DoRA adapters of PEFT come in beside their model and go out with the same bits; others are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LENGTH, VOCABULARY, their_model
from safetensors.torch import load_file, save_file

from springtide.checkpoint.load import load
from springtide.errors import ConfigError
from springtide.model import build
from springtide.run.exchange import export_model, import_model
from springtide.run.folder import Run

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
RANK = 4
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def adapted(theirs: Any, **settings: Any) -> Any:
    """Their model with an adapter that PEFT made, all of whose numbers differ from what a new one has."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": RANK, "lora_alpha": 12, "task_type": "CAUSAL_LM", **settings})
    model = peft.get_peft_model(theirs, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


def ours(run: Run) -> Any:
    model = build(run.config.model, run.config.model.vocab_size)
    load(run.folder, run.checkpoints[-1], model)
    return model


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama2", {"target_modules": "all-linear"}, ("*",)),
    ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}, ("attention.query", "attention.value")),
    ("llama3", {"target_modules": ALL, "use_dora": True}, ("*",)),
    ("gemma2", {"target_modules": r".*\.(gate|up)_proj", "use_dora": True, "use_rslora": True}, ("ffn.gate", "ffn.up")),
    ("qwen3", {"target_modules": ["o_proj"], "layers_to_transform": [0, 2], "use_rslora": True}, ()),
    ("llama2", {"target_modules": ["down_proj", "o_proj"], "exclude_modules": ["layers.1.mlp.down_proj"]}, ()),
    ("phi3", {"target_modules": ["qkv_proj", "down_proj"], "use_dora": True}, ()),
    ("phi3", {"target_modules": "all-linear"}, ("*",)),
]


@pytest.mark.parametrize(("family", "settings", "targets"), SETTINGS)
def test_a_peft_adapter_round_trips_with_its_bits(
    family: str, settings: dict[str, Any], targets: tuple[str, ...], tmp_path: Path
) -> None:
    """An adapter of PEFT comes in with its logits and goes out with its bits."""
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path / "base")
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    before = logits(theirs, tokens)
    with_theirs = adapted(theirs, **settings)
    with_theirs.save_pretrained(tmp_path / "adapter")
    run = import_model(str(tmp_path / "base"), str(tmp_path / "run"), str(tmp_path / "adapter"))
    model = run.config.model
    assert (model.adapter, model.adapter_rank) == ("dora" if settings.get("use_dora") else "lora", RANK)
    assert model.adapter_alpha == pytest.approx(12 * (RANK**0.5 if settings.get("use_rslora") else 1))
    if targets:
        assert model.adapter_targets == tuple(one if one == "*" else f"blocks.*.{one}.weight" for one in targets)
    expected = logits(with_theirs, tokens)
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(logits(ours(run), tokens), expected, atol=1e-5, rtol=0.0)

    export_model(run, str(tmp_path / "merged"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    torch.testing.assert_close(logits(merged, tokens), expected, atol=1e-5, rtol=0.0)
    if family == "phi3":  # PEFT cannot say that a part of a matrix is adapted
        return
    found = export_model(run, str(tmp_path / "out"), format="peft")
    assert str(tmp_path / "base") in found.remarks[0]
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == tensors.keys()
    for name, tensor in load_file(tmp_path / "out" / WEIGHTS).items():
        assert torch.equal(tensor, tensors[name]), name
    again = import_model(str(tmp_path / "base"), str(tmp_path / "again"), str(tmp_path / "out"))
    assert again.config.model == model
    for name, tensor in ours(again).state_dict().items():
        assert torch.equal(tensor, ours(run).state_dict()[name]), name


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and an adapter that would be imported."""
    folder = tmp_path_factory.mktemp("files")
    theirs = their_model("llama2")
    theirs.save_pretrained(folder / "base")
    adapted(theirs, target_modules=["q_proj", "v_proj"]).save_pretrained(folder / "adapter")
    return folder


def with_config(**changes: Any) -> Callable[[Path], None]:
    """Change keys of the config; None removes one."""

    def spoil(folder: Path) -> None:
        config = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(json.dumps(config))

    return spoil


def with_text(text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / CONFIG).write_text(text)

    return spoil


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Save other tensors."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return spoil


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()

    return spoil


def piped(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def renamed(before: str, after: str) -> Callable[[Path], None]:
    return with_tensors(lambda found: found.update({after: found.pop(before)}))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (pickled, r"adapter_model\.bin.*is a pickle, which runs code when it is read; .*save_pretrained"),
        (without(WEIGHTS), r"has no adapter_model\.safetensors"),
        (without(CONFIG), r"has no adapter_config\.json"),
        (piped, "is not a regular file"),
        (with_text("[" * 100_000), r"adapter_config\.json.*is not JSON"),
        (with_text("[]"), r"adapter_config\.json.*is not a JSON object"),
        (with_text('{"r": 4, "r": 8}'), "a key is there twice"),
        (with_text(" " * 2**20 + "{}"), r"are more than 1,048,576 bytes"),
        (with_config(peft_type="IA3"), "peft_type = 'IA3': is not computed here; import a LoRA or DoRA adapter"),
        (with_config(task_type="SEQ_CLS"), "task_type = 'SEQ_CLS': is not computed here"),
        (with_config(bias="all"), "bias = 'all': is not computed here; merge it"),
        (with_config(lora_bias=True), "lora_bias = True: is not computed here; merge it"),
        (with_config(modules_to_save=["lm_head"]), r"modules_to_save = \['lm_head'\]: is not computed here; merge it"),
        (with_config(fan_in_fan_out=True), "fan_in_fan_out = True: is not computed here; set it to false"),
        (with_config(rank_pattern={"q_proj": 2}), "rank_pattern = .*has another rank or scale in some matrices.*merge"),
        (with_config(alpha_pattern={"q_proj": 2}), "alpha_pattern = .*has another rank or scale in some matrices"),
        (with_config(rank_pattern=[3]), r"rank_pattern = \[3\]"),
        (with_config(init_lora_weights="pissa"), "init_lora_weights = 'pissa': .*path_initial_model_for_weight_conv"),
        (with_config(layers_pattern="experts"), "layers_pattern = 'experts': is not computed here"),
        (with_config(layer_replication=[[0, 2]]), "layer_replication"),
        (with_config(trainable_token_indices=[1]), "trainable_token_indices"),
        (with_config(some_new_key=3), "some_new_key = 3: is not computed here; merge it"),
        (with_config(r=0), "r = 0: is not a number above 0"),
        (with_config(r=2.5), r"r = 2\.5: is not a whole number"),
        (with_config(r=10**9), "r = 1000000000: is not a number above 0 and up to 65536"),
        (with_config(r=True), "r = True: is not a number"),
        (with_config(r=8), r"q_proj\.lora_A\.weight = \[4, 64\]: the model and r = 8 make it \[8, 64\]"),
        (with_config(lora_alpha=float("inf")), "lora_alpha = inf: is not a number above 0"),
        (with_config(lora_alpha="16"), "lora_alpha = '16': is not a number"),
        (with_config(use_rslora=1), "use_rslora = 1: is not true or false"),
        (with_config(use_dora=True), r"q_proj\.lora_magnitude_vector.*are missing"),
        (
            with_config(target_modules=["q_proj", "../v_proj"]),
            r"\['../v_proj'\]: are modules that this LlamaForCausalLM",
        ),
        (with_config(target_modules=["q_proj", "lm_head", "v_proj"]), r"\['lm_head'\]: are modules that this .* not"),
        (with_config(target_modules=["q_proj"]), r"v_proj'.*\]: have tensors, and are not targets"),
        (with_config(target_modules=["q_proj", "v_proj", "o_proj"]), r"o_proj'.*\]: have no tensors; give the model"),
        (with_config(target_modules=[3]), "are not names of modules"),
        (with_config(target_modules=None), "are not names of modules"),
        (with_config(layers_to_transform=[0]), r"layers\.1\.self_attn\.q_proj.*have tensors, and are not targets"),
        (with_config(layers_to_transform=["0"]), "layers_to_transform = .*is not a list of numbers"),
        (with_config(exclude_modules={"q": 1}), "exclude_modules = .*is not a list of names"),
        (with_tensors(lambda found: found.clear()), "has no tensors"),
        (
            with_tensors(lambda found: found.pop(f"{QUERY}.lora_B.weight")),
            r"\['base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_B\.weight'\]: are missing",
        ),
        (
            with_tensors(lambda found: found.update({f"{QUERY}.lora_magnitude_vector": torch.ones(64)})),
            r"lora_magnitude_vector'\]: are not of a LoRA adapter, and its config has no use_dora",
        ),
        (
            renamed(f"{QUERY}.lora_A.weight", f"{QUERY.replace('layers.0', 'layers.7')}.lora_A.weight"),
            r"layers\.7\.self_attn\.q_proj\.lora_A\.weight': is a tensor of no adapted matrix of this LlamaForCausalLM",
        ),
        (
            with_tensors(lambda found: found.update({"base_model.model.lm_head.weight": torch.ones(128, 64)})),
            r"lm_head\.weight': is a tensor of no adapted matrix.*merge it",
        ),
        (
            with_tensors(lambda found: found.update({f"{QUERY}.lora_B.weight": torch.ones(96, 4)})),
            r"q_proj\.lora_B\.weight = \[96, 4\]: the model and r = 4 make it \[64, 4\]; give the model that the adapter",
        ),
        (
            with_tensors(lambda found: found.update({f"{QUERY}.lora_B.weight": torch.ones(64, 4, dtype=torch.int8)})),
            "dtype = 'I8': is not one of F32",
        ),
        (
            with_tensors(lambda found: found[f"{QUERY}.lora_B.weight"].fill_(float("nan"))),
            r"has numbers that are not finite, in rows of blocks\.0\.attention\.query\.lora_b",
        ),
        (with_bytes(lambda data: data[:-4]), r"is not the \d+ bytes that its header describes"),
        (with_bytes(lambda data: b"\xff" * 8 + data[8:]), "length of the header = 18446744073709551615"),
    ],
)
def test_a_foreign_or_hostile_adapter_is_refused(
    spoil: Callable[[Path], None], problem: str, files: Path, tmp_path: Path
) -> None:
    """An adapter that is not of the model or hostile is refused and nothing is written."""
    shutil.copytree(files / "adapter", tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises((ConfigError, OSError, ValueError), match=problem):
        import_model(str(files / "base"), str(tmp_path / "run"), str(tmp_path / "adapter"))
    assert not list((tmp_path / "run").rglob("COMMITTED"))
    assert not (tmp_path / "run/config.yaml").exists()


def test_patterns_and_paths_of_adapter_configs_are_never_used(files: Path, tmp_path: Path) -> None:
    """Patterns and paths of an adapters config are never run or opened.

    A pattern that would take forever, and a base that is elsewhere: the tensors say what is adapted."""
    shutil.copytree(files / "adapter", tmp_path / "adapter")
    forever = "(a*)*" * 20 + "(model.layers.*)*$"
    with_config(target_modules=forever, base_model_name_or_path="../../etc/passwd")(tmp_path / "adapter")
    run = import_model(str(files / "base"), str(tmp_path / "run"), str(tmp_path / "adapter"))
    assert run.config.model.adapter_targets == ("blocks.*.attention.query.weight", "blocks.*.attention.value.weight")


def test_an_adapter_of_another_base_is_refused_with_tensor_and_shapes(files: Path, tmp_path: Path) -> None:
    their_model("llama2").save_pretrained(tmp_path / "base")
    config = json.loads((files / "base/config.json").read_text())
    other = transformers.LlamaConfig(**{**config, "hidden_size": 32, "head_dim": 8})
    transformers.LlamaForCausalLM(other).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"q_proj\.lora_A\.weight = \[4, 64\].*r = 4 .*\[4, 32\]"):
        import_model(str(tmp_path / "other"), str(tmp_path / "run"), str(files / "adapter"))
