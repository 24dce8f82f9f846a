"""A config file on the command line: where it stands, which recipe it starts from, and the paths that it names."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import pytest

from springtide import config as configs
from springtide.api.prepare import prepare
from springtide.api.resolve import with_epochs
from springtide.cli.main import main, parser
from springtide.cli.options import config_of
from springtide.config import Config
from springtide.config.files import recipe
from springtide.errors import ConfigError
from springtide.run.folder import Run
from springtide.shards import TRAIN, load_manifest
from springtide.storage import Folder
from springtide.stream import open_data

TEMPLATE = """\
{% for message in messages %}<{{ message.role }}>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}
{% endgeneration %}{% else %}{{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*words: str) -> Config:
    options, unknown = parser(False).parse_known_args(words)
    assert unknown == []
    return config_of(options)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as told:
        config(*words)
    return str(told.value)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "mine.yaml", "--run.root", "here"),
        ("train", "--run.root", "here", "mine.yaml"),
        ("train", "--trust-code", "mine.yaml", "--run.root", "here"),
        ("train", "mine.yaml", "--config", "mine.yaml", "--run.root", "here", "--resume"),
        ("data", "prepare", "mine.yaml", "--run.root", "here"),
        ("plan", "--cluster", "nodes.yaml", "mine.yaml", "--run.root", "here"),
        ("plan", "mine.yaml", "--run.root=here"),
        ("sweep", "--space", "space.py", "mine.yaml", "--run.root", "here"),
    ],
    ids=" ".join,
)
def test_a_config_file_needs_no_option(words: tuple[str, ...]) -> None:
    Path("mine.yaml").write_text("run: {id: mine}")
    assert (config(*words).run.id, config(*words).run.root) == ("mine", "here")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine.yaml", "--config", "other.yaml"), "--config = 'other.yaml': and mine.yaml are two config files; name one"),
        (("mine.yaml", "--recipe", "tiny"), "--recipe = 'tiny': and mine.yaml are two configs; name one of them, or write"),
        (("--config", "mine.yaml", "--recipe", "tiny"), "--recipe = 'tiny': and mine.yaml are two configs"),
        (("tiny",), "config = 'tiny': is a recipe, not a file; write --recipe tiny"),
        ((), "config = '': is missing; name a file, or --recipe and one of tiny, demo"),
        (("absent.yaml",), "config = 'absent.yaml': cannot be read"),
    ],
)  # fmt: skip
def test_one_config_is_named(words: tuple[str, ...], said: str) -> None:
    Path("mine.yaml").write_text("run: {id: mine}")
    assert refused("train", *words).startswith(said)


def test_a_file_after_resume_is_told_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--resume", "mine.yaml"])
    assert "'mine.yaml' is not auto; a config file goes before --resume" in capsys.readouterr().err


def test_a_file_names_its_recipe() -> None:
    Path("mine.yaml").write_text("recipe: tiny\nrun: {id: mine}\ntrain:\nmodel:\n  num_layers: 3\n")
    assert config("train", "mine.yaml") == recipe("tiny").override({"run.id": "mine", "model.num_layers": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {id: a}\nrecipe: tinny", "mine.yaml:2: recipe = 'tinny': known are tiny, demo"),
        ("recipe: sft", "mine.yaml:1: recipe = 'sft': goes on from a model; name its run"),
        ("recipe: sft\ntrain: {start_from: runs/none}", "train.start_from = 'runs/none': has no config.yaml; name the folder"),
        ("recipe: 010", "mine.yaml:1: recipe = '8': known are"),
        (
            "model: {num_heads: 4}",
            "mine.yaml:1: model.num_kv_heads = 3: must divide model.num_heads = 4; choose a divisor "
            "(model.num_kv_heads: not in this file, from the defaults)",
        ),
        (
            "recipe: tiny\nmodel:\n  num_kv_heads: 3",
            "mine.yaml:3: model.num_kv_heads = 3: must divide model.num_heads = 4; choose a divisor "
            "(model.num_heads: not in this file, from recipe 'tiny')",
        ),
        ("recipe: tiny\ntrain: 5", "mine.yaml:2: train = 5: is not a table of names and values"),
    ],
)  # fmt: skip
def test_an_error_says_which_recipe_a_value_is_from(text: str, said: str) -> None:
    Path("mine.yaml").write_text(text)
    assert said in refused("train", "mine.yaml")


