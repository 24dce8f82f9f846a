"""Whether a run's model may be run: a config that comes from elsewhere may name code (``model.source``)."""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.config import RUN_CONFIG, Config
from springtide.storage import Folder


def check_model_code(run: Folder, config: Config, trust_code: bool) -> None:
    """Raise ConfigError if the model of a run with ``config`` is code that is not trusted, by ``trust_code`` or because this
    user started the run with it."""
    sources = config.needs_trust if config.model.source else {}  # only the model is run
    configs.check_trusted(sources, run.where(RUN_CONFIG), trust_code, leases.trusted_code(run, sources))
