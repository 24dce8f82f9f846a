"""The tutorial on chat models: each of its commands, on a tiny model of Qwen's shape that transformers made."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from published import VOCABULARY, trl_template

from springtide.cli.main import main
from springtide.errors import printable
from springtide.shards import CHAT_TEMPLATE, TOKENIZER

pytestmark = pytest.mark.cluster
PAGE = Path(__file__).parents[2] / "docs/tutorials/chat-model.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def write_model(folder: Path) -> None:
    """A chat model whose turns end its texts, as those of Qwen do."""
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    ends = {"eos_token_id": VOCABULARY.id_of("<|im_end|>", ""), "bos_token_id": VOCABULARY.id_of("<|endoftext|>", "")}
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    shape |= {"vocab_size": VOCABULARY.size, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **ends, pad_token_id=None))
    model.generation_config.eos_token_id = [ends["eos_token_id"], ends["bos_token_id"]]
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=VOCABULARY.tokenizer, eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)
    assert (folder / TOKENIZER).exists()
    (folder / CHAT_TEMPLATE).write_text(trl_template("qwen2_5"))


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_each_command_of_the_chat_tutorial_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the end transformers writes what ``model generate`` does, and stops there."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "qwen")
    chats, calls = (json.loads(block) for block in blocks("json"))
    numbered = [json.loads(json.dumps(one).replace("?", f" {number}?")) for number in range(60) for one in chats]
    Path("chats.json").write_text(json.dumps(numbered, indent=1))
    Path("calls.jsonl").write_text(
        "".join(json.dumps(calls).replace("Brest", f"Brest {number}") + "\n" for number in range(300))
    )
    small = {"train": "--shards.sequence-length 1536 --elastic.max-workers 2 --track.mlflow-uri off"}
    for command in "".join(blocks("console")).splitlines():
        words = shlex.split(command.removeprefix("$ ").replace("hf://Qwen/Qwen2.5-0.5B-Instruct", "qwen"))
        assert words[0] == "springtide"
        more = shlex.split(small.get(words[1], ""))
        assert main([*words[1:], *more]) == 0, f"{command}: {capfd.readouterr().err}"
    [program] = blocks("python")
    assert "constructor arguments" not in capfd.readouterr().err  # Ray's warning, of an actor that watches for notices
    exec(program, {})
    theirs = capfd.readouterr().out
    command = ["model", "generate", "exports/tides", "--chat", "--prompt", "Who are you?", "--temperature", "0"]
    assert main([*command, "--tokens", "40"]) == 0
    assert capfd.readouterr().out.endswith(printable(theirs))
    assert json.loads(Path("exports/tides/generation_config.json").read_text())["eos_token_id"] == [
        VOCABULARY.id_of("<|im_end|>", ""),
        VOCABULARY.id_of("<|endoftext|>", ""),
    ]
