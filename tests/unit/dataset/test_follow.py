"""Text that arrives becomes sealed datasets: complete files only, each in one dataset, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from following import arrive, config_of

from springtide import config as configs
from springtide.app.follow import follow
from springtide.cli.main import main
from springtide.config import Config
from springtide.dataset import in_process, new_files, seal
from springtide.errors import ConfigError, CorpusError, DamagedFile
from springtide.shards import INDEX, IndexEntry, load_manifest, read_index
from springtide.store import Folder, digest

PROGRAM = Path(__file__).parents[2] / "programs" / "following.py"


def followed(source: Path, root: Path, at_least: int = 1) -> list[IndexEntry]:
    return list(follow(config_of(source, root), once=True, at_least_bytes=at_least, wait=lambda _: None))


def taken(root: Path) -> list[str]:
    return sorted(name for entry in read_index(Folder(str(root))) for name in entry.files)


def test_complete_files_become_datasets_of_one_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, root = tmp_path / "text", tmp_path / "sets"
    first = arrive(source, "first", 0)
    (source / ".hidden.txt").write_text("of a writer that renames\n" * 50)
    growing = source / "growing.txt"

    def wait(_: float) -> None:
        with growing.open("a") as file:
            file.write("one more line\n")

    config = config_of(source, root)
    wait(0)
    [entry] = follow(config, once=True, at_least_bytes=1, wait=wait)
    assert sorted(entry.files) == first
    assert followed(source, root, at_least=2**20) == [], "few bytes wait for more"
    second = [*arrive(source, "second", 1), "growing.txt"]
    assert main(["data", "prepare", "--follow", "--once", "--every", "0", "--at-least", "1", *given(config)]) == 0
    assert f"dataset 1: {root}/" in capsys.readouterr().out
    assert taken(root) == sorted([*first, *second])
    one, two = read_index(Folder(str(root)))
    manifests = [load_manifest(Folder(str(root / one.dataset))) for one in (one, two)]
    assert [manifest.digest for manifest in manifests] == [one.digest, two.digest]
    assert manifests[0].tokenizer_digest == manifests[1].tokenizer_digest
    assert manifests[1].apart_from == (manifests[0].digest,)
    assert followed(source, root) == [], "nothing is taken twice"
    (source / second[0]).write_text("changed")
    assert followed(source, root) == []
    (root / "index" / "0001.json").write_bytes(
        (root / "index" / "0001.json").read_bytes().replace(b"second", b"secret")
    )
    assert len(read_index(Folder(str(root)))) == 2, "only an entry that another follows is sealed by it"
    name = root / "index" / "0000.json"
    name.write_bytes(name.read_bytes().replace(b"first/0001", b"first/9991"))
    with pytest.raises(CorpusError, match=r"0001\.json.*does not follow the 1 entries before it"):
        read_index(Folder(str(root)))
    name.write_text("{}")
    with pytest.raises(DamagedFile, match=r"0000\.json"):
        read_index(Folder(str(root)))


def given(config: Config) -> list[str]:
    """The options that make ``config`` of the recipe tiny."""
    usual = configs.flatten(configs.recipes.tiny())
    changed = {name: value for name, value in configs.flatten(config).items() if usual[name] != value}
    words = ((f"--{name.replace('_', '-')}", spelled(value)) for name, value in changed.items())
    return ["--recipe", "tiny", *(word for pair in words for word in pair)]


def spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("place", ["planned", "made", "appended"])
def test_a_killed_call_loses_no_file_and_doubles_none(place: str, tmp_path: Path) -> None:
    source, root = tmp_path / "text", tmp_path / "sets"
    first = arrive(source, "first", 0)
    done = subprocess.run([sys.executable, str(PROGRAM), str(source), str(root), place], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    second = arrive(source, "second", 1)
    entries = followed(source, root)
    assert taken(root) == sorted([*first, *second])
    assert [sorted(entry.files) for entry in read_index(Folder(str(root)))] == [first, second], (
        "the plan is ended first"
    )
    assert len(entries) == (1 if place == "appended" else 2)
    assert sorted(one.name for one in root.iterdir()) == sorted(
        ["index", *(entry.dataset for entry in read_index(Folder(str(root))))]
    )
    assert not (root / "index" / "plan.json").exists()


def test_a_plan_whose_files_are_others_now_is_dropped(tmp_path: Path) -> None:
    source, root = tmp_path / "text", tmp_path / "sets"
    first = arrive(source, "first", 0)
    Folder(str(root / "index")).write_json("plan.json", {first[0]: "1 2"})
    assert [sorted(entry.files) for entry in followed(source, root)] == [first]


def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path) -> None:
    config = config_of(tmp_path / "text", tmp_path / "sets")
    for changes, said in (
        ({"corpus.source": "stdlib"}, "is not a folder, glob or URL that text arrives in"),
        ({"corpus.max_files": 3}, "leaves files out for good"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(follow(config.override(changes), once=True))
    for every_s in (0.0, -1.0, float("inf"), float("nan"), 1e300):  # before the first look
        with pytest.raises(ConfigError, match=r"every = .*give the time between two looks"):
            next(follow(config, every_s))
    with pytest.raises(CorpusError, match="does not exist"):
        list(follow(config, once=True))
    (tmp_path / "text").mkdir()
    assert new_files(config.corpus, []) == {}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])}


def test_entries_beyond_four_digits_stay_in_order(tmp_path: Path) -> None:
    root, entries = Folder(tmp_path), list[IndexEntry]()
    (tmp_path / INDEX).mkdir()
    for number in range(10_002):
        before = digest.of_bytes(entries[-1].data) if entries else None
        entry = IndexEntry(number=number, dataset="0" * 16, digest="0" * 32, files={}, before=before)
        (tmp_path / INDEX / entry.file).write_bytes(entry.data)
        entries.append(entry)
    assert read_index(root) == entries


def test_files_that_change_while_they_are_read_wait_until_they_are_complete(tmp_path: Path) -> None:
    source, root = tmp_path / "text", tmp_path / "sets"
    [name, *_] = arrive(source, "first", 0)
    config = config_of(source, root)

    def grow(stage: str, done: int, total: int) -> None:
        with (source / name).open("a") as file:
            file.write("one more line\n")

    files = new_files(config.corpus, [])
    assert seal(config.corpus, config.shards, files, grow, in_process) is None
    assert [one.name for one in root.iterdir()] == ["index"]
    assert list((root / "index").iterdir()) == []
    assert sorted(name for entry in followed(source, root) for name in entry.files) == sorted(files)
