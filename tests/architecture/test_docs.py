"""Docs are built strictly, links lead somewhere, and their commands and Python are valid."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import long
import pytest

from springtide.cli.main import parser
from springtide.cli.options import config_of
from springtide.config.recipes import RECIPES
from springtide.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
OTHER_PAGES = [REPOSITORY / "SECURITY.md", *sorted((REPOSITORY / ".github").rglob("*.md"))]


@pytest.mark.processes
def test_the_pages_are_built_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY / "platform")}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = (tmp_path / "site" / "reference" / "settings" / "index.html").read_text()
    assert "stream.global_batch" in settings


def test_tests_that_the_pages_name_exist() -> None:
    named = [found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())]
    missing = [one for one in named if f"def {one[1]}(" not in (REPOSITORY / one[0]).read_text()]
    assert named
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    files = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in files if not (page.parent / link).exists()] == []


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a page's console blocks, without variables set before the command."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                words = shlex.split(line[2:].split(" # ")[0].split("  #")[0])
                while "=" in words[0]:
                    words.pop(0)
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def test_every_springtide_command_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parser takes it, and its config resolves where it names a recipe."""
    monkeypatch.chdir(REPOSITORY)
    parsed, known = 0, parser(show_all=True)
    for page in PAGES:
        for words in commands(page):
            if words[0] != "springtide":
                continue
            command = shlex.join(words)
            if words[-1] in ("--help", "--help-all"):  # it prints, and exits
                words.pop()
                words += ["--recipe", "tiny"] if words[-1] in ("train", "prepare") else []
            options, unknown = known.parse_known_args(words[1:])
            assert unknown == [], f"{page.name}: {command}"
            if getattr(options, "recipe", None) in RECIPES:  # others need a run: tests/elastic resolves them
                config_of(options, runs_code=hasattr(options, "trust_code"))
            parsed += 1
    assert parsed > 0


def test_every_make_target_exists() -> None:
    """Those of console blocks, and those in backquotes; ``make long`` has the subject."""
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, *OTHER_PAGES]:
        if page.name == "renames.md":
            continue  # it names what is gone
        named = set(re.findall(r"`make ([\w-]+)", page.read_text()))
        named |= {words[1] for words in commands(page) if words[0] == "make" and len(words) > 1}
        assert named <= targets, page.name
        assert set(re.findall(r"make long SUBJECT=(\w+)", page.read_text())) <= long.SUBJECTS.keys(), page.name


def test_what_the_pages_say_in_python_is_python() -> None:
    blocks = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_an_option_that_does_not_exist_is_found() -> None:
    _, unknown = parser(show_all=True).parse_known_args(["train", "--recipe", "demo", "--optim.no-such", "1"])
    assert unknown
    options, _ = parser(show_all=True).parse_known_args(["train", "--recipe", "no_such"])
    with pytest.raises(ConfigError, match="recipe"):
        config_of(options)
