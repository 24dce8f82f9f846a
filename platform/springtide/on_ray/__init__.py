"""The only package that imports Ray. Rule: other packages decide, Ray executes; each private part of Ray is used in one
file only."""

import importlib.util

from springtide.errors import ConfigError, explain

if importlib.util.find_spec("ray") is None:
    raise ConfigError(
        explain(
            "ray",
            "none",
            "is needed to train elastically, to sweep and to drill, and is not installed",
            "pip install 'springtide[ray]', or train without it: torchrun -m springtide.training --config FILE",
        )
    )
