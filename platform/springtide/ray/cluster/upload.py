"""List the files of a folder that `ray job submit --working-dir` would send, and those that it would leave out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from springtide.ray._ray_private import visit_upload

_EXPECTED = (".git", ".venv", "venv", "__pycache__", ".gitignore", ".rayignore")
"""Names that are not reported as left out, because no user expects them to be sent."""
_MOST_COUNTED = 10_000
"""The files of a folder are counted up to this number."""


class Upload(NamedTuple):
    """The files that Ray would send for a job. Ray packs them without compressing them."""

    sizes: dict[str, int]
    """Path below the folder -> size [bytes]."""
    refused_bytes: int
    """Ray refuses a package of this size or more [bytes]."""
    left_out: dict[str, int]
    """Path of a file that is not sent -> 1. Path of a folder of which nothing is sent (ends with ``/``) -> its number of files,
    at most 10,000; folders within such a folder are not listed."""
    links: dict[str, str]
    """Symbolic link that leads out of the folder -> its target."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(self.sizes.values())

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """Return the largest files and subfolders at the top of the folder with their total sizes, the largest first."""
        tops: dict[str, int] = {}
        for name, size in self.sizes.items():
            top = Path(name).parts[0]
            tops[top] = tops.get(top, 0) + size
        return sorted(tops.items(), key=lambda one: -one[1])[:count]


def upload_of(folder: str) -> Upload:
    """Return the files of ``folder`` that Ray would send, by Ray's own rules: it leaves out names in .gitignore, .rayignore and
    Ray's own list."""
    root, sizes = Path(folder).absolute(), dict[str, int]()

    def visit(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(root))] = path.stat().st_size

    refused = visit_upload(folder, visit)
    links = {one: target for one in _entries(root) if (target := _leads_out(root, one))}
    return Upload(sizes, refused, dict(_left_out(root, set(sizes))), links)


def _left_out(root: Path, sent: set[str]) -> Iterator[tuple[str, int]]:
    """Yield (path, 1) for each file that is not ``sent``. A folder of which nothing is sent is yielded once, with its number of
    files."""
    above = {str(parent) for name in sent for parent in Path(name).parents}
    for here, folders, files in os.walk(root):
        where = os.path.relpath(here, root)
        kept = []
        for name in sorted(set(folders) - set(_EXPECTED)):
            path = os.path.normpath(os.path.join(where, name))
            if path in above:
                kept.append(name)
            elif count := _files_in(root / path):
                yield f"{path}/", count
        folders[:] = kept
        for name in sorted(set(files) - set(_EXPECTED)):
            if (path := os.path.normpath(os.path.join(where, name))) not in sent:
                yield path, 1


def _files_in(folder: Path) -> int:
    count = 0
    for _, _, files in os.walk(folder):
        count += len(files)
        if count >= _MOST_COUNTED:
            return _MOST_COUNTED
    return count


def _entries(root: Path) -> Iterator[str]:
    """Yield the path below ``root`` of each file and folder in it."""
    for here, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXPECTED]
        yield from (os.path.normpath(os.path.relpath(os.path.join(here, name), root)) for name in (*folders, *files))


def _leads_out(root: Path, name: str) -> str:
    """Return the target of a symbolic link that leads out of ``root``; empty for anything else."""
    path = root / name
    target = os.path.realpath(path)
    is_out = path.is_symlink() and os.path.commonpath([target, os.path.realpath(root)]) != os.path.realpath(root)
    return target if is_out else ""
