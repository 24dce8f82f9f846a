"""Remarks on a run that starts from another run's checkpoint, and the checkpoints that it descends from."""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint.branch import split
from springtide.config import RUN_CONFIG, Config
from springtide.run.find import config_or_problem
from springtide.run.folder import Run

_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""Model settings that do not change what the same weights compute."""
_ADAPTER = "model.adapter"


def remarks_on(saved: Config, config: Config) -> list[str]:
    """Return remarks for the user of a run of ``config`` that starts from a checkpoint saved with the config ``saved``: one for
    each model setting whose change makes the same weights compute something else. A new adapter and new blocks get no remark,
    because they change nothing before they are trained. A setting that changes the shape of a weight is refused when the
    weights are loaded.
    """
    adds = saved.model.adapter == "none"
    known = {*_SAME_FUNCTION, *(("model.num_layers",) if config.train.new_blocks else ())}
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in known and not (adds and name.startswith(_ADAPTER))
    ]


def lineage(config: Config) -> list[str]:
    """Return the URLs of the checkpoints that a run of ``config`` descends from, the nearest ancestor first. The list ends
    where a run no longer exists or cannot be read."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = Run(split(url)[0])
        before, _ = config_or_problem(run) if run.folder.exists(RUN_CONFIG) else (None, "")
        url = before.train.start_from if before else ""
    return found
