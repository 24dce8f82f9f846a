"""Datasets of the Hugging Face Hub as sources, against a stand-in for it: its real server is not tried here."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, Hub
from prepared import small, write_corpus

from springtide import config as configs
from springtide.corpus.hub import pinned
from springtide.errors import ConfigError

pytestmark = pytest.mark.processes

_OPEN = """
import json, sys
from springtide.corpus import open_source
found = []
for url in sys.argv[1:]:
    try:
        source = open_source(url)
        texts = [document.text for document in source.documents()]
        found.append([source.folder.url, source.names, source.fingerprint(), texts])
    except ValueError as error:
        found.append(str(error))
print(json.dumps(found))
"""
_PREPARE = """
import sys
from springtide import config
from springtide.dataset import in_process, make_dataset, silent
loaded = config.load_config(sys.argv[1])
print(make_dataset(loaded.corpus, loaded.shards, silent, in_process))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks the stand-in, which has the files below ``tmp_path / "hub"``."""
    (tmp_path / "hub" / "data").mkdir(parents=True)
    Hub.root, Hub.token = tmp_path / "hub", ""
    Hub.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    server.shutdown()
    server.server_close()


def run(environment: dict[str, str], code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_files_folders_and_globs_are_read_at_one_commit(hub: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hub" / "data" / "a.jsonl").write_text(lines(["one", "two"]))
    (tmp_path / "hub" / "data" / "b.jsonl").write_text(lines(["three"]))
    (tmp_path / "hub" / ".gitattributes").write_text("not a text")
    repository = f"hf://datasets/{Hub.REPOSITORY}"
    urls = [repository, f"{repository}/data/*.jsonl", f"{repository}@main/data/b.jsonl"]
    missing = [f"{repository}/none.jsonl", "hf://datasets/someone/other"]
    whole, glob, file, none, other = json.loads(run(hub, _OPEN, *urls, *missing))
    at = f"{repository}@{COMMIT}"
    assert whole[:2] == [at, ["data/a.jsonl", "data/b.jsonl"]]
    assert glob[:2] == [f"{at}/data", ["a.jsonl", "b.jsonl"]]
    assert file[:2] == [f"{at}/data", ["b.jsonl"]]
    assert [one[3] for one in (whole, glob, file)] == [["one", "two", "three"], ["one", "two", "three"], ["three"]]
    assert f"corpus.source = '{at}/none.jsonl': does not exist" in none
    assert "corpus.source = 'hf://datasets/someone/other': cannot be reached" in other
    assert "set HF_TOKEN" in other
    assert not any("/resolve/main/" in request for request in Hub.requests)

    (tmp_path / "hub" / "data" / "b.jsonl").write_text(lines(["thre3"]))  # of the same size
    [again] = json.loads(run(hub, _OPEN, repository))
    assert again[2] != whole[2]
    Hub.token = "secret"
    [refused] = json.loads(run(hub, _OPEN, repository))
    assert "set HF_TOKEN" in refused
    assert json.loads(run({**hub, "HF_TOKEN": "secret"}, _OPEN, repository)) == [again]


def test_a_dataset_of_the_hub_is_that_of_its_files(hub: dict[str, str], tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "text", 40)
    (tmp_path / "hub" / "data" / "a.jsonl").write_text(lines(texts))
    digests = []
    for name, source in (("there", f"hf://datasets/{Hub.REPOSITORY}/data"), ("here", str(tmp_path / "hub" / "data"))):
        file = tmp_path / f"{name}.yaml"
        file.write_text(configs.dump(small(tmp_path / name, tmp_path, corpus__source=source)))
        url = run(hub, _PREPARE, str(file))
        digests.append([path.read_bytes() for path in sorted(Path(url).glob("*.parquet"))])
    assert digests[0] == digests[1] != []


def test_a_missing_package_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_it(name: str, *arguments: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return load(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_it)
    with pytest.raises(ConfigError, match=r"hf://datasets/a/b'.*pip install 'springtide\[hf\]'"):
        pinned("hf://datasets/a/b")
    assert pinned("s3://bucket/a") == "s3://bucket/a"
