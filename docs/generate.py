"""What mkdocs puts where a page says ``<!-- generated: ... -->``: settings from the config, commands from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from springtide.cli.main import parser
from springtide.config import Config
from springtide.config.fields import fields, mark


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    for name, make in {"settings": settings, "commands": commands}.items():
        mark = f"<!-- generated: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def settings() -> str:
    """A table per section: field, default, what it is."""
    lines: list[str] = []
    section = ""
    for name, field in fields().items():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            about = str(Config.model_fields[section].annotation.__doc__).splitlines()[0]
            lines += ["", f"## {section}", "", about, "", "| field | default | |", "|---|---|---|"]
        text = " ".join(field.description.split()).replace("|", "\\|").replace("``", "`")
        default = f"`{field.default}`" if str(field.default) else ""
        lines.append(f"| `{name}` | {default} | {text}{f' *{mark(field)}*' if mark(field) else ''} |")
    return "\n".join(lines)


def commands() -> str:
    """The help of every command."""
    return "\n".join(f"## {name}\n\n```text\n{one.format_help()}```\n" for name, one in _commands("", parser(False)))


def _commands(name: str, one: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, one
    for action in below:
        for child, its in action.choices.items():
            yield from _commands(f"{name} {child}".strip(), its)
