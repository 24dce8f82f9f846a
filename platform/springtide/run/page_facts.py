"""Collect what a run's HTML report shows in addition to the journal: origin (command, commit), config, checkpoints, and
links."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from springtide import config as configs
from springtide.errors import DamagedFile, redacted
from springtide.run.origin import Origin, read_origin
from springtide.run.report.html import Cell, Link
from springtide.run.report.run_page import RunFacts
from springtide.storage import Folder
from springtide.tracking.ledger import Prices
from springtide.tune.folder import PAGE, PLAN, SweepFolder

if TYPE_CHECKING:
    from springtide.run.folder import Run

_TRIAL = re.compile(r"(.+)/trials/trial-(\d{4,9})(?:-\d+)?")
"""Pattern of the URL of a run that is a trial of a sweep. Groups: URL of the sweep; number of the trial."""
_log = logging.getLogger(__name__)


def facts_of(run: Run) -> RunFacts:
    """Read the facts for a run's HTML report from the run's folder.

    Args:
        run: the run.

    Raises:
        ConfigError: the config is damaged.
        OSError: the store cannot be reached.

    Examples:
        >>> [label for label, _ in facts_of(st.open_run("runs/mine")).about]
        ['steps to train', 'config', 'train it again']
    """
    given = run.config
    config = configs.redact(given)
    origin, trial = Origin(), list[tuple[str, Cell]]()
    try:
        origin = read_origin(run.folder)
        trial = _trial(run.folder)
    except DamagedFile as error:  # write the report, but leave out what the damaged file contains
        _log.warning("%s; the report is written without the content of this file", error)
    url = redacted(run.folder.url)
    about: list[tuple[str, Cell]] = [
        *trial,
        ("steps to train", f"{given.num_steps:,} of {given.tokens_per_step:,} tokens"),
        ("config", f"fingerprint {configs.fingerprint(given)}"),
        *((label, text) for label, text in (("commit", origin.source), ("command", origin.command)) if text),
        ("train it again", f"springtide train --config {url}/{configs.RUN_CONFIG} --run.id NEW"),
    ]
    return RunFacts(
        config_yaml=configs.dump(config),
        about=about,
        links={"dataset": config.shards.dataset, "checkpoints": redacted((run.folder / "checkpoints").url)},
        checkpoints=run.checkpoints,
        prices=Prices.set_in(given.track),
    )


def _trial(run: Folder) -> list[tuple[str, Cell]]:
    """Return the table rows that only a trial of a sweep has: link to the sweep's page, and how the trial ended. Return no row
    for any other run."""
    match = _TRIAL.fullmatch(run.url.rstrip("/"))
    if match is None or not (root := Folder(match[1])).exists(PLAN):
        return []
    sweep = SweepFolder(root)
    rows: list[tuple[str, Cell]] = [("trial of", Link(sweep.name, f"../../{PAGE}"))]
    if end := sweep.end_of(int(match[2])):
        rows.append(("ended", f"{end.status}: {end.reason}" if end.reason else end.status))
    return rows
