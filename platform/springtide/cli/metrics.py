"""``springtide metrics``: the metrics that Prometheus finds."""

from __future__ import annotations

import argparse

from springtide.cli.commands import Commands
from springtide.cli.options import add_json
from springtide.cli.output import print_json, say

_EXAMPLES = "  springtide metrics                       # names, units and meanings"


def add(commands: Commands) -> None:
    """Add the command."""
    commands.command("metrics", _metrics, "Print the metrics that Prometheus finds.", add_json, _EXAMPLES)


def _metrics(options: argparse.Namespace) -> int:
    from springtide.tracking.prometheus import EXPORTED, rows

    if options.json:
        keys = ("kind", "unit", "meaning", "labels")
        print_json({f"{EXPORTED}{row.name}": {key: getattr(row, key) for key in keys} for row in rows()})
    else:
        width = max(len(row.name) for row in rows()) + len(EXPORTED)
        for row in rows():
            name, labels = f"{EXPORTED}{row.name}", ", ".join(row.labels)
            say(f"{name:{width}}  {row.kind:7}  {row.unit:10}  {row.meaning} ({labels})")
    return 0
