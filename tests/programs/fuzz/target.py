"""A target: some valid files, and the functions that read them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from fuzz.mutations import CHANGES, PLACES, change_place


class Violation(Exception):
    """A promise of a reader that does not hold."""


class Target:
    """Valid files below ``root``. A subclass makes them, says of which kind each is, and reads them."""

    name: ClassVar[str]
    share: ClassVar[int] = 1
    """How many of the inputs are its own, relative to the other targets."""
    place_share: ClassVar[float] = 0.06
    """Part of the inputs where something else lies in the place of the file."""

    places: ClassVar[tuple[str, ...]] = PLACES

    def __init__(self, root: Path) -> None:
        """Make the files below ``root``."""
        self.root = root
        self.make()
        self.before: dict[str, bytes] = self._found()
        self.changed = ""
        self.what = ""
        self.told: list[str] = []

    def make(self) -> None:
        """Write the files, by the code of the project."""
        raise NotImplementedError

    def kinds(self) -> Mapping[str, str]:
        """Path below ``root`` -> kind, as in ``mutations.CHANGES``, of each file that may change."""
        raise NotImplementedError

    def read(self, random: Random) -> Any:
        """Call the readers, and check what they return."""
        raise NotImplementedError

    def names(self) -> tuple[str, ...]:
        """Texts of which a refusal has one: the file, or what it is a part of."""
        return (os.path.basename(self.changed),)

    def sign(self, random: Random) -> None:
        """Have digests of the changed file say what its bytes are now."""

    def copy(self, root: Path) -> None:
        """Go on in a copy of the files."""
        shutil.copytree(self.root, root, symlinks=True)
        self.root = root

    def change(self, random: Random) -> None:
        """Change one file."""
        kinds = self.kinds()
        self.changed = random.choice(list(kinds))
        path, self.told = self.root / self.changed, []
        if random.random() < self.place_share:
            self.what = change_place(random, path, self.places)
            return
        self.what = kinds[self.changed]
        path.write_bytes(CHANGES[self.what](random, self.before[self.changed]))
        self.sign(random)

    def restore(self) -> None:
        """Bring every file back."""
        found: set[str] = set()
        for path in list(self.root.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            if path.is_symlink() or not path.is_dir():
                found.add(name)
                if name not in self.before or path.is_symlink() or not path.is_file():
                    path.unlink()
                    found.discard(name)
            elif name in self.before:
                shutil.rmtree(path)
        for name, data in self.before.items():
            path = self.root / name
            if name not in found or path.stat().st_size != len(data) or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def _found(self) -> dict[str, bytes]:
        paths = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}

    def of(self, *ends: str) -> list[str]:
        """Return the files whose names end so."""
        return [name for name in self.before if name.endswith(ends)]


class Told(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """As logging."""
        self.lines.append(record.getMessage())


TOLD = Told()


def must(holds: bool, what: str) -> None:
    """Raise Violation unless ``holds``."""
    if not holds:
        raise Violation(what)