def test_a_file_may_start_from_a_model(tiny: Config) -> None:
    """Its recipe takes the model from the run that the file or the command line names."""
    Run(Folder("runs/base")).write_config(tiny.override({"model.dim": 32, "train.micro_batch": 3}))
    Path("mine.yaml").write_text("recipe: lora\ntrain: {start_from: runs/base, total: 99k}\n")
    found = config("train", "mine.yaml", "--optim.peak-lr", "1e-5")
    assert (found.model.dim, found.model.adapter, found.train.micro_batch) == (32, "lora", 3)
    assert (found.train.total, found.optim.peak_lr, found.train.start_with) == (99_000, 1e-5, "weights")
    Path("mine.yaml").write_text("recipe: lora\n")
    assert config("train", "mine.yaml", "--train.start-from", "runs/base").model.dim == 32


def test_inputs_are_looked_up_beside_the_file() -> None:
    """Those of the corpus stay as they are typed, and are opened where they are; roots are relative to the shell."""
    Path("conf/runs/base").mkdir(parents=True)
    for name in ("docs.jsonl", "more.txt", "chat.jinja", "tokenizer.json"):
        Path("conf", name).write_text("{}")
    Path("here.txt").write_text("x")
    Path("conf/mine.yaml").write_text("""
recipe: tiny
corpus:
  source: docs.jsonl
  sources: {a: more.txt, b: {source: "*.jsonl", chat_template: chat.jinja}, c: here.txt, d: stdlib, e: none.txt}
  tokenizer: tokenizer.json
run: {root: runs}
shards: {root: runs}
train: {start_from: runs/base}
""")
    found = config("train", "conf/mine.yaml", "--run.id", "a")
    corpus, folder = found.corpus, Path("conf").resolve()
    assert (corpus.source, corpus.tokenizer, corpus.sources["a"].source) == ("docs.jsonl", "tokenizer.json", "more.txt")
    for typed in ("docs.jsonl", "more.txt", "*.jsonl", "chat.jinja", "tokenizer.json"):
        assert corpus.path(typed) == str(folder / typed)
        assert corpus.each()["b"].path(typed) == pickle.loads(pickle.dumps(corpus)).path(typed) == str(folder / typed)
    assert [corpus.path(typed) for typed in ("here.txt", "stdlib", "none.txt")] == ["here.txt", "stdlib", "none.txt"]
    assert (found.train.start_from, found.run.root, found.shards.root) == (str(folder / "runs/base"), "runs", "runs")
    assert configs.parse(configs.dump(found).encode()).corpus.path("docs.jsonl") == "docs.jsonl"


def test_an_input_in_two_places_is_refused_with_both(tmp_path: Path) -> None:
    Path("conf").mkdir()
    for folder in (Path(), Path("conf")):
        (folder / "docs.jsonl").write_text("{}")
    Path("conf/mine.yaml").write_text("corpus:\n  source: docs.jsonl")
    told = refused("train", "conf/mine.yaml")
    assert told.startswith("conf/mine.yaml:2: corpus.source = 'docs.jsonl': is in the current folder, ")
    assert f"{tmp_path}/docs.jsonl, and beside the file, {tmp_path}/conf/docs.jsonl; give the absolute path" in told
    Path("docs.jsonl").unlink()
    Path("docs.jsonl").symlink_to("conf/docs.jsonl")
    assert config("train", "conf/mine.yaml").corpus.path("docs.jsonl") == "docs.jsonl"


@pytest.mark.processes  # a template is rendered in its own
def test_a_dataset_is_made_of_a_corpus_beside_its_config(tmp_path: Path) -> None:
    """Also of its chats, template and the text it stays apart from; the dataset is that of the same config elsewhere."""
    Path("conf").mkdir()
    words = [f"w{number}" for number in range(50)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": words[n % 50]},
                {"role": "assistant", "content": " ".join(words[n % 7 :])},
            ]
        }
        for n in range(300)
    ]
    Path("conf/chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    Path("conf/apart.txt").write_text("something else")
    Path("conf/chat.jinja").write_text(TEMPLATE)
    Path("conf/mine.yaml").write_text("""
recipe: tiny
corpus: {source: chats.jsonl, chat_template: chat.jinja, apart_from: [apart.txt], near_duplicates: false}
shards: {packing: best_fit, mask_across_documents: true, sequence_length: 256}
""")
    made = prepare(config("data", "prepare", "conf/mine.yaml")).shards.dataset
    os.chdir("conf")
    assert (
        prepare(config("data", "prepare", "mine.yaml", "--shards.root", str(tmp_path / "datasets"))).shards.dataset
        == made
    )
    assert load_manifest(Folder(made)).source["source"] == "chats.jsonl"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("run: {root: $HOME/runs}", "run.root", "~/runs"),
        ("shards: {root: '${HOME}/data'}", "shards.root", "~/data"),
        ("corpus: {source: $HOME}", "corpus.source", "~"),
        ("run: {root: '$odd/runs'}", "run.root", "$odd/runs"),
    ],
)
def test_home_is_expanded(text: str, field: str, value: str) -> None:
    Path("$odd/runs").mkdir(parents=True)
    Path("mine.yaml").write_text(text)
    assert configs.flatten(config("train", "mine.yaml"))[field] == value
    assert config("train", "--recipe", "tiny", "--run.root", "$HOME/x").run.root == "~/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "run:\n  root: $USER/runs",
            "mine.yaml:2: run.root = '$USER/runs': $USER is not replaced; only $HOME is, at the",
        ),
        (
            "corpus: {source: 's3://b/${WHO}/x'}",
            "${WHO} is not replaced; only $HOME is, at the beginning; write out what",
        ),
        ("stream: {mixture: {a: /data/$HOME}}", "stream.mixture.a = '/data/$HOME': $HOME is not replaced"),
    ],
)
def test_other_variables_are_refused(text: str, said: str) -> None:
    Path("mine.yaml").write_text(text)
    assert said in refused("train", "mine.yaml")
    assert "$USER is not replaced" in refused("train", "--recipe", "tiny", "--run.root", "$USER/runs")


