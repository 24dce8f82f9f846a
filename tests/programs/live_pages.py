"""A driver that writes a run's report anew while it lives: ``python live_pages.py FOLDER`` prints the writer's pid, and waits.

Tests also take from here the program of a writer that writes without a pause.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from springtide.run import live_report
from springtide.storage import Folder

QUICK = "import sys; from springtide.run import live_report as one; one.EVERY_S = 0.05; one.TIMES = 0; one.main(sys.argv[1])"


def writers(url: str) -> list[psutil.Process]:
    """The processes below this one that write the report of the run at ``url``."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if one.cmdline()[-1:] == [url]:
                found.append(one)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def page(folder: Path) -> str:
    """The report in a run's folder; empty if there is none."""
    path = folder / "report.html"
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    live_report.PROGRAM = ("-c", QUICK)
    with live_report.live_report(Folder(sys.argv[1]), print):
        while not (found := writers(sys.argv[1])):
            time.sleep(0.01)  # it has no command line yet
        print(found[0].pid, flush=True)
        time.sleep(3600)  # until it is killed
