"""``springtide metrics``: the metrics that Prometheus finds, and the dashboard and alerts made from them."""

from __future__ import annotations

import argparse

from springtide.cli.commands import Commands
from springtide.cli.options import add_json, print_json

_EXAMPLES = """  springtide metrics                       # names, units and meanings
  springtide metrics --out monitoring      # springtide-dashboard.json for Grafana, springtide-alerts.yml for Prometheus"""
_DASHBOARD, _ALERTS = "springtide-dashboard.json", "springtide-alerts.yml"


def add(commands: Commands) -> None:
    """Add the command."""
    help = "Print the metrics that Prometheus finds, or write their dashboard and alerts."
    commands.command("metrics", _metrics, help, _options, _EXAMPLES)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", help="folder or URL to write the dashboard and the alert rules to")
    add_json(parser)


def _metrics(options: argparse.Namespace) -> int:
    from springtide.store import Folder
    from springtide.track.dashboard import EXPORTED, alert_rules, dashboard, rows

    if options.out:
        folder = Folder(options.out)
        folder.write_json(_DASHBOARD, dashboard())
        folder.write(_ALERTS, alert_rules())
        print(f"wrote {folder.where(_DASHBOARD)} and {folder.where(_ALERTS)}")
    elif options.json:
        keys = ("kind", "unit", "meaning", "labels")
        print_json({f"{EXPORTED}{row.name}": {key: getattr(row, key) for key in keys} for row in rows()})
    else:
        width = max(len(row.name) for row in rows()) + len(EXPORTED)
        for row in rows():
            name, labels = f"{EXPORTED}{row.name}", ", ".join(row.labels)
            print(f"{name:{width}}  {row.kind:7}  {row.unit:10}  {row.meaning} ({labels})")
    return 0
