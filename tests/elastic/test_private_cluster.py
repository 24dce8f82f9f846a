"""A Ray that springtide starts serves nobody who does not know its token, and no other machine reaches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from springtide.ray.cluster.session import private_network


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.full
def test_no_other_user_or_machine_has_a_way_into_a_cluster_that_we_start(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    # as on a fresh machine, and a short path: sockets lie below it
    environment |= {"HOME": str(tmp_path / "home"), "TMPDIR": f"/tmp/st{os.getpid()}"}
    os.mkdir(environment["TMPDIR"])
    program = str(Path(__file__).parents[1] / "programs" / "private_cluster.py")
    try:
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, timeout=300, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-5000:]
        assert os.listdir(environment["TMPDIR"]) == []
    finally:
        subprocess.run(["rm", "-rf", environment["TMPDIR"]], check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in ("drill", "train"):
        seen = found[kind]
        assert seen["with the token"] == "served"
        assert seen["without a token"] == "AuthenticationError"
        assert seen["with another token"] == "AuthenticationError"
        assert seen["address"].startswith("127.0.0.1:")
        assert seen["reachable"] == []
        assert seen["open to others"] == []
        assert "auth_token` prints it" in seen["hint"]
    assert found["left"] == [], "what the user connects to next uses his own token"
    assert not (tmp_path / "home" / ".ray").exists()


IN_A_FOLDER = """
import json
import ray
from springtide import config as configs
from springtide.ray.cluster.session import cluster

@ray.remote
def found():
    import colorsys
    from springtide.config.code import find_code
    return colorsys.__file__, find_code("model.source", "mine_here:build").__module__

with cluster(configs.recipe("tiny"), dashboard=False):
    print(json.dumps(ray.get(found.remote())))
"""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("option", ["-P", pytest.param("-B", marks=pytest.mark.full)])
def test_workers_prefer_installed_modules_to_files_of_the_current_folder(option: str, tmp_path: Path) -> None:
    """Ray would have workers look there first, although ``springtide`` itself does not; ``python -c`` does, and so do its
    workers. Code that the user names is found in both."""
    (tmp_path / "colorsys.py").write_text("")
    (tmp_path / "mine_here.py").write_text("def build(*_):\n    pass\n")
    program = [sys.executable, option, "-c", IN_A_FOLDER]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    file, mine = json.loads(done.stdout.splitlines()[-1])
    assert (Path(file).parent == tmp_path) == (option == "-B")
    assert mine == "mine_here"


@pytest.mark.usefixtures("ray_authentication")
def test_a_token_of_the_user_and_a_refusal_of_tokens_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with private_network(str(tmp_path)):
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    with private_network(str(tmp_path)):
        assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("token", "mine")
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert os.listdir(tmp_path) == []
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    with private_network(str(tmp_path)):
        assert (tmp_path / "auth_token").stat().st_mode & 0o777 == 0o600
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "auth_token")
