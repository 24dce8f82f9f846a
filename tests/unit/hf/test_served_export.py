"""``transformers serve`` answers with our export: the real server, on a loopback port that the kernel chooses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chatting import chat_run

from springtide.run.exchange import export_model

pytestmark = pytest.mark.processes

pytest.importorskip("transformers")


@contextlib.contextmanager
def served(folder: str) -> Iterator[str]:
    """The URL of a server with a folder of transformers."""
    command = [str(Path(sys.executable).parent / "transformers"), "serve", folder]
    command += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                yield found.group(1)
                break
        else:
            pytest.fail("it has ended: " + "".join(said))
    finally:
        process.kill()
        process.communicate()


def completion(url: str, **body: Any) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.full
def test_transformers_serve_writes_our_greedy_text(tmp_path: Path) -> None:
    run = chat_run(tmp_path)
    export = export_model(run, str(tmp_path / "export")).url
    [expected] = run.generate("Count 9:", 16, temperature=0)
    begin = json.loads((tmp_path / "export/tokenizer_config.json").read_text())["bos_token"]
    with served(export) as url:
        found = completion(url, prompt=f"{begin}Count 9:", max_tokens=16, temperature=0)
    assert expected.num_tokens == 16
    assert found == expected.text
