"""YAML that people write: what it would read as something else than it says is refused with its line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.cli.main import parser
from springtide.cli.options import config_of
from springtide.config.cluster_file import parse_cluster
from springtide.errors import ConfigError


def read(text: str | bytes) -> configs.Config:
    return configs.parse(text if isinstance(text, bytes) else text.encode(), "a.yaml", is_stored=False)


def refused(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as told:
        read(text)
    return str(told.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim: {peak_lr: 1}\nrun: {id: a}\noptim:\n  eps: 0.5\n", "a.yaml:3: optim: is given twice, in lines 1 and 3"),
        ("optim:\n  peak_lr: 1\n  peak_lr: 2\n", "a.yaml:3: optim.peak_lr: is given twice, in lines 2 and 3; keep one"),
        ('{"run": {},\n"run": {}}', "a.yaml:2: run: is given twice, in lines 1 and 2"),
        ('{\n\t"run": {},\n\t"run": {}}', "a.yaml:3: run: is given twice, in lines 2 and 3"),
        ("corpus:\n  sources: {a: x, 'a': y}", "a.yaml:2: corpus.sources.a: is given twice"),
    ],
)  # fmt: skip
def test_a_key_given_twice_is_refused(text: str, said: str) -> None:
    assert said in refused(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stream: {global_batch: 010}", "stream.global_batch = 010: was read as the number 8, in base 8; write it in decimal"),
        ("stream:\n  seed: 017", "a.yaml:2: stream.seed = 017: was read as the number 15, in base 8; write it in decimal"),
        ("train: {eval_every: 1:30}", "train.eval_every = 1:30: was read as the number 90, in base 60; write it in decimal"),
        ("checkpoint: {every_steps: 1:30:00}", "was read as the number 5400, in base 60; write it in decimal, or put quotes"),
        ("optim: {warmup: 10:0}", "optim.warmup = 10:0: was read as the number 600, in base 60"),
        ("elastic: {wait: 1:30.5}", "elastic.wait = 1:30.5: was read as the number 90.5, in base 60"),
        ("run: {id: 0123}", "a.yaml:1: run.id = 0123: was read as the number 83, in base 8; put quotes around it"),
        ("run: {id: 2026-11-28}", "run.id = 2026-11-28: was read as a date; put quotes around it"),
        ("run: {id: 12:30}", "run.id = 12:30: was read as the number 750, in base 60; put quotes around it"),
        ("run: {id: yes}", "run.id = yes: was read as true; put quotes around it"),
        ("run: {id: 1.10}", "run.id = 1.10: was read as the number 1.1; put quotes around it"),
        ("run:\n  id: 2024", "a.yaml:2: run.id = 2024: was read as the number 2024; put quotes around it"),
        ("corpus: {languages: [en, no]}", "corpus.languages.1 = no: was read as false; put quotes around it"),
        ("corpus: {sources: {on: a, 2024: b}}", "corpus.sources.on: the name was read as true; put quotes around it"),
        ("corpus: {sources: {on: a, 2024: b}}", "corpus.sources.2024: the name was read as the number 2024; put quotes"),
        ("track: {mlflow_uri: off}", "track.mlflow_uri = off: was read as false; put quotes around it"),
        ("elastic: {notices: off}", "elastic.notices = off: was read as false; put quotes around it"),
        ("stream: {seed: on}", "stream.seed = on: was read as true; give a number"),
        ("elastic: {env: {OMP_NUM_THREADS: 4}}", "elastic.env.OMP_NUM_THREADS = 4: was read as the number 4; put quotes"),
        ("optim: {peak_lr: 2026-11-28}", "optim.peak_lr = 2026-11-28: was read as a date; give a number"),
        ("stream:\n  ramp:\n  - {rows: 010, until_tokens: 9}", "a.yaml:3: stream.ramp.0.rows = 010: was read as the number 8"),
    ],
)  # fmt: skip
def test_a_value_read_as_something_else_is_refused(text: str, said: str) -> None:
    assert said in refused(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run:\n  id: a\n\troot: b", "a.yaml:3: a tab at line 3; YAML wants spaces"),
        ("run:\tid", "a.yaml:1: a tab at line 1; YAML wants spaces"),
        (b"run:\n  id: a\n  # caf\xe9\n", "a.yaml:3: has a byte that is not UTF-8, 0xe9; save the file as UTF-8"),
        ("optim: {peak_lr: 3,5e-4}", "optim.peak_lr = 3,5e-4: a comma separates entries here; write 3.5e-4"),
        ("stream: {global_batch: 1,000}", "stream.global_batch = 1,000: a comma separates entries here; write 1000"),
        ("train:\n  {total: 1,000,000, seed: 1}", "train.total = 1,000,000: a comma separates entries here; write 1000000"),
        ("train: {total: 1,5M}", "train.total = 1,5M: a comma separates entries here; write 1.5M"),
    ],
)  # fmt: skip
def test_a_slip_of_the_keyboard_is_named(text: str | bytes, said: str) -> None:
    assert refused(text).endswith(said)
    assert refused(text).startswith("a.yaml:")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("stream: {global_batch: 0x10}", "stream.global_batch", 16),
        ("optim: {peak_lr: 00.5}", "optim.peak_lr", 0.5),
        ("parallel: {compile: yes}", "parallel.compile", True),
        ("elastic: {deadline: 2026-12-01T08:00:00Z}", "elastic.deadline", "2026-12-01T08:00:00+00:00"),
        ("checkpoint: {every_steps: 0}", "checkpoint.every_steps", 0),
        ("run: {id: 1e3}", "run.id", "1e3"),
        ("run: {id: '0123'}", "run.id", "0123"),
        ("run: {id: caf_1}\r\n", "run.id", "caf_1"),
        ("\ufeffrun: {id: a}", "run.id", "a"),
        ("stream: {seed: 1_000}", "stream.seed", 1000),
        ("train: {total: 2M, seed: 3}", "train.total", 2_000_000),
        ("optim: {<<: {weight_decay: 0.5}, weight_decay: 0.25}", "optim.weight_decay", 0.25),
    ],
)
def test_what_means_one_thing_is_read(text: str, field: str, value: object) -> None:
    assert configs.flatten(read(text))[field] == value


@pytest.mark.parametrize("name", configs.recipes.RECIPES)
def test_what_springtide_writes_obeys_the_rules(name: str) -> None:
    """A config's YAML and JSON, with texts that YAML 1.1 reads as numbers, flags and dates."""
    changes = {"run.id": "0123", "track.experiment": "no", "elastic.env": {"OMP_NUM_THREADS": "010"}}
    config = configs.recipe(name).override(changes)
    assert read(configs.dump(config)) == config
    assert read(json.dumps(config.model_dump(mode="json"), indent="\t")) == config


