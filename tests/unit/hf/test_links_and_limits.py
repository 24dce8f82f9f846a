"""A folder that somebody else made gives its own files only, and none that is larger than its kind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chatting import chat_run
from safetensors.torch import save_file

from springtide.cli.main import main
from springtide.errors import ConfigError
from springtide.eval.text_model import open_export
from springtide.hf import safetensors_header
from springtide.run.exchange import export_model, import_model
from springtide.run.folder import Run
from springtide.run.text import open_labeller
from springtide.shards import CHAT_TEMPLATE, TOKENIZER, load_manifest
from springtide.storage import Folder

pytestmark = pytest.mark.processes

SECRET = "aws_secret_access_key = SECRET-OF-VICTIM"
CONFIG, WEIGHTS, SETTINGS = "config.json", "model.safetensors", "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
OUTSIDE = r"is a link to a file outside of its folder, which is not followed; put a copy"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return chat_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def export(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(export_model(run, str(tmp_path_factory.mktemp("export") / "out")).url)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "credentials").write_text(SECRET)
    return tmp_path / "home" / "credentials"


@pytest.fixture
def model(export: Path, tmp_path: Path) -> Path:
    """A copy of a model that would be imported."""
    return shutil.copytree(export, tmp_path / "in")


def linked(path: Path, target: Path | str) -> Path:
    """Put a link in the place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


@pytest.mark.parametrize("name", [CHAT_TEMPLATE, CONFIG, TOKENIZER, WEIGHTS, INDEX])
@pytest.mark.parametrize("kind", ["absolute", "relative", "of links", "folder"])
def test_a_link_out_of_a_model_is_refused_first(
    name: str, kind: str, model: Path, victim: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link out of a model is refused before anything is written."""
    if kind == "folder":  # the file is below a link
        victim = shutil.copy(victim, victim.parent / name)
        (model / "more").symlink_to(victim.parent)
        linked(model / name, f"more/{name}")
    elif kind == "of links":
        linked(model / name, linked(model / "between", victim).name)
    else:
        linked(model / name, victim if kind == "absolute" else os.path.relpath(victim, model))
    assert main(["model", "import", str(model), "--out", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert f"{model / name} = '{victim}': is a link to a file outside of its folder" in shown
    assert "SECRET-OF-VICTIM" not in shown
    assert not (tmp_path / "run").exists()


def test_a_template_in_tokenizer_settings_is_read_through_no_link(model: Path, victim: Path) -> None:
    """A template in the settings of a tokenizer is read through no link."""
    (model / CHAT_TEMPLATE).unlink()
    victim.write_text(json.dumps({"chat_template": SECRET}))
    linked(model / SETTINGS, victim)
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json = .*credentials': {OUTSIDE}"):
        open_export(Folder(model))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_out_of_an_adapter_is_refused(name: str, model: Path, victim: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}))
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    linked(adapter / name, victim)
    with pytest.raises(ConfigError, match=rf"{name} = .*credentials': {OUTSIDE}"):
        import_model(str(model), str(tmp_path / "run"), str(adapter))
    assert not (tmp_path / "run").exists()


def test_files_outside_the_index_are_no_way_out(run: Run, model: Path, victim: Path) -> None:
    """Files that no index names are no way out for a labeller. It hashes every file of weights in the folder."""
    manifest = load_manifest(Folder(run.config.shards.dataset))
    assert open_labeller(str(model), manifest).facts["architecture"]
    linked(model / "more.safetensors", victim)
    with pytest.raises(ConfigError, match=OUTSIDE):
        open_labeller(str(model), manifest)


@pytest.mark.parametrize("name", [CHAT_TEMPLATE, TOKENIZER])
@pytest.mark.parametrize("place", ["run", "dataset"])
def test_an_export_publishes_no_file_that_a_run_links_to(
    name: str, place: str, model: Path, victim: Path, tmp_path: Path
) -> None:
    if place == "run":
        run = import_model(str(model), str(tmp_path / "run"))
        linked(Path(run.folder.url) / name, victim)
    else:
        (tmp_path / "own").mkdir()
        run = chat_run(tmp_path / "own")
        linked(Path(run.config.shards.dataset) / name, victim)
    with pytest.raises(ConfigError, match=rf"{name} = .*credentials': {OUTSIDE}"):
        export_model(run, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [CHAT_TEMPLATE, TOKENIZER])
def test_opening_a_model_for_text_reads_no_outside_file(name: str, model: Path, victim: Path) -> None:
    """A model that is opened for text reads no file outside of it."""
    linked(model / name, victim)
    with pytest.raises(ConfigError, match=OUTSIDE):
        open_export(Folder(model))


def cached(model: Path, root: Path) -> Path:
    """Lay a model out as the hub's cache does: a snapshot of links to blobs."""
    blobs, snapshot = root / "models--me--it" / "blobs", root / "models--me--it" / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, blobs / f"{number:064d}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064d}")
    return snapshot


