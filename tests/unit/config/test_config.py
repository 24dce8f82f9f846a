"""Configs are read exactly, changed by name, and refused with field, value, limit and remedy."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from springtide import config as configs
from springtide.config import Bytes, Seconds, Tokens
from springtide.config.code import find_code
from springtide.config.fields import fields
from springtide.config.files import parse
from springtide.errors import ConfigError


@pytest.mark.parametrize("name", configs.recipes.RECIPES)
def test_a_recipe_survives_its_file(name: str, tmp_path: Path) -> None:
    config = configs.recipe(name)
    (tmp_path / "saved.yaml").write_text(configs.dump(config))
    assert configs.load_config(tmp_path / "saved.yaml") == config


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        configs.recipes.demo().optim.peak_lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2M", 2_000_000), ("1.5B", 1_500_000_000), ("12_000", 12_000), ("3k", 3000), ("1e6", 1_000_000), ("7", 7)],
)
def test_tokens_are_read_with_their_unit(text: str, amount: int) -> None:
    assert Tokens.parse(text) == amount
    assert configs.recipes.demo().override({"train.total": "2M"}).train.total == 2_000_000


def test_bytes_and_seconds() -> None:
    assert Bytes.parse("64MiB") == 64 * 2**20
    assert Bytes.parse("64MB") == 64 * 10**6
    assert Seconds.parse("10m") == 600.0
    assert Seconds.parse("250ms") == 0.25
    assert Seconds.parse("3650d") == 3650 * 86400
    for endless in ("3651d", "1e300", 1e300, 10**300):  # timers take no such number
        with pytest.raises(ValueError, match="315360000"):
            Seconds.parse(endless)


@pytest.mark.parametrize("text", ["2Q", "", "M", "-3", "1.5", "two", "1 000", "1e999"])
def test_what_is_no_amount_is_refused_with_the_suffixes_known(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.total = .*(k, M, B, G, T|whole number|finite)"):
        configs.recipes.demo().override({"train.total": text})


@given(st.integers(0, 10**15))
def test_whole_amounts_come_back(number: int) -> None:
    assert Tokens.parse(str(number)) == number == Tokens.parse(number)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"optim.peak_lr": "-1"}, ["optim.peak_lr = '-1'", "must be above 0", "Learning rate"]),
        ({"optim.peek_lr": "1"}, ["optim.peek_lr", "is not a setting", "did you mean 'optim.peak_lr'"]),
        (
            {"elastic.max_workers": "40"},
            ["elastic.max_workers = 40", "needs a lane", "8", "raise stream.global_batch"],
        ),
        ({"elastic.min_workers": "3"}, ["elastic.min_workers = 3", "at most elastic.max_workers = 2", "lower it"]),
        ({"stream.lanes": "5"}, ["stream.lanes = 5", "must divide stream.global_batch = 8", "divisor"]),
        (
            {"stream.ramp": [{"rows": 6, "until_tokens": 1}]},
            ["stream.ramp.rows = 6", "multiple of the 4 lanes", "stream.lanes"],
        ),
        (
            {"stream.ramp": [{"rows": 4, "until_tokens": 9}, {"rows": 8, "until_tokens": 9}]},
            ["stream.ramp.until_tokens = 9", "more than 9", "sort"],
        ),
        ({"model.num_heads": "5"}, ["model.num_heads = 5", "model.dim = 256", "even multiple"]),
        ({"model.num_kv_heads": "3"}, ["model.num_kv_heads = 3", "must divide model.num_heads = 4"]),
        (
            {"model.base_width": "100"},
            ["model.base_width = 100", "model.num_heads = 4 must divide it", "or set model.head_dim"],
        ),
        (
            {"model.base_width": "96", "model.head_dim": "64"},
            ["model.base_width = 96", "has 1.5 heads of model.head_dim = 64", "whole number of heads"],
        ),
        (
            {"model.base_width": "64", "model.source": "mine:build"},
            ["model.base_width = 64", "model.source = 'mine:build' is a model of your own", "use 0"],
        ),
        (
            {"model.base_width": "64", "optim.optimizer": "muon"},
            ["model.base_width = 64", "optim.optimizer = 'muon'", "use adamw, or base_width 0"],
        ),
        ({"shards.sequence_length": "4096"}, ["shards.sequence_length = 4096", "model.max_sequence_length", "shorten"]),
        ({"corpus.vocab_size": "70000"}, ["corpus.vocab_size = 70000", "uint16", "uint32"]),
        ({"optim.warmup": "9M"}, ["optim.warmup = 9000000", "longer than train.total", "train longer"]),
        ({"train.total": "0"}, ["train.total = 0", "at least one token"]),
        (
            {"checkpoint.keep_best": 1, "checkpoint.best_by": "heldout_loss", "train.eval_async": True},
            ["checkpoint.best_by = 'heldout_loss'", "train.eval_async", "choose by loss"],
        ),
        ({"run.id": "../escape"}, ["run.id", "../escape"]),
        ({"optim.weight_decay": "inf"}, ["optim.weight_decay = 'inf'", "finite"]),
        ({"elastic.settle": math.inf}, ["elastic.settle = inf", "finite"]),
    ],
)
def test_a_bad_setting_says_field_value_limit_and_remedy(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.recipes.demo().override(changes)
    for part in parts:
        assert part in str(caught.value)


def test_every_mistake_in_a_file_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        configs.build({"optm": {}, "model": {"dimm": 3}, "train": {"total": "x"}})
    assert "'optim'?" in str(caught.value)
    assert "'model.dim'?" in str(caught.value)
    assert "train.total = 'x'" in str(caught.value)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'demo'"):
        configs.recipe("dmeo")


@pytest.mark.parametrize("text", ["- a list", "a: [unclosed", "nothing", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError):
        configs.load_config(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match=r"config = .*absent\.yaml"):
        configs.load_config(tmp_path / "absent.yaml")


def test_a_small_file_of_aliases_makes_a_short_message() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]  # 9**9 times x, spelled out
    with pytest.raises(ConfigError) as caught:
        configs.files.parse("\n".join([*lines, "optim: {peak_lr: *a8}"]).encode())
    assert "optim.peak_lr = [[[[" in str(caught.value)
    assert len(str(caught.value)) < 10**6


def test_only_what_is_learned_counts_for_the_fingerprint() -> None:
    demo = configs.recipes.demo()
    moved = demo.override({"run.root": "/elsewhere", "elastic.max_workers": 4, "train.micro_batch": 1})
    assert configs.fingerprint(moved) == configs.fingerprint(demo)
    assert configs.changes_the_run(configs.difference(demo, moved)) == {}
    other = moved.override({"optim.peak_lr": 1e-3})
    assert configs.fingerprint(other) != configs.fingerprint(demo)
    assert configs.changes_the_run(configs.difference(demo, other)) == {"optim.peak_lr": (3e-3, 1e-3)}
    assert configs.fingerprint(demo.override({"model.base_width": 64})) != configs.fingerprint(demo)


def test_padding_that_would_be_learned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shards.packing = 'best_fit': .*set shards.mask_across_documents"):
        configs.recipes.tiny().override({"shards.packing": "best_fit"})


def test_fields_are_dotted_names_of_leaves() -> None:
    assert {"optim.peak_lr", "run.id", "feed.read_bytes"} <= fields().keys()
    assert "optim" not in fields()


def test_steps_and_tokens_follow_the_ramp() -> None:
    demo = configs.recipes.demo()
    length, batch = demo.shards.sequence_length, demo.stream.global_batch
    ramp = [{"rows": batch // 2, "until_tokens": 3 * batch * length}]
    config = demo.override({"stream.ramp": ramp, "train.total": 10 * batch * length, "optim.warmup": 0})
    assert demo.num_steps * demo.tokens_per_step >= demo.train.total
    assert (config.num_steps, config.steps_to(3 * batch * length)) == (6 + 7, 6)
    assert [config.tokens_after(step) // length for step in (1, 6, 7)] == [batch // 2, 3 * batch, 4 * batch]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"5", "a config is a mapping"),
        (b"optim: {peak_lr: -1}", r"optim\.peak_lr = -1"),
        (b"run: 2001-99-01", "is not YAML"),
        (b"[" * 2**20, "is not YAML .brackets nest deeper than 200"),
        (b"- " * 5000, "is not YAML .lists nest deeper than 200"),
        (b"\xff", "not UTF-8, 0xff; save the file as UTF-8"),
        (b"elastic: {settle: {a: 1}}", r"elastic\.settle = "),
        (b"train: {total: %d}" % 10**400, r"train\.total = "),
        (b"# " * 2**20, "is larger than 1,048,576 bytes"),
    ],
)
def test_a_problem_names_the_file_and_the_field(tmp_path: Path, text: bytes, problem: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=problem) as refused:
        configs.load_config(file)
    assert str(file) in str(refused.value)


def test_a_config_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe.*regular file"):
        configs.load_config(pipe)


def test_merges_that_multiply_are_refused_at_once() -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 40)]
    with pytest.raises(ConfigError, match=r"(?s)<< .*10000.*line 6"):
        configs.files.parse("\n".join(lines).encode())


def test_aliases_make_no_long_message(tmp_path: Path) -> None:
    """Of a file of 300 bytes; spelled out, they are a hundred million values."""
    letters = "abcdefghi"
    lines = ["a: &a [" + ",".join(["x"] * 9) + "]"]
    lines += [f"{one}: &{one} [{','.join([f'*{before}'] * 9)}]" for before, one in itertools.pairwise(letters)]
    (tmp_path / "it.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="setting") as refused:
        configs.load_config(tmp_path / "it.yaml")
    assert len(str(refused.value)) < 25_000


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "0" + "7" * 9000, "0b" + "1" * 20_000])
def test_a_number_of_many_digits_is_a_bad_value(number: str) -> None:
    """Python spells no number of more than 4,300 digits, and YAML reads them in other bases."""
    with pytest.raises(ConfigError, match=r"train\.total = .*[\d,]+ bits"):
        parse(f"train:\n  total: {number}\n".encode())


def test_many_unknown_settings_are_told_at_once() -> None:
    """To look for a similar name took 3 ms for each: three minutes for 60,000."""
    names = ", ".join(f"q{number}: 1" for number in range(20_000))
    before_s = time.process_time()
    with pytest.raises(ConfigError, match="and 19970 more"):
        parse(f"stream: {{{names}}}\n".encode())
    assert time.process_time() - before_s < 20


def test_a_function_that_takes_other_arguments_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended as a TypeError of a worker, after the whole start."""
    lines = [
        "def one(config): ...",
        "def four(a, b, c, d): ...",
        "def any(*given): ...",
        "def named(config, *, text): ...",
    ]
    (tmp_path / "mine_of_a_test.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    for field, source, said in [
        (
            "model.source",
            "one",
            "takes (config), and is called as one(config, vocab_size, eos_id, bos_id); change what",
        ),
        ("optim.source", "four", "takes (a, b, c, d), and is called as four(named_parameters, config)"),
        ("track.listener", "four", "is called as four(run)"),
        ("corpus.filter", "named", "takes (config, *, text), and is called as named(text)"),
    ]:
        with pytest.raises(ConfigError) as told:
            find_code(field, f"mine_of_a_test:{source}")
        assert f"{field} = 'mine_of_a_test:{source}': " in str(told.value)
        assert said in str(told.value)
    for field in ("model.source", "optim.source", "objective.source", "track.listener", "corpus.filter"):
        assert callable(find_code(field, "mine_of_a_test:any"))
