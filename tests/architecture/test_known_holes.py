"""No bound of ours allows a version with a known hole, and what CI installs is within the bounds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[2]
HOLES = {
    "datasets": ("5.2", "earlier versions load pickles that a data set names"),
    "fsspec": ("2026.6", "earlier versions render templates of reference:// files without a sandbox"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a way out of the sandbox"),
    "lightning": ("2.3.3", "CVE-2024-5452: a hostile client runs code"),
    "mlflow": ("3.11.1", "CVE-2026-2614 reads files; CVE-2026-2651, CVE-2026-4137"),
    "pyarrow": ("23.0.1", "CVE-2026-25087 in IPC files; CVE-2023-47248 runs code"),
    "pyyaml": ("5.4", "CVE-2020-14343: full_load runs code"),
    "ray": ("2.52", "CVE-2025-62593: a web page runs code by the dashboard"),
    "scikit-learn": ("1.5", "CVE-2024-5206: a vectorizer keeps tokens of its training data"),
    "setuptools": ("78.1.1", "CVE-2025-47273: a package's name writes outside of its folder"),
    "torch": ("2.6", "CVE-2025-32434: weights_only runs code"),
    "transformers": ("4.53", "CVE-2025-6921 and others: patterns that do not end"),
}
"""Package -> the first version without the hole, and the hole."""


def bounds() -> list[Requirement]:
    """Everything that pyproject.toml requires."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    optional = [one for some in project["project"]["optional-dependencies"].values() for one in some]
    given = [*project["build-system"]["requires"], *project["project"]["dependencies"], *optional]
    return [one for one in map(Requirement, given) if one.name != "springtide"]


def least(one: Requirement) -> Version:
    """Return the oldest version that a requirement allows; 0 if any is allowed."""
    return max((Version(part.version) for part in one.specifier if part.operator in (">=", "==")), default=Version("0"))


def known_hole(one: Requirement) -> str:
    """Return the hole that a version within the bounds has; empty if none is known."""
    first, hole = HOLES.get(one.name.lower(), ("0", ""))
    return f"{one}: {hole}" if least(one) < Version(first) else ""


def test_no_bound_allows_a_known_hole() -> None:
    found = bounds()
    assert HOLES.keys() <= {one.name.lower() for one in found}, "a row for a package that is not required any more"
    assert [hole for hole in map(known_hole, found) if hole] == []
    needs = re.findall(r"^[a-z].*", (REPOSITORY / "benchmarks/gpu/needs.txt").read_text(), re.MULTILINE)
    assert [hole for hole in map(known_hole, map(Requirement, needs)) if hole] == []


@pytest.mark.parametrize("old", ["mlflow>=3", "pyarrow>=17", "fsspec>=2024.6", "Jinja2", "datasets>=4,<6"])
def test_an_old_bound_is_found(old: str) -> None:
    assert known_hole(Requirement(old))


def test_what_ci_installs_is_within_the_bounds() -> None:
    lines = re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-"): version for name, version in lines}
    outside = [str(one) for one in bounds() if not one.specifier.contains(pinned.get(one.name.lower(), least(one)))]
    assert outside == []