def test_a_hub_cache_snapshot_imports_like_a_plain_folder(model: Path, tmp_path: Path) -> None:
    """A snapshot in the cache of the hub is imported as a plain folder is."""
    imported = import_model(str(cached(model, tmp_path / "hub")), str(tmp_path / "run"))
    plain = import_model(str(model), str(tmp_path / "plain"))
    assert imported.config.model == plain.config.model
    for name in (CHAT_TEMPLATE, TOKENIZER):
        assert imported.folder.read(name) == plain.folder.read(name)
    (tmp_path / "short").symlink_to(tmp_path / "hub" / "models--me--it" / "snapshots" / ("0" * 40))
    assert import_model(str(tmp_path / "short"), str(tmp_path / "third")).checkpoints


@pytest.mark.parametrize("way", ["beside the blobs", "blobs are a link", "another snapshot"])
def test_the_cache_of_the_hub_is_no_way_out(way: str, model: Path, victim: Path, tmp_path: Path) -> None:
    snapshot = cached(model, tmp_path / "hub")
    blobs = snapshot.parent.parent / "blobs"
    if way == "beside the blobs":
        shutil.copy(victim, blobs.parent / "blobs-of-others")
        linked(snapshot / CHAT_TEMPLATE, "../../blobs-of-others")
    elif way == "another snapshot":
        (snapshot.parent / "other").mkdir()
        shutil.copy(victim, snapshot.parent / "other" / "x")
        linked(snapshot / CHAT_TEMPLATE, "../other/x")
    else:
        blobs.rename(tmp_path / "elsewhere")
        blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=OUTSIDE):
        import_model(str(snapshot), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [CHAT_TEMPLATE, CONFIG, TOKENIZER, WEIGHTS])
@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_by_name(
    name: str, what: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / name).unlink()
    if what == "pipe":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to("/dev/zero")
    assert main(["model", "import", str(model), "--out", str(tmp_path / "run")]) == 2
    assert str(model / name) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def padded(name: str, size: int) -> Callable[[Path], None]:
    """Make a file of JSON longer, and leave what it says."""

    def change(folder: Path) -> None:
        text = (folder / name).read_bytes()
        (folder / name).write_bytes(text + b" " * (size - len(text)))

    return change


def long_header(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.write((10_000_001).to_bytes(8, "little"))
        file.truncate(10_000_100)


def wide_header(folder: Path) -> None:
    text = b'{"a":[' + b"{}," * 3_000_000 + b"{}]}"
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text)


def wide_tokenizer(folder: Path) -> None:
    text = (folder / TOKENIZER).read_bytes().strip().removesuffix(b"}")
    (folder / TOKENIZER).write_bytes(text + b',"more":[' + b"{}," * 2_100_000 + b"{}]}")


def wide_index(folder: Path) -> None:
    places = ",".join(f'"{number}":"a.safetensors"' for number in range(200_000))
    (folder / INDEX).write_text(f'{{"weight_map":{{{places}}}}}')


def long_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(b"{}" + b" " * 2**24)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (padded(CONFIG, 2**20 + 1), r"config\.json = 1048577: are more than 1,048,576 bytes; .*download it again"),
        (padded(TOKENIZER, 2**26 + 1), r"tokenizer\.json = 67108865: are more than 67,108,864 bytes"),
        (wide_tokenizer, r"tokenizer\.json = 42\d{5}: are more than 4,194,304 values of JSON"),
        (long_header, r"model\.safetensors: length of the header = 10000001: .*limit of 10000000"),
        (wide_header, r"model\.safetensors = 6000004: are more than 1,600,000 values of JSON"),
        (wide_index, r"model\.safetensors\.index\.json = 20000\d: are more than 100,100 values of JSON"),
        (long_index, r"model\.safetensors\.index\.json = 16777218: are more than 16,777,216 bytes"),
    ],
)
def test_a_file_that_is_larger_than_its_kind_is_refused(
    change: Callable[[Path], None], problem: str, model: Path, tmp_path: Path
) -> None:
    change(model)
    with pytest.raises(ConfigError, match=problem):
        import_model(str(model), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_file_of_the_largest_size_of_its_kind_is_read(model: Path, tmp_path: Path) -> None:
    (model / CHAT_TEMPLATE).unlink()
    padded(CONFIG, 2**20)(model)
    padded(SETTINGS, 2**22)(model)
    assert import_model(str(model), str(tmp_path / "run")).checkpoints
    padded(SETTINGS, 2**22 + 1)(model)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json = 4194305: .*4,194,304 bytes"):
        import_model(str(model), str(tmp_path / "more"))


def test_the_settings_of_an_adapter_have_a_limit(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_bytes(b"{}" + b" " * 2**20)
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"adapter_config\.json = 1048578: .*1,048,576 bytes"):
        import_model(str(model), str(tmp_path / "run"), str(adapter))


def test_a_header_of_many_tensors_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "_MOST_TENSORS", 10)
    with pytest.raises(ConfigError, match=r"model\.safetensors = \d+: .*10 tensors"):
        import_model(str(model), str(tmp_path / "run"))
