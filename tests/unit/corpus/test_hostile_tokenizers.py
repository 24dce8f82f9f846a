"""Tokenizers and texts that make the library give up, or grow without end."""

from __future__ import annotations

import base64
import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from springtide.api.prepare import prepare
from springtide.config import Config
from springtide.corpus import UNSPLIT, Tokenizer, open_tokenizer, probe, tokenizer_probe
from springtide.corpus.tokenizer import train_bpe
from springtide.dataset import open_dataset
from springtide.errors import CorpusError
from springtide.shards import load_manifest, write_manifest
from springtide.storage import Folder, digest

CATASTROPHE = "a" * 26 + "!"
"""What ``(a+)+$`` gives up on."""


def _with(**parts: Any) -> str:
    """A byte-level tokenizer.json with other parts."""
    return json.dumps(json.loads(train_bpe(["hello world"], 300).to_json()) | parts)


def _gives_up() -> str:
    return _with(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    )


def _replace(content: str, times: int, **pattern: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [one] * times}


def test_a_text_that_cannot_be_split_is_skipped() -> None:
    """A text that cannot be split is none and the others are encoded."""
    found = Tokenizer.from_json(_gives_up())
    one, bad, other = found.try_encode(["b", CATASTROPHE, "bc"])
    assert bad is None
    assert [len(ids) for ids in (one, other) if ids is not None] == [2, 3]
    with pytest.raises(CorpusError, match=UNSPLIT):
        list(found.encode(["b", CATASTROPHE]))
    [again] = found.encode(["bc"])
    assert np.array_equal(again, other), "the library still works"


