"""Defects that were found and mended, to plant back: the fuzzer must find each of them again."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from springtide.checkpoint import format as checkpoint_format
from springtide.checkpoint import leases, load, validate
from springtide.config import files as config_files
from springtide.events.record import EVENTS
from springtide.storage import Folder
from springtide.tracking import journal
from springtide.tune import folder as sweep_folder
from springtide.tune.population import Generation

Plant = contextlib.AbstractContextManager[Any]


class Planted(NamedTuple):
    """A defect, and the target that finds it."""

    target: str
    plant: Callable[[], Plant]


def short_pieces() -> Plant:
    """L1: a piece may have fewer bytes than its box; the rest keeps what was in memory."""
    check = validate.check_piece

    def lenient(dtype: Any, shape: Any, offsets: Any, sizes: Any, file: Any, begin: Any, size: Any, *rest: Any) -> None:
        right = math.prod(sizes) * validate.ITEM_BYTES.get(dtype, 1)
        check(
            dtype, shape, offsets, sizes, file, begin, right if type(size) is int and 0 < size < right else size, *rest
        )

    return mock.patch.object(validate, "check_piece", lenient)


def hidden_holes() -> Plant:
    """Pieces of a tensor may overlap: their sizes add up, and a part of it is in none."""
    return mock.patch.object(load, "check_disjoint")


def any_step() -> Plant:
    """L3: a checkpoint may be of another step than its folder's name says."""
    return mock.patch.object(checkpoint_format, "step_of", _StepOf())


class _StepOf:
    """``step_of`` that equals any step where a manifest is compared with it."""

    def __call__(self, name: str) -> Any:
        found = _step_of(name)
        return None if found is None else _AnyStep(found)


_step_of = checkpoint_format.step_of


class _AnyStep(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def any_lease() -> Plant:
    """A lease is made of whatever keys and values its file has."""

    def read(run: Folder, number: int) -> leases.Lease:
        values = (run / "leases").read_json(f"{number:04d}.json")
        return leases.Lease(**{key: value for key, value in values.items() if key != "format"})

    return mock.patch.object(leases, "_read", read)


def any_event() -> Plant:
    """An event is made of whatever values its line has."""

    def event(values: dict[str, Any]) -> Any:
        values = {key: value for key, value in values.items() if key != "format"}
        try:
            return EVENTS[values.pop("kind")](**values)
        except (KeyError, TypeError) as error:
            raise ValueError(str(error)) from None

    return mock.patch.object(journal, "event", event)


def any_lineage() -> Plant:
    """L11: a trial's runs may lie outside the sweep's folder."""

    def lineage(self: Any, number: int, point: Any) -> list[Generation]:
        name = f"trial-{number:04d}"
        if not self._lineages.exists(f"{name}.json"):
            return [Generation(name, point)]
        return [Generation(**one) for one in self._lineages.read_json(f"{name}.json")]

    return mock.patch.object(sweep_folder.SweepFolder, "lineage", lineage)


def unnamed_configs() -> Plant:
    """A problem in a config does not say in which file."""
    return mock.patch.object(config_files, "parse", lambda text, name="": config_files.build(_yaml(text)))


def _yaml(text: bytes) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def endless_files() -> Plant:
    """What lies in the place of a file is read to its end: a device, or 64 GiB of nothing."""
    return mock.patch.object(Folder, "read", lambda self, name: Path(self.where(name)).read_bytes())


def raw_json() -> Plant:
    """A file that is not JSON is not named."""
    return mock.patch.object(Folder, "read_json", lambda self, name: json.loads(self.read(name)))


DEFECTS: dict[str, Planted] = {
    "L1": Planted("checkpoint", short_pieces),
    "holes": Planted("checkpoint", hidden_holes),
    "L3": Planted("checkpoint", any_step),
    "leases": Planted("lease", any_lease),
    "events": Planted("journal", any_event),
    "L11": Planted("sweep", any_lineage),
    "unnamed": Planted("config", unnamed_configs),
    "endless": Planted("note", endless_files),
    "raw": Planted("sweep", raw_json),
}
