"""The template of a dataset of chats goes out with its tokenizer; that of a model comes in with it and goes out again."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chatting import chat_run
from prepared import prepare, small
from saving import meta

from springtide.cli.options import add_config, config_of
from springtide.corpus import TEMPLATE_BYTES, ChatTemplate
from springtide.corpus.chats import Turn
from springtide.corpus.tokenizer import Tokenizer
from springtide.dataset.chats import templates
from springtide.errors import ConfigError
from springtide.hf.hf_tokenizer import SETTINGS, tokenizer_files
from springtide.run.exchange import export_model, import_model
from springtide.shards import CHAT_TEMPLATE, TOKENIZER
from springtide.storage import Folder, digest

pytestmark = pytest.mark.processes

transformers = pytest.importorskip("transformers")


def test_transformers_lays_out_a_chat_as_it_was_trained_on(tmp_path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"Hello {number}, 世界?"},
            {"role": "assistant", "content": f"Good evening {number}."},
        ]
        for number in range(300)
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    changes = {"corpus__chat_template": "chatml", "shards__sequence_length": 400, "shards__packing": "best_fit"}
    config = prepare(small(tmp_path / "made", source, **changes, shards__mask_across_documents=True))
    dataset = Folder(config.shards.dataset)
    known = meta(1).model_copy(update={"tokenizer_digest": digest.of_bytes(dataset.read(TOKENIZER))})
    found, remarks = tokenizer_files(known, [dataset], 512, 64)
    assert remarks == []
    out = tmp_path / "out"
    out.mkdir()
    for name, text in found.files.items():
        (out / name).write_text(text)
    assert CHAT_TEMPLATE in found.files
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    assert tokenizer.apply_chat_template(chats[7], tokenize=False) == (
        "<|im_start|>user\nHello 7, 世界?<|im_end|>\n<|im_start|>assistant\nGood evening 7.<|im_end|>\n"
    )


OWN = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    return Path(export_model(chat_run(root), str(root / "out")).url)


def with_template(export: Path, to: Path, value: Any, jinja: bytes | None = None) -> Path:
    """Copy a model; the template is ``value`` in its tokenizer's settings, ``jinja`` in a file."""
    shutil.copytree(export, to)
    (to / CHAT_TEMPLATE).unlink()
    settings = json.loads((to / SETTINGS).read_text())
    (to / SETTINGS).write_text(json.dumps(settings | ({} if value is None else {"chat_template": value})))
    if jinja is not None:
        (to / CHAT_TEMPLATE).write_bytes(jinja)
    return to


@pytest.mark.parametrize(
    ("value", "jinja", "kept"),
    [
        (OWN, None, OWN),
        ([{"name": "tools", "template": "x"}, {"name": "default", "template": OWN}], None, OWN),
        ("of an older file", OWN.encode(), OWN),
        ([{"name": "tools", "template": "x"}], None, ""),
        (None, None, ""),
    ],
)
def test_the_template_of_a_model_comes_in_and_goes_out(
    value: Any, jinja: bytes | None, kept: str, export: Path, tmp_path: Path
) -> None:
    run = import_model(str(with_template(export, tmp_path / "in", value, jinja)), str(tmp_path / "run"))
    assert ((tmp_path / "run" / CHAT_TEMPLATE).exists(), run.config.corpus.chat_template) == (bool(kept), "")
    out = Path(export_model(run, str(tmp_path / "out")).url)
    assert (out / CHAT_TEMPLATE).exists() == bool(kept)
    parser = argparse.ArgumentParser()
    add_config(parser, show_all=False)
    corpus = config_of(parser.parse_args(["--recipe", "sft", "--train.start-from", run.folder.url])).corpus
    assert corpus.chat_template == ("model" if kept else "")
    if kept:
        assert (out / CHAT_TEMPLATE).read_text() == kept
        assert templates(corpus) == {"model": kept}
    elsewhere = corpus.model_copy(update={"chat_template": "model", "tokenizer": "bytes"})
    with pytest.raises(ConfigError, match=r"chat_template = 'model': .*chat_template\.jinja"):
        templates(elsewhere)


def test_a_template_survives_training_on_plain_text(export: Path, tmp_path: Path) -> None:
    """A template is kept where the text of later training has none."""
    run = import_model(str(export), str(tmp_path / "run"))
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(export / TOKENIZER, plain)
    known = meta(1).model_copy(update={"tokenizer_digest": digest.of_bytes((export / TOKENIZER).read_bytes())})
    found, _ = tokenizer_files(known, [Folder(plain), Folder(tmp_path / "nowhere"), run.folder], 512, 64)
    assert found.files[CHAT_TEMPLATE] == (export / CHAT_TEMPLATE).read_text()


@pytest.mark.parametrize(
    ("value", "jinja", "problem"),
    [
        ({"default": OWN}, None, r"tokenizer_config\.json: chat_template = .*is not the text of a template"),
        ("\ud800", None, "is not the text of a template"),
        ([{"name": "default", "template": 3}], None, "is not the text of a template"),
        ("x" * (TEMPLATE_BYTES + 1), None, r"chat_template = 1048577: are more than 1,048,576 bytes"),
        (None, b"x" * (TEMPLATE_BYTES + 1), r"chat_template\.jinja = 1048577: are more than 1,048,576 bytes"),
        (None, b"\xff", r"chat_template\.jinja = 1: is not UTF-8"),
    ],
)
def test_what_is_no_template_is_refused_by_name(
    value: Any, jinja: bytes | None, problem: str, export: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        import_model(str(with_template(export, tmp_path / "in", value, jinja)), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_hostile_template_comes_in_as_text_and_lays_out_nothing(export: Path, tmp_path: Path) -> None:
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    run = import_model(str(with_template(export, tmp_path / "in", hostile)), str(tmp_path / "run"))
    vocabulary = Tokenizer.from_json(run.folder.read(TOKENIZER).decode(), TOKENIZER, "<|endoftext|>")
    with pytest.raises(ConfigError, match=r"question.*unsafe"):
        ChatTemplate("model", run.folder.read(CHAT_TEMPLATE).decode(), vocabulary, None).prompt([Turn("user", "Hi")])
