"""Load the model of a run, or of a ``transformers`` folder, to compute losses of text and generate text."""

from __future__ import annotations

from springtide.config import RUN_CONFIG
from springtide.errors import ConfigError, explain
from springtide.eval import TextModel, open_checkpoint, open_export
from springtide.hf.hf_config import FILE
from springtide.run.folder import Run, check_model_code
from springtide.storage import Folder


def open_text(path: str, step: int | None = None, trust_code: bool = False) -> TextModel:
    """Load the model in a folder, to score and generate text.

    Args:
        path: path or URL of a run's folder (an imported model is a run, too), or of a ``transformers`` folder, such as an
            export.
        step: step of the run's checkpoint; None: the newest.
        trust_code: run the code of the user's own model if the config names one (``model.source``); needed unless you started
            the run with the same code.

    Raises:
        ConfigError: the folder is of neither kind, has no such checkpoint or no known tokenizer, this machine lacks the memory,
            or the config names code that is not trusted.
        CorpusError: the run's dataset cannot be read.
        CheckpointError: the checkpoint is corrupt.
    """
    folder = Folder(path)
    if folder.exists(RUN_CONFIG):
        return text_model(Run(folder), step, trust_code)
    if not folder.exists(FILE):
        remedy = "give <root>/<run id>, or a folder of transformers"
        raise ConfigError(explain("run", path, f"has neither {RUN_CONFIG} nor {FILE}", remedy))
    if step is not None:
        raise ConfigError(explain("step", step, f"is for runs, and {path} is a folder of transformers", "leave it out"))
    return open_export(folder)


def text_model(run: Run, step: int | None = None, trust_code: bool = False) -> TextModel:
    """Load the model of a checkpoint of ``run``. Args and errors as for ``open_text``."""
    config = run.config
    check_model_code(run.folder, config, trust_code)
    datasets = [url for url in (*config.stream.mixture.values(), config.shards.dataset) if url]
    return open_checkpoint(run.folder, run.checkpoint_at(step), config.model, datasets)
