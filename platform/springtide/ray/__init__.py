"""The only package that imports Ray. Other packages make the decisions, and this package has Ray carry them out. Private parts
of Ray are imported only in ``_ray_private.py``."""

import contextlib
import importlib.util
import warnings

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

with contextlib.suppress(ImportError), warnings.catch_warnings():
    # import tqdm, which Ray needs, without the warning about missing ipywidgets in a notebook: no progress bar is drawn here
    warnings.filterwarnings("ignore", message="IProgress not found")
    importlib.import_module("tqdm.auto")