def test_a_stored_config_is_read_as_ever(tmp_path: Path) -> None:
    """Earlier versions may have written what a person may not."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "config.yaml").write_text("stream: {global_batch: 010}\nstream: {global_batch: 020}\n")
    assert configs.load_config(tmp_path / "config.yaml").stream.global_batch == 16


def test_every_problem_has_its_own_line() -> None:
    told = refused("model:\n  dimm: 3\ntrain:\n  total: x\noptm: {}\n").splitlines()
    assert [line.partition(" ")[0] for line in told] == ["a.yaml:2:", "a.yaml:4:", "a.yaml:5:"]


def test_a_value_on_the_command_line_obeys_the_rules() -> None:
    for option, said in {
        "--corpus.languages=[en, no]": "corpus.languages.1 = no: was read as false; put quotes around it",
        "--stream.ramp=[{rows: 3,5, until_tokens: 9}]": "stream.ramp.0.rows = 3,5: a comma separates entries here",
        "--corpus.sources={a: x, a: y}": "corpus.sources.a: is given twice",
        "--corpus.sources={a: [}": "corpus.sources = '{a: [}': is not YAML",
    }.items():
        with pytest.raises(ConfigError) as told:
            config_of(parser(False).parse_args(["plan", "--recipe", "tiny", "--cluster", "x", option]))
        assert str(told.value).startswith(said)


def test_a_cluster_file_obeys_the_rules() -> None:
    node = "node_types:\n- {name: a, device: H100, host_memory: 2TB, prices: {spot: 39,5}, zones: [no]}"
    with pytest.raises(ConfigError) as told:
        parse_cluster(node.encode(), "c.yaml")
    assert "c.yaml:2: node_types.0.prices.spot = 39,5: a comma separates entries here; write 39.5" in str(told.value)
    assert "c.yaml:2: node_types.0.zones.0 = no: was read as false; put quotes around it" in str(told.value)


def test_keys_that_are_no_text_are_refused_at_once() -> None:
    """A key may be a list of aliases, which spelled out is larger than memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "is not YAML" in refused("\n".join([*lines, "? *a11\n: 1"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stream: {a: 1," + "1," * 40_000 + "1}", "stream.a = 1,1,1"),
        ("stream: {" + "a: 1, " * 20_000 + "}", "and 19969 more"),
        ("stream: {skip: [" + "010," * 20_000 + "]}", "and 19970 more"),
        ("stream: {seed: 0" + "7" * 900_000 + "}", "was read as a number; write it in decimal"),
        ("stream: {seed: 1" + ":1" * 400_000 + "}", "was read as a number; write it in decimal"),
        ("what: 1" + ":1" * 400_000, "a number in base 60 has more than 8 colons"),
        ("stream: {" + "k" * 900_000 + ": 1}", "is not YAML"),
    ],
    ids=["commas", "twice", "octal", "digits", "colons", "colons of nothing", "key"],
)
def test_a_hostile_file_is_refused_in_time(text: str, said: str) -> None:
    """Each was quadratic somewhere, or printed what it read."""
    before_s = time.process_time()
    told = refused(text)
    assert said in told
    assert len(told) < 20_000
    assert time.process_time() - before_s < 20
