"""Credentials of the environment reach no MLflow server that only a file names."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import springtide as st
from springtide import config as configs
from springtide.api import tracking_server
from springtide.api.tracking_server import mlflow_uri, name_server
from springtide.cli.main import main
from springtide.config import Config
from springtide.errors import ConfigError
from springtide.run.folder import Run
from springtide.storage import Folder


class _Server(http.server.ThreadingHTTPServer):
    """Counts the requests that it gets, and answers none."""

    requests = 0

    def finish_request(self, request: object, client_address: object) -> None:
        self.requests += 1


@pytest.fixture
def foreign() -> Iterator[_Server]:
    """A server of a stranger."""
    with _Server(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking_server, "_named", set())


def test_a_strangers_run_gets_no_request(
    foreign: _Server, tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train --config` and `model export --register` are refused; recipes take no server from the model's run."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "TOKEN-OF-VICTIM")
    uri = f"http://127.0.0.1:{foreign.server_port}"
    run = Run(Folder("stranger"))
    run.write_config(tiny.override({"track.mlflow_uri": uri, "run.id": "stranger"}))
    for words in (
        ["train", "--config", "stranger/config.yaml", "--run.id", "new"],
        ["model", "export", "stranger", "--out", "out", "--register", "M"],
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert (
            f"track.mlflow_uri = '{uri}': only the config names this server, which would get MLFLOW_TRACKING_TOKEN"
            in said
        )
        assert "TOKEN-OF-VICTIM" not in said
    with pytest.raises(ConfigError, match=r"track\.mlflow_uri = .*the config"):
        st.train(st.load_config("stranger/config.yaml"))
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")  # the server would say where files are written
    assert main(["model", "export", "stranger", "--out", "out", "--register", "M"]) == 2
    assert "name it yourself" in capsys.readouterr().err
    for recipe in configs.recipes.FINE_TUNING.values():
        assert recipe(run.config, "stranger").track == Config().track
    assert foreign.requests == 0
    assert sorted(one.name for one in Path().iterdir()) == ["stranger"], "nothing was written"


@pytest.mark.parametrize(
    ("variable", "uri"),
    [
        ("MLFLOW_TRACKING_PASSWORD", "https://evil.example/a"),
        ("MLFLOW_TRACKING_AWS_SIGV4", "http://evil.example:5000"),
    ],
)
def test_only_a_server_that_the_user_names_gets_credentials(
    variable: str, uri: str, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.override({"track.mlflow_uri": uri})
    assert mlflow_uri(config) == uri, "there are no credentials"
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ConfigError, match=variable):
        mlflow_uri(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mine.example")
    with pytest.raises(ConfigError, match=variable):
        mlflow_uri(config)
    assert mlflow_uri(config, uri) == uri, "the caller names it"
    assert mlflow_uri(Config()) == "https://mine.example"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert mlflow_uri(config) == uri
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    name_server(uri)
    assert mlflow_uri(config) == uri
    name_server("https://mine.example")
    with pytest.raises(ConfigError, match=variable):
        mlflow_uri(config.override({"track.mlflow_uri": "https://another.example"}))


def test_a_login_of_mlflow_counts(tiny: Config, tmp_path: Path) -> None:
    config = tiny.override({"track.mlflow_uri": "https://evil.example"})
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\nmlflow_tracking_username = me\n")
    with pytest.raises(ConfigError, match=r"\.mlflow/credentials"):
        mlflow_uri(config)


@pytest.mark.parametrize(
    "uri",
    [
        "mssql+pyodbc:///?odbc_connect=Driver%3D/tmp/evil.so",
        "mysql+pyodbc://evil.example/db?driver=/tmp/evil.so",
        "mysql+pymysql://evil.example/db?local_infile=1",
        "postgresql+psycopg2://u@evil.example/db",
        "postgresql:///db?host=evil.example&passfile=/x/.pgpass",
        "sqlite+evil:///x",
        "evil-plugin://x",
    ],
)
def test_a_driver_is_loaded_for_the_user_only(uri: str, tiny: Config) -> None:
    with pytest.raises(ConfigError, match=r"track\.mlflow_uri = .*driver"):
        mlflow_uri(tiny.override({"track.mlflow_uri": uri}))


def test_a_host_cannot_hide(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """urllib3 connects to evil.example where urlsplit reads mine.example; libpq takes a host from the query."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine.example")
    with pytest.raises(ConfigError, match="backslash"):
        mlflow_uri(tiny.override({"track.mlflow_uri": "http://evil.example\\@mine.example"}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql:///db?host=mine.example")
    with pytest.raises(ConfigError, match=r"track\.mlflow_uri = .*the config"):
        mlflow_uri(tiny.override({"track.mlflow_uri": "postgresql:///db?host=evil.example"}))


def test_a_password_of_netrc_counts(tiny: Config, tmp_path: Path) -> None:
    config = tiny.override({"track.mlflow_uri": "https://evil.example"})
    (tmp_path / ".netrc").write_text("machine mine.example login me password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert mlflow_uri(config) == "https://evil.example"
    (tmp_path / ".netrc").write_text("default login me password x\n")
    with pytest.raises(ConfigError, match="netrc"):
        mlflow_uri(config)


@pytest.mark.parametrize("uri", ["", "off", "sqlite:///mlflow.db", "databricks://profile", "./mlruns"])
def test_places_without_a_host_need_no_name(uri: str, tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "x")
    assert mlflow_uri(tiny.override({"track.mlflow_uri": uri})) == uri or not uri


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "localhost,127.0.0.1,::1"),
        ("a.example, localhost", "a.example,localhost,127.0.0.1,::1"),
        ("*", "*"),
    ],
)
def test_servers_on_this_machine_are_asked_without_a_proxy(
    before: str, after: str, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No proxy reaches them; a run behind one waited for its own MLflow, and blamed credentials of its own store."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", before)
    mlflow_uri(tiny)
    assert os.environ["NO_PROXY"] == before, "without a proxy nothing changes"
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", before)
    mlflow_uri(tiny)
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == after
