"""Only root and the run's own user can announce, by a file, that a node leaves; and writing that file follows no link."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from springtide.cli.main import main
from springtide.config import Config
from springtide.preemption.notices import Notice, notice_files
from springtide.preemption.sources import left_in, watched_files

NOBODY = 65534


def test_each_user_has_a_file_and_root_one_for_all() -> None:
    default = Config().elastic.notice_file
    assert notice_files(default, 1000) == ["/tmp/springtide-notice-1000", "/tmp/springtide-notice-0"]
    assert notice_files(default, 0) == ["/tmp/springtide-notice-0"]
    assert notice_files("/run/notice-{node}", 1000) == ["/run/notice-{node}"]
    assert watched_files("/run/notice-{node}", "ab12") == [Path("/run/notice-ab12")]


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
def test_a_notice_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    file.write_text("25")
    assert isinstance(left_in(file), Notice)
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=rf"{file} .*{NOBODY}.* 0 or root"):
        left_in(file)


def test_a_notice_that_others_may_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    file.write_text("25")
    for mode in (0o666, 0o664, 0o620):
        file.chmod(mode)
        with pytest.raises(PermissionError, match=r"\(-rw.*\).*chmod go-w"):
            left_in(file)
    file.chmod(0o644)
    assert left_in(file) is not None


def test_a_link_to_a_file_of_roots_is_no_notice(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("25")
    (tmp_path / "notice").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"):
        left_in(tmp_path / "notice")


def test_a_user_reads_roots_notice(tmp_path: Path) -> None:
    """Whatever root's umask is."""
    file = tmp_path / "notice"
    before = os.umask(0o077)
    try:
        assert main(["notice", "--in", "25", "--file", str(file)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["notice"]


@pytest.mark.processes
def test_leaving_a_notice_writes_through_no_link(tmp_path: Path) -> None:
    """Somebody has planted links at every name that the command could use beside the file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file = tmp_path / "notice"
    file.symlink_to(victim)
    code = (
        "import os, sys\n"
        "for pid in (os.getpid(), 'new', 'tmp'):\n"
        "    os.symlink(sys.argv[2], f'{sys.argv[1]}.{pid}')\n"
        "from springtide.cli.main import main\n"
        "sys.exit(main(['notice', '--in', '25', '--file', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file), str(victim)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "precious"
    assert not file.is_symlink()
    assert left_in(file) is not None


def test_a_notice_that_cannot_be_left_says_where_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notice").mkdir()
    assert main(["notice", "--file", str(tmp_path / "notice")]) == 2
    assert f"--file = '{tmp_path}/notice': cannot be written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["notice"]