def test_init_writes_a_config_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings are those of the recipe tiny, each with its description; nothing is overwritten."""
    Path("con f").mkdir()
    for words, path in ((), "springtide.yaml"), (("con f/mine.yaml",), "con f/mine.yaml"):
        assert main(["init", *words]) == 0
        assert capsys.readouterr().out.startswith(f"wrote {path}; next: springtide train ")
        assert config("train", path) == recipe("tiny")
        text = Path(path).read_text()
        assert 28 <= sum(line.startswith("  ") and not line.startswith("  #") for line in text.splitlines()) <= 40
        assert "# Tokens to train on; the last step may go past it [tokens]." in text
        assert main(["init", path]) == 2
        assert "exists, and is not overwritten; name another file" in capsys.readouterr().err
        assert Path(path).read_text() == text
    for path, said in {
        "con f": "is a folder; name a file",
        "no/mine.yaml": "is in a folder that does not exist",
    }.items():
        assert main(["init", path]) == 2
        assert said in capsys.readouterr().err


def test_a_run_may_be_as_long_as_some_epochs(tiny: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the rows of its dataset; a resumed run counts those of the dataset that it began with."""
    rows = load_manifest(Folder(tiny.shards.dataset)).splits[TRAIN].rows
    found = with_epochs(tiny, 7.5)
    assert found.num_steps == math.ceil(rows * 7.5 / 12)
    open_data(found.data).check_epochs(found.num_steps)
    few = with_epochs(tiny.override({"optim.warmup": 0, "stream.max_epochs": 0.1}), 0.5)
    assert 0.5 <= few.stream.max_epochs < 0.6
    open_data(few.data).check_epochs(few.num_steps)
    Run(Folder(tiny.run.root) / "a").write_config(tiny.override({"run.id": "a"}))
    other = tiny.override({"run.id": "a", "shards.dataset": "", "corpus.source": "stdlib"})
    assert with_epochs(other, 2, resume=True).shards.dataset == Folder(tiny.shards.dataset).url
    with pytest.raises(ConfigError, match=r"--epochs = 1: is not defined for a mixture of 2 datasets"):
        with_epochs(
            tiny.override({"shards.dataset": "", "stream.mixture": dict.fromkeys("ab", tiny.shards.dataset)}), 1
        )


def test_the_length_is_given_once_and_told(tiny: Config, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe", "tiny", "--shards.dataset", tiny.shards.dataset, "--run.root", tiny.run.root]
    for words, said in {
        "--epochs 2 --steps 3": "--epochs = 2.0: is given, and --steps too; give the length of the run once",
        "--steps 3 --train.total 2M": "--steps = 3: is given, and --train.total too",
        "--epochs 0": "--epochs = 0.0: is not a number above 0",
        "--epochs nan": "--epochs = nan: is not a number above 0",
        "--steps 0": "--steps = 0: trains on nothing; give at least one step",
        "--steps 5": "optim.warmup = 7680: with optim.decay = 0 longer than train.total = 3840; shorten warmup or decay",
    }.items():
        assert main(["train", *options, *words.split()]) == 2
        assert said in capsys.readouterr().err
    changes = ["--run.id", "taken", "--steps", "20"]
    Run(Folder(tiny.run.root) / "taken").write_config(tiny)
    assert main(["train", *options, *changes]) == 3
    assert capsys.readouterr().out == "# 20 steps: train.total = 15360\n"


def test_the_recipe_tiny_may_train_longer(tiny: Config) -> None:
    found = tiny.override({"train.total": "3M"})
    open_data(found.data).check_epochs(found.num_steps)
