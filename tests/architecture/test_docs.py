"""Docs are built strictly, links lead somewhere, commands are ones that springtide has, and the words are plain."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.cli.main import parser
from springtide.cli.options import config_of
from springtide.config.recipes import RECIPES
from springtide.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "platform" / "springtide"
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
BANNED = {
    r"^Of [a-z]": "begins with 'Of': say what it is or does",
    r"\bAs there\b": "say it here",
    r"\bso many\b": "the number",
    r"\bforetold\b": "predicted",
    r"\bleft out\b": "skipped, excluded",
    r"\b(go|goes|went|going) on with\b": "resume, continue",
    r"\bone a (node|worker|rank|run|step|trial|device)\b": "one per",
    r"(?<!\b[Tt]here )\bis no (?!longer)[a-z]+": "is not a",
}
OLD_NAMES = r"\b(vaults?|the house|rooms? of|attempts/|separate_documents|eval_beside)\b"
NOT_HERE = (
    "ray job submit",
    "serve run",
    "transformers serve",
    "vllm serve",
    "ray get-auth-token",
    "duckdb",
    "torchrun",
    "ray start",
    "make",
    "pip",
    "git",
    "python",
    "grep",
)
"""Commands of others, which this test does not try."""


def test_the_pages_are_built_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY / "platform")}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = (tmp_path / "site" / "reference" / "settings" / "index.html").read_text()
    assert "stream.global_batch" in settings


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    files = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in files if not (page.parent / link).exists()] == []


def commands(page: Path) -> Iterator[str]:
    """The commands of its console blocks, as a shell would see them."""
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield line[2:].split(" # ")[0].split("  #")[0].strip()


def test_every_command_is_one_that_springtide_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed with the real parser, and its config resolved where it names a recipe; those of others are counted."""
    monkeypatch.chdir(REPOSITORY)
    known = others = 0
    for page in PAGES:
        for command in commands(page):
            words = shlex.split(command.removeprefix(".venv/bin/"))
            if words[0] != "springtide":
                assert command.removeprefix(".venv/bin/").startswith(NOT_HERE), f"{page.name}: {command}"
                others += 1
                continue
            if words[-1] in ("--help", "--help-all"):  # it prints, and exits
                words.pop()
                words += ["--recipe", "tiny"] if words[-1] in ("train", "prepare", "estimate") else []
            options, unknown = parser(show_all=True).parse_known_args(words[1:])
            assert unknown == [], f"{page.name}: {command}"
            if getattr(options, "recipe", None) in RECIPES:  # others need a run: tests/elastic resolves them
                config_of(options, runs_code=hasattr(options, "trust_code"))
            known += 1
    assert known >= 25
    assert others <= 20


def test_what_the_pages_say_in_python_is_python() -> None:
    blocks = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    assert blocks
    for block in blocks:
        ast.parse(block)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what is written for people: docstrings and comments of code, all of a page but its code."""
    if path.suffix == ".md":
        text = re.sub(
            r"```.*?```|`[^`\n]*`",
            lambda found: re.sub(r"[^\n]", " ", found.group()),
            path.read_text(),
            flags=re.DOTALL,
        )
        yield from enumerate(text.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((node.lineno + at, line.strip()) for at, line in enumerate(node.value.value.splitlines()))
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def test_prose_is_plain() -> None:
    """Forms that readers stumble over, and names that are gone. docs/decisions/0001-names.md may say the old ones."""
    pages = [page for page in PAGES if page.name != "0001-names.md"]
    forms, found = {**BANNED, OLD_NAMES: "an old name: see docs/decisions/0001-names.md"}, []
    for path in [*pages, *sorted(PACKAGE.rglob("*.py"))]:
        for line, text in prose_of(path):
            for form, remedy in forms.items():
                if hit := re.search(form, text):
                    found.append(f"{path.relative_to(REPOSITORY)}:{line}: {hit.group()!r}: {remedy}")
    assert not found, "\n".join(found)


def test_a_form_that_is_banned_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text('def f():\n    """Of a head."""\n    return 1  # one a node is left out\n')
    said = list(prose_of(tmp_path / "bad.py"))
    assert sum(bool(re.search(form, text)) for _, text in said for form in BANNED) == 3


def test_an_option_that_does_not_exist_is_found() -> None:
    _, unknown = parser(show_all=True).parse_known_args(["train", "--recipe", "demo", "--optim.no-such", "1"])
    assert unknown
    options, _ = parser(show_all=True).parse_known_args(["train", "--recipe", "no_such"])
    with pytest.raises(ConfigError, match="recipe"):
        config_of(options)
