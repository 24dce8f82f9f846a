"""An import that fails leaves nothing, one that was killed is replaced, and models of the Hugging Face Hub are read in place;
its real server is not tried here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from families import their_model
from hub import COMMIT, Hub

from springtide.checkpoint.format import read_manifest
from springtide.errors import ConfigError, RunExists
from springtide.hf import hf_import
from springtide.run import exchange
from springtide.run.exchange import import_model
from springtide.run.folder import Run
from springtide.storage import Folder

pytest.importorskip("transformers")


@pytest.fixture
def model(tmp_path: Path) -> str:
    their_model("llama2").save_pretrained(tmp_path / "in")
    return str(tmp_path / "in")


class Killed(BaseException):
    """As a signal that nothing catches."""


def test_a_failed_import_leaves_nothing(tmp_path: Path, s3: str) -> None:
    theirs = their_model("llama2")
    with torch.no_grad():
        theirs.model.norm.weight[3] = float("inf")
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    for to in (str(tmp_path / "run"), str(tmp_path / "empty"), f"{s3}/runs/failed", "memory://runs/failed"):
        with pytest.raises(ConfigError, match="not finite"):
            import_model(str(tmp_path / "in"), to)
        assert Folder(to).files() == []
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "empty").is_dir()


WRITTEN = {"checkpoints", "config.yaml", "generation_config.json", "leases"}


@pytest.mark.parametrize("place", ["write_checkpoint", "Run.write_config"])
def test_a_killed_import_is_replaced_by_the_next(
    place: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "run"
    with monkeypatch.context() as patch:

        def killed(*_: Any, **__: Any) -> None:
            patch.setattr(exchange, "_clear", lambda *_: None)  # who is killed does not clear
            patch.setattr(Folder, "remove", lambda *_: None)
            raise Killed

        patch.setattr(f"springtide.run.exchange.{place}", killed)
        with pytest.raises(Killed):
            import_model(model, str(to))
    assert (to / "importing.json").exists()
    found = import_model(model, str(to))
    assert found.checkpoints == ["step-0000000000"]
    again = import_model(model, str(tmp_path / "again")).folder
    assert _without_leases(found.folder) == _without_leases(again)
    assert [set(one.folder.names()) for one in (found, Run(again))] == [WRITTEN] * 2
    with pytest.raises(ConfigError, match="not empty"):
        import_model(model, str(to))


def _without_leases(folder: Folder) -> set[bytes]:
    """The bytes of its weights, whatever lease wrote them."""
    return {folder.read(name) for name in folder.files() if name.endswith(".safetensors")}


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_import_that_another_has_overtaken_leaves_that_ones_files(
    is_stopped: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines: neither can see that the other's process is alive."""
    to, read, host = str(tmp_path / "run"), hf_import._read, socket.gethostname
    other = their_model("llama2")
    with torch.no_grad():
        other.model.norm.weight += 1.0
    other.save_pretrained(tmp_path / "other")

    def overtaken(*arguments: Any) -> torch.Tensor:
        monkeypatch.setattr(hf_import, "_read", read)
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        import_model(str(tmp_path / "other"), to)
        monkeypatch.setattr(socket, "gethostname", host)
        if is_stopped:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(hf_import, "_read", overtaken)
    with pytest.raises(KeyboardInterrupt if is_stopped else RunExists):
        import_model(model, to)
    expected = import_model(str(tmp_path / "other"), str(tmp_path / "expected")).folder
    assert Run(Folder(to)).checkpoints == ["step-0000000000"]
    assert read_manifest(Folder(to), "step-0000000000").meta.labels["imported"] == str(tmp_path / "other")
    assert _without_leases(Folder(to)) == _without_leases(expected) != set()


def test_a_folder_with_files_of_others_is_not_replaced(model: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("importing.json", "mine.txt"):
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(ConfigError, match="not empty"):
        import_model(model, str(tmp_path / "run"))
    assert len(list((tmp_path / "run").iterdir())) == 2


_IMPORT = """
import json, sys
from springtide.run.exchange import import_model
found = []
for number, url in enumerate(sys.argv[2:]):
    try:
        found.append(import_model(url, f"{sys.argv[1]}/{number}").folder.url)
    except (ValueError, OSError) as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


@pytest.fixture
def hub(model: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks the stand-in, which has the files of ``model``."""
    Hub.root, Hub.token = Path(model), ""
    Hub.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    server.shutdown()
    server.server_close()


def imported(environment: dict[str, str], *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
def test_a_hub_model_is_read_at_one_commit(hub: dict[str, str], model: str, tmp_path: Path) -> None:
    """A model of the hub is read in place at one commit."""
    url, other = f"hf://{Hub.REPOSITORY}", "hf://someone/other"
    found, missing = imported(hub, str(tmp_path / "runs"), url, other)
    run, expected = Run(Folder(found)), import_model(model, str(tmp_path / "here"))
    [file] = (Path(found) / "checkpoints/step-0000000000").glob("*.safetensors")
    [same] = (tmp_path / "here/checkpoints/step-0000000000").glob("*.safetensors")
    assert file.read_bytes() == same.read_bytes()
    assert run.config.model == expected.config.model
    assert read_manifest(run.folder, run.checkpoints[0]).meta.labels["imported"] == f"{url}@{COMMIT}"
    assert not any("/resolve/main/" in request for request in Hub.requests)
    assert "CorpusError: folder = 'hf://someone/other': cannot be reached" in missing
    assert "check its name, hf://OWNER/NAME; for a private or gated one set HF_TOKEN" in missing
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    away = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}  # where nobody listens
    code = f"from springtide.corpus.hub import pinned; pinned({url!r}, 'folder')"
    done = subprocess.run([sys.executable, "-c", code], env=away, capture_output=True, text=True, check=False)
    assert f"CorpusError: folder = '{url}': cannot be reached (ConnectError" in done.stderr
