"""What a run's page shows that is not in its journal: the config, checkpoints, scores, and where they are."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from springtide import config as configs
from springtide.errors import DamagedFile, redacted
from springtide.report.run_page import RunFacts
from springtide.track.ledger import Prices

if TYPE_CHECKING:
    from springtide.run.folder import Run

_log = logging.getLogger(__name__)


def facts_of(run: Run) -> RunFacts:
    """Return them, read from the run's folder. Raises ConfigError if the config is damaged, OSError if the store cannot be
    reached."""
    given = run.config
    config = configs.redact(given)
    try:
        scores = [row for one in run.task_scores for row in one.rows()]
    except DamagedFile as error:  # the rest of the page is right
        _log.warning("%s; the report shows no scores on tasks", error)
        scores = []
    url = redacted(run.folder.url)
    about = [
        ("steps to train", f"{given.num_steps:,} of {given.tokens_per_step:,} tokens"),
        ("config", f"fingerprint {configs.fingerprint(given)}"),
        ("train it again", f"springtide train --config {url}/{configs.RUN_CONFIG} --run.id NEW"),
    ]
    return RunFacts(
        config_yaml=configs.dump(config),
        about=about,
        links={"dataset": config.shards.dataset, "checkpoints": redacted((run.folder / "checkpoints").url)},
        scores=scores,
        checkpoints=run.checkpoints,
        prices=Prices.in_config(given),
    )
