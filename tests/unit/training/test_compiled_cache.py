"""Compiled code that another user may have left is not run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from springtide.errors import ConfigError
from springtide.parallel.compiled import check_cache, compile_block

NOBODY = 65534


def test_torch_loads_compiled_code_from_this_users_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    check_cache()
    assert folder.is_dir()
    folder.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"(?s)torchinductor_me, which .* can be written by others.*TORCHINDUCTOR_CACHE_DIR"
    ):
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
