"""Compiled code that another user may have left is not run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from springtide.distributed.compiled import _of_others, check_cache, compile_block
from springtide.errors import ConfigError

NOBODY = 65534


def test_torch_loads_compiled_code_from_this_users_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    check_cache()
    assert folder.is_dir()
    (folder / "kernel.py").write_text("")
    for mode in (0o777, 0o775, 0o770, 0o720):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=r"(?s)torchinductor_me.*\(d.*TORCHINDUCTOR_CACHE_DIR"):
            compile_block(nn.Linear(1, 1))
    folder.chmod(0o755)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "link"))
    check_cache()
    if os.getuid() == 0:  # the link's owner decides where it leads
        os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(ConfigError, match=f"user (0, )?{NOBODY}"):
            check_cache()
        os.chown(folder, NOBODY, NOBODY)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        with pytest.raises(ConfigError, match=f"user (0, )?{NOBODY}"):
            check_cache()


def test_a_new_folder_is_closed_to_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder is closed to a group whose umask lets it write. The umask 0002 is usual where each user has a group."""
    folder = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    folder.mkdir()
    folder.chmod(0o775)
    check_cache()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "triton").mkdir()
    (folder / "triton").chmod(0o777)
    _of_others.cache_clear()
    check_cache()  # nobody else reaches what is below


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("name", ["triton", "triton/0/kernel.so"])
def test_files_that_others_may_write_are_refused(
    mode: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others may write below a folder that they can enter is refused."""
    folder = tmp_path / "torchinductor_me"
    (folder / "triton" / "0").mkdir(parents=True)
    (folder / "triton" / "0" / "kernel.so").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    (folder / name).chmod(mode)
    for closed in (folder, folder / "triton"):
        if closed != folder / name:
            closed.chmod(0o755)
    with pytest.raises(ConfigError, match=f"torchinductor_me.* {name} "):
        check_cache()


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")
def test_what_another_user_left_in_a_private_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchinductor_me"
    folder.mkdir(mode=0o700)
    (folder / "kernel.so").write_text("")
    os.chown(folder / "kernel.so", NOBODY, NOBODY)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with pytest.raises(ConfigError, match=r"kernel\.so"):
        check_cache()
