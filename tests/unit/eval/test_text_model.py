"""A checkpoint as a model of text: in Python, on the command line, and after a way through transformers' format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chatting import LENGTH, chat_run

from springtide.cli.main import main
from springtide.corpus.chats import Turn
from springtide.errors import CheckpointError, ConfigError, printable
from springtide.eval import Sampling, write
from springtide.run.exchange import export_model, import_model
from springtide.run.folder import Run
from springtide.run.text import open_text
from springtide.shards import CHAT_TEMPLATE

pytestmark = pytest.mark.processes

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return chat_run(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def export(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    return export_model(run, str(tmp_path_factory.mktemp("exports") / "hf")).url


def test_texts_do_not_depend_on_batch_parts_or_export(run: Run, export: str) -> None:
    """Texts are the same in any batch in parts and after an export."""
    model, prompts = open_text(run.folder.url), ["Add", "", "It is the moon that", "x"]
    found = model.generate(prompts, 12, GREEDY)
    assert [one.prompt for one in found] == prompts
    for size in (1, 3):
        assert model.generate(prompts, 12, GREEDY, batch_size=size) == found
    parts: dict[int, str] = dict.fromkeys(range(4), "")

    def hear(number: int, text: str) -> None:
        parts[number] += text

    drawn = model.generate(prompts, 12, Sampling(1.5, seed=3), on_text=hear, batch_size=3)
    assert [one.text for one in drawn] == [parts[number] for number in range(4)]
    assert drawn == model.generate(prompts, 12, Sampling(1.5, seed=3))
    assert drawn[3].text == model.generate(prompts[3:], 12, Sampling(1.5, seed=6))[0].text
    assert [one.text for one in open_text(export).generate(prompts, 12, GREEDY)] == [one.text for one in found]
    assert run.generate("Add", 12, temperature=0)[0] == found[0]


def test_a_text_ends_at_a_stop_string_which_is_not_shown(run: Run) -> None:
    model = open_text(run.folder.url)
    [whole] = model.generate(["Add 3"], 30, GREEDY)
    stop = whole.text[9:12]
    heard: list[str] = []
    [cut] = model.generate(["Add 3"], 30, GREEDY, ["", stop], on_text=lambda _, text: heard.append(text))
    assert cut.text == whole.text[: whole.text.index(stop)] == "".join(heard)
    assert (cut.ended, whole.ended) == ("stop", "length")
    assert cut.num_tokens < whole.num_tokens == 30


def test_a_chat_is_laid_out_as_training_saw_it(run: Run) -> None:
    model = open_text(run.folder.url)
    ids = model.prompt_ids("Add 3 to 2. <|im_end|>", chat=True)
    shown = model.vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<s><|im_start|>user\nAdd 3 to 2. <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    end = model.vocabulary.tokenizer.token_to_id("<|im_end|>")
    assert ids.count(end) == 1  # what a user writes is text
    assert model._chat.ends == (end,)
    assert model._chat.prompt([Turn("user", "Hi")]) == model.prompt_ids("Hi", chat=True)[1:]
    assert model.generate(["Add"], 4, GREEDY, chat=True)[0].text != model.generate(["Add"], 4, GREEDY)[0].text


def test_log_probabilities_are_those_of_the_logits(run: Run) -> None:
    model = open_text(run.folder.url)
    first = [*model.begin, *model.encode("Add 3")]
    [likely] = write(
        model.model, [first], 5, max_context=LENGTH, vocab_size=model.vocab_size, sampling=GREEDY
    )  # ids: bytes that are no text would not come back from it
    pairs = [(first, likely), (first[:2], model.encode("moon")), (first, [])]
    found = model.logprobs(pairs, batch_size=2)
    with torch.no_grad():
        for (context, continuation), (logprob, is_likeliest) in zip(pairs, found, strict=True):
            logits = model.model(torch.tensor([context + continuation]))[0].log_softmax(-1)
            each = [float(logits[len(context) + n - 1, one]) for n, one in enumerate(continuation)]
            assert logprob == pytest.approx(math.fsum(each), abs=1e-4)
            assert is_likeliest == (continuation != pairs[1][1])


def test_what_does_not_fit_is_refused_by_name(run: Run, export: str, tmp_path: Path) -> None:
    model = open_text(run.folder.url)
    assert model.max_length == LENGTH
    assert len(model.generate(["a" * (LENGTH - 1)], 3, GREEDY)) == 1
    for call, message in (
        (
            lambda: model.generate(["a" * LENGTH], 3, GREEDY),
            f"prompt = .*: has {LENGTH + 1} tokens, more than the {LENGTH}",
        ),
        (lambda: model.logprobs([([1], [2] * (LENGTH + 1))]), f"has {LENGTH + 1} tokens, more than the {LENGTH} that"),
        (lambda: model.generate(["a"], 0, GREEDY), "tokens = 0: must be at least 1"),
        (lambda: open_text(export, step=4), "step = 4: needs a run"),
        (lambda: open_text(str(tmp_path)), "has neither config.yaml nor config.json"),
        (lambda: open_text(run.folder.url, step=4), "step = 4: has no checkpoint that counts"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_an_imported_model_keeps_its_chat_template(run: Run, export: str, tmp_path: Path) -> None:
    """An import is a model of text and keeps its chat template."""
    imported = open_text(import_model(export, str(tmp_path / "imported")).folder.url)
    expected = [one.text for one in open_text(run.folder.url).generate(["<s>"], 6, GREEDY)]
    imported_model = imported.model.state_dict()
    for name, tensor in open_text(export).model.state_dict().items():
        assert torch.equal(tensor, imported_model[name])
    assert len(imported.generate(["<s>"], 6, GREEDY)) == len(expected)
    assert imported.template is not None
    assert imported.template[1] == (Path(export) / CHAT_TEMPLATE).read_text()
    assert imported.generate(["Hi"], 6, GREEDY, chat=True)[0].text
    (Path(export) / CHAT_TEMPLATE).rename(tmp_path / "template")
    try:
        without = open_text(import_model(export, str(tmp_path / "without")).folder.url)
    finally:
        (tmp_path / "template").rename(Path(export) / CHAT_TEMPLATE)
    with pytest.raises(ConfigError, match="chat template"):
        without.generate(["Hi"], 6, GREEDY, chat=True)


def test_another_tokenizer_than_that_of_training_is_refused(run: Run, tmp_path: Path) -> None:
    other = chat_run(tmp_path, corpus__special_tokens=["<|more|>"])
    changed = run.config.override({"shards.dataset": other.config.shards.dataset})
    other.write_config(changed)
    (tmp_path / "runs" / "chats" / "checkpoints").rename(tmp_path / "unused")
    (tmp_path / "runs" / "chats" / "checkpoints").symlink_to(Path(run.folder.url) / "checkpoints")
    with pytest.raises(CheckpointError, match="tokenizer"):
        open_text(other.folder.url)


def test_the_command_streams_one_text_and_orders_several(
    run: Run, export: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes one text as it comes and several in order."""
    file = tmp_path / "prompts.txt"
    file.write_text("Add 3\n\nIt is\n")
    usual = ["model", "generate", run.folder.url, "--tokens", "8", "--temperature", "0"]
    expected = run.generate(["Add 3", "It is"], 8, temperature=0)
    assert main([*usual, "--prompt", "Add 3"]) == 0
    assert capsys.readouterr().out == f"Add 3{expected[0].text}\n"
    assert main([*usual, "--prompts", str(file)]) == 0
    assert capsys.readouterr().out == "".join(f"--- {one.prompt}\n{one.text}\n" for one in expected)
    assert main([*usual, "--prompts", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"texts": [one._asdict() for one in expected]}
    options = [
        "--chat",
        "--top-k",
        "5",
        "--top-p",
        "0.9",
        "--seed",
        "4",
        "--stop",
        "Q",
        "--step",
        "7",
        "--prompt",
        "Hi",
    ]
    assert main(["model", "generate", run.folder.url, *options, "--tokens", "8", "--temperature", "1"]) == 0
    [chat] = run.generate("Hi", 8, 1.0, 5, 0.9, 4, ["Q"], chat=True, step=7)
    assert capsys.readouterr().out == f"{printable(chat.text)}\n"
    assert main(["model", "generate", export, "--tokens", "8", "--temperature", "0", "--prompt", "Add 3"]) == 0
    assert capsys.readouterr().out == f"Add 3{expected[0].text}\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", "x", "--temperature", "-1"], "temperature = -1.0: must be at least 0"),
        (["--prompt", "x", "--tokens", "0"], "tokens = 0: must be at least 1"),
        (["--prompt", "x", "--step", "3"], "step = 3: has no checkpoint"),
        (["--prompts", "none.txt"], "prompts = 'none.txt': cannot be read (No such file or directory)"),
        (["--prompts", "empty.txt"], "prompts = 'empty.txt': holds no prompt"),
        (["--prompts", "latin.txt"], "prompts = 'latin.txt': is not UTF-8"),
    ],
)
def test_the_command_refuses_by_name(
    run: Run,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n\n")
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    assert main(["model", "generate", run.folder.url, *options]) == 2
    assert said in capsys.readouterr().err


def test_what_a_model_writes_cannot_command_a_terminal(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_text(run.folder.url)
    escape = model.encode("\x1b")[0]
    with torch.no_grad():  # the likeliest id is now an escape
        model.model.head.weight.zero_()  # type: ignore[union-attr, operator]
        model.model.norm.weight.fill_(1.0)  # type: ignore[union-attr, operator]
    monkeypatch.setattr("springtide.run.text.open_text", lambda *_: model)
    bias: Any = torch.zeros(model.model.padded_vocab_size)  # type: ignore[arg-type]
    bias[escape] = 9.0
    handle = model.model.register_forward_hook(lambda module, given, logits: logits + bias)
    assert main(["model", "generate", run.folder.url, "--tokens", "3", "--prompt", "x\x1b[31m"]) == 0
    handle.remove()
    assert "\x1b" not in capsys.readouterr().out
