"""Every check has a figure, a limit and a remedy; one that fails or hangs does not take the others with it."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

import pytest

from springtide.api import doctor_checks as checks
from springtide.api.doctor import CheckPlan, StoreCheck, carry_out, clock_check, doctor
from springtide.cli.main import main
from springtide.errors import ConfigError
from springtide.storage import Folder


@pytest.mark.processes
def test_the_command_checks_this_machine_and_a_store_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the processes that it starts import anything from the current folder."""
    (tmp_path / "torch.py").write_text("raise ImportError('of a stranger')")
    monkeypatch.chdir(tmp_path)
    status = main(["doctor", "--store", str(tmp_path / "store"), "--root", str(tmp_path), "--json"])
    said = capsys.readouterr().out
    assert "stranger" not in said
    shown = json.loads(said)
    found = {one["name"]: one for one in shown["checks"]}
    assert status == (0 if shown["ok"] else 1)
    assert {
        "versions",
        "devices",
        "memory",
        "shared memory",
        "open files",
        "disk of runs",
        "Ray",
        "torch",
    } <= found.keys()
    assert found["versions"]["status"] == "ok"
    assert found["store, conditional put"]["status"] == "ok"
    assert found["gloo"]["figure"].endswith("MiB/s summed by two local processes")
    assert all(one["remedy"] for one in shown["checks"] if one["status"] != "ok")
    assert not (tmp_path / "store").exists(), "a folder that was not there before is removed again"


def test_a_store_is_measured_and_cleaned(s3: str, tmp_path: Path) -> None:
    url = f"{s3}/doctor-{uuid.uuid4().hex}"
    found = {one.name: one for one in StoreCheck(url).make()}
    assert {
        f"store, {what}" for what in ("write", "read", "list", "delete", "write 64 MiB", "read 64 MiB")
    } < found.keys()
    assert found["store, conditional put"].status == "ok"
    assert (found["store, clock"].status, found["store, clock"].limit) == ("ok", "")
    assert Folder(url).files() == []
    (tmp_path / "file").write_text("")
    [one] = StoreCheck(str(tmp_path / "file")).make()
    assert one.status == "fail"
    assert one.remedy
    with pytest.raises(ConfigError, match="protocol"):
        list(doctor("ftp://host/x"))


@pytest.mark.parametrize(
    ("told_s", "status", "figure"),
    [
        (1000.0, "ok", "differs by less than 2 s"),
        (999.0, "ok", "differs by less than 2 s"),
        (1002.5, "ok", "differs by less than 4 s"),
        (1010.0, "warn", "is 9 s ahead of this machine"),
        (940.0, "warn", "is 59 s behind this machine"),
        (-5e9, "warn", "is 5000000999 s behind this machine"),
        (float("nan"), "", ""),
    ],
)
def test_a_clock_that_disagrees_with_the_stores_is_told(told_s: float, status: str, figure: str) -> None:
    assert [(one.status, one.figure, bool(one.remedy)) for one in clock_check(told_s, 1000.2, 1000.9)] == [
        (status, figure, status == "warn")
    ] * bool(status)


def test_a_store_that_creates_a_file_twice_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "create", lambda self, name, data: self.write(name, data))
    found = {one.name: one for one in StoreCheck(str(tmp_path)).make()}
    assert found["store, conditional put"].status == "warn"


def test_a_hanging_check_is_cut_off_and_a_raising_one_fails() -> None:
    """A check that hangs is cut off and one that raises has failed."""
    for_ever = threading.Event()
    try:
        [one] = carry_out(CheckPlan("slow", lambda: [][: for_ever.wait()], 0.05))
    finally:
        for_ever.set()
    assert (one.status, "cut off" in one.figure) == ("fail", True)

    def broken() -> list[checks.Check]:
        raise OSError("s3://user:secret@host is away")

    [one] = carry_out(CheckPlan("broken", broken))
    assert one.status == "fail"
    assert "is away" in one.figure
    assert "secret" not in one.figure


def test_memory_limits_and_swap_are_read(tmp_path: Path) -> None:
    text = "MemTotal: 16777216 kB\nMemAvailable: 1048576 kB\nSwapTotal: 8388608 kB\nSwapFree: 4194304 kB\n"
    (tmp_path / "meminfo").write_text(text)
    (tmp_path / "memory.max").write_text("8589934592\n")
    low, swap = checks.memory(str(tmp_path), str(tmp_path))
    assert (low.status, swap.status) == ("warn", "warn")
    assert "1.0 GiB free of 16.0 GiB" in low.figure
    assert "4.0 GiB" in swap.figure


def test_proxies_are_named_without_their_passwords() -> None:
    """Servers on this machine must not be asked for at a proxy."""
    assert checks.proxies({}) == []
    [one] = checks.proxies({"http_proxy": "http://me:hunter2@proxy:3128", "HTTPS_PROXY": "me:hunter2@other:1"})
    assert (one.status, one.figure) == ("warn", "http_proxy at proxy:3128, https_proxy at other:1")
    assert one.remedy.startswith("add localhost,127.0.0.1 to no_proxy")
    for passed in ("*", "example.com, localhost,127.0.0.1"):
        assert checks.proxies({"http_proxy": "http://proxy:3128", "NO_PROXY": passed})[0].status == "ok"


def test_variables_that_bite_are_named_and_no_token_is_shown(tmp_path: Path) -> None:
    [one] = checks.variables({"OMP_NUM_THREADS": "1"})
    assert one.status == "ok"
    bad = {"OMP_NUM_THREADS": "100000", "CUDA_LAUNCH_BLOCKING": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert [one.name for one in checks.variables(bad)] == list(bad)
    cluster = {"RAY_ADDRESS": "10.0.0.1:6379", "HOME": str(tmp_path)}
    assert checks.ray_access({})[0].status == "ok"
    assert checks.ray_access(cluster)[0].status == "warn"
    with_token = {**cluster, "RAY_AUTH_MODE": "token"}
    assert checks.ray_access(with_token)[0].status == "fail"
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("hunter2")
    file.chmod(0o644)
    assert "chmod 600" in checks.ray_access(with_token)[0].remedy
    file.chmod(0o600)
    for environment in (with_token, {**with_token, "RAY_AUTH_TOKEN": "hunter2"}):
        [one] = checks.ray_access(environment)
        assert one.status == "ok"
        assert "hunter2" not in one.describe()
