"""What `ray job submit --working-dir` would send of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from springtide.on_ray._ray_private import visit_upload


class Upload(NamedTuple):
    """The files that Ray would send. It packs them without compressing them."""

    sizes: dict[str, int]
    """Path below the folder -> size [bytes]."""
    refused_bytes: int
    """The size from which Ray refuses the package."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(self.sizes.values())

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """Return the entries of the folder itself that are largest with all they hold, and their sizes, the largest first."""
        tops: dict[str, int] = {}
        for name, size in self.sizes.items():
            top = Path(name).parts[0]
            tops[top] = tops.get(top, 0) + size
        return sorted(tops.items(), key=lambda one: -one[1])[:count]


def upload_of(folder: str) -> Upload:
    """Return what Ray would send of ``folder``, by Ray's own rules: .gitignore, .rayignore and its own list count."""
    root, sizes = Path(folder).absolute(), dict[str, int]()

    def visit(path: Path) -> None:
        if path.is_file():
            sizes[str(path.relative_to(root))] = path.stat().st_size

    refused = visit_upload(folder, visit)
    return Upload(sizes, refused)