def test_a_prepare_counts_and_names_the_document(tiny: Config, tmp_path: Path) -> None:
    """A file of 10 KB ended it, without a name."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02d}.txt").write_text(f"honest text number {number}: " + "words and words " * 40)
    with gzip.open(texts / "odd.txt.gz", "wb") as file:
        file.write(b" " * 10_100_000 + b"a")
    changes = {"shards.dataset": "", "corpus.source": str(texts), "shards.root": str(tmp_path / "data")}
    config = prepare(
        tiny.override({**changes, "corpus.tokenizer": "bpe", "corpus.vocab_size": 300, "corpus.max_files": 0})
    )
    manifest = load_manifest(Folder(config.shards.dataset))
    dropped = {reason: count for reason, count in manifest.source["dropped"].items() if reason.startswith(UNSPLIT)}
    assert list(dropped.values()) == [1]
    assert "odd.txt" in json.dumps(manifest.source)


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (_replace("a" * 100, 8, String="a"), "10,000,000,000,000,000"),
        (_replace("a" * 65, 1, Regex="a*"), "66"),
        (_replace("aa", 7, String="a"), "128"),
        ({"type": "Sequence", "normalizers": [_replace("aa", 7, String="a")]}, "128"),
        ({"type": "Sequence", "normalizers": [{"type": "NFKD"}, _replace("a" * 15, 1, String=".")]}, "270"),
    ],
)
def test_replacements_that_lengthen_are_refused(normalizer: dict[str, Any], growth: str) -> None:
    with pytest.raises(CorpusError, match=f"normalizer .* {growth} times"):
        Tokenizer.from_json(_with(normalizer=normalizer))


def _times(kind: str, times: int, part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: [part] * times}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_BERT = {"type": "BertNormalizer", "clean_text": False, "strip_accents": False, "lowercase": False}
_BERT |= {"handle_chinese_chars": True}
_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_TEMPLATE = {
    "type": "TemplateProcessing",
    "pair": [_TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
_CTC = {"type": "CTC", "pad_token": "?", "word_delimiter_token": "", "cleanup": True}


@pytest.mark.parametrize(
    ("step", "part", "growth"),
    [
        ("pre_tokenizer", _times("pretokenizers", 14, _BYTES), "32,768"),
        ("normalizer", _times("normalizers", 12, _BYTES), "8,192"),
        ("normalizer", _times("normalizers", 50, _BERT), r"[\d,]+"),
        ("decoder", _times("decoders", 12, _CTC), "531,441"),
        ("decoder", _times("decoders", 12, {"type": "BPEDecoder", "suffix": ""}), "531,441"),
        ("decoder", _times("decoders", 20, {"type": "WordPiece", "prefix": "??", "cleanup": False}), "1,048,576"),
        ("post_processor", _TEMPLATE | {"single": [_TEXT] * 1000}, "1,000"),
        ("post_processor", _times("processors", 7, _TEMPLATE | {"single": [_TEXT] * 2}), "128"),
    ],
)
def test_every_step_that_lengthens_is_refused(step: str, part: dict[str, Any], growth: str) -> None:
    """Each of these took gigabytes for a text of a thousand characters, or may with a few parts more."""
    with pytest.raises(CorpusError, match=f"{step} .* {growth} times"):
        Tokenizer.from_json(_with(**{step: part}))


def test_growth_adds_up_over_the_steps() -> None:
    """Each of the two steps is within the limit."""
    steps = {"normalizer": _replace("a" * 9, 1, String="a"), "post_processor": _TEMPLATE | {"single": [_TEXT] * 9}}
    for step, part in steps.items():
        Tokenizer.from_json(_with(**{step: part}))
    with pytest.raises(CorpusError, match=r"post_processor .* 81 times"):
        Tokenizer.from_json(_with(**steps))


def test_other_parts_have_bounds() -> None:
    """Each of these aborted the process, or took more than a minute for a small text."""
    charsmap = base64.b64encode(bytes(4) + b"z" * 100_000 + b"\0").decode()
    word_piece = {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##", "vocab": {"?": 0, "a": 1}}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ends = [{"id": 2, "content": "</s>", "special": True, **flags}]
    long = {"type": "BPE", "vocab": {"a": 0, "b" * 70_000: 1}, "merges": []}
    far = {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}
    for problem, parts in {
        "puts 1,000,000 characters before a text": {"normalizer": {"type": "Prepend", "prepend": "b" * 1_000_000}},
        "puts 120 characters before a text": {
            "normalizer": _times("normalizers", 2, {"type": "Prepend", "prepend": "b" * 60})
        },
        "its normalizer has 257 parts": {"normalizer": _times("normalizers", 256, {"type": "NFC"})},
        "a continuing_subword_prefix of 1,000,000 characters": {
            "model": {**word_piece, "max_input_chars_per_word": 9, "continuing_subword_prefix": "b" * 1_000_000},
            "added_tokens": ends,
        },
        "maps characters to 100,000 bytes": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}},
        "max_input_chars_per_word = 1,000,000,000": {
            "model": {**word_piece, "max_input_chars_per_word": 10**9},
            "added_tokens": ends,
        },
        "a token of 70,000 characters": {"model": long, "added_tokens": ends},
        "4,294,967,296 ids": {"model": far, "added_tokens": [{**ends[0], "id": 1}]},
        "drops merges at random": {"model": {**far, "vocab": {"a": 0, "b": 1}, "dropout": 0.5}, "added_tokens": ends},
    }.items():
        with pytest.raises(CorpusError) as error:
            Tokenizer.from_json(_with(**parts))
        assert problem in str(error.value), parts


def test_a_decoder_that_panics_is_an_error() -> None:
    text = _with(decoder={"type": "Strip", "content": "b", "start": 0, "stop": 5})
    found = Tokenizer.from_json(text)
    with pytest.raises(CorpusError, match="cannot decode"):
        found.decode([found.tokenizer.token_to_id("b")])


def test_usual_replacements_pass() -> None:
    size = Tokenizer.from_json(_with()).size
    for normalizer in (
        _replace("\u2581", 3, String=" "),
        _replace(" ", 2, Regex=" {2,}"),
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "NFKC"}]},
        {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "ByteLevel"}]},
        _BERT,
    ):
        assert Tokenizer.from_json(_with(normalizer=normalizer)).size == size


def test_usual_decoders_and_templates_pass() -> None:
    """Those of Llama 2 and 3, BERT, GPT and wav2vec."""
    begin = {"SpecialToken": {"id": "!", "type_id": 0}}
    template = _TEMPLATE | {"single": [begin, _TEXT], "special_tokens": {"!": {"id": "!", "ids": [1], "tokens": ["!"]}}}
    for parts in (
        {"post_processor": _times("processors", 1, _BYTES) | {"processors": [_BYTES, template]}},
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}},
        {"decoder": _CTC | {"word_delimiter_token": "|"}},
        {"decoder": _times("decoders", 1, {"type": "ByteFallback"}) | {"decoders": [{"type": "ByteFallback"}, _BYTES]}},
        {"pre_tokenizer": _BYTES, "decoder": _BYTES},
    ):
        Tokenizer.from_json(_with(**parts))


@pytest.mark.processes
def test_a_file_is_probed_in_a_process_of_its_own(tmp_path: Path) -> None:
    """This one ends the process that encodes a letter."""
    text = _with(normalizer=_replace("a" * 100, 8, String="a"))
    with pytest.raises(CorpusError, match=r"process .*signal"):
        probe(text, "evil.json")
    (tmp_path / "evil.json").write_text(text)
    with pytest.raises(CorpusError, match=r"evil\.json"):
        open_tokenizer(str(tmp_path / "evil.json"), [], 300)
    probe(_with(), "fine.json")


def test_large_files_are_refused_before_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of ``{},`` took gigabytes."""
    (tmp_path / "many.json").write_bytes(b"[" + b"{}," * 2**22 + b"{}]")
    (tmp_path / "long.json").write_text(_with())
    with pytest.raises(CorpusError, match=r"many\.json.*values.*4,194,304"):
        open_tokenizer(str(tmp_path / "many.json"), [], 300)
    monkeypatch.setattr(tokenizer_probe, "MOST_BYTES", 1000)
    with pytest.raises(CorpusError, match=r"long\.json.*bytes.*1,000"):
        open_tokenizer(str(tmp_path / "long.json"), [], 300)


@pytest.mark.processes
def test_the_tokenizer_of_a_dataset_is_probed(tiny: Config, tmp_path: Path) -> None:
    """This one ends the process that loads it: its added token is normalized at once."""
    dataset = Folder(shutil.copytree(tiny.shards.dataset, tmp_path / "data"))
    spec = json.loads(dataset.read("tokenizer.json"))
    added = {**spec["added_tokens"][0], "id": 300, "content": "a", "special": False, "normalized": True}
    spec |= {"normalizer": _replace("a" * 100, 8, String="a"), "added_tokens": [*spec["added_tokens"], added]}
    text = json.dumps(spec)
    dataset.write("tokenizer.json", text)
    sealed = load_manifest(dataset).model_copy(update={"tokenizer_digest": digest.of_bytes(text.encode())})
    write_manifest(dataset, sealed)
    with pytest.raises(CorpusError, match=r"process .*signal"):
        open_dataset(dataset.url)


def test_a_tokenizer_that_was_written_here_is_not_probed_again(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    text = Folder(tiny.shards.dataset).read("tokenizer.json").decode()
    Tokenizer.from_json(text).to_json()
    monkeypatch.setattr(tokenizer_probe.subprocess, "run", started)
    open_dataset(tiny.shards.dataset)
    with pytest.raises(AssertionError, match="process"):
        tokenizer_probe.probe(text + " ", "another")


def test_a_long_word_does_not_hold_up_training() -> None:
    """Spaces, which cannot be split either, and DNA: the time grew with the square of their length."""
    dna = "".join(random.Random(0).choices("acgt", k=1_000_000))
    assert train_bpe([" " * 3_000_000 + "a", " " * 10_100_000 + "a", dna, "hello hello"], 300).size == 300
