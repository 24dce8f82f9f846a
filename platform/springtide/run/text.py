"""Open a model to score and generate text, or to label a dataset: a run's checkpoint or a ``transformers`` folder."""

from __future__ import annotations

import dataclasses
import hashlib

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.branch import split
from springtide.checkpoint.format import committed, read_manifest, step_of
from springtide.checkpoint.load import read_pieces
from springtide.config import RUN_CONFIG
from springtide.config.engine import ModelConfig, ParallelConfig
from springtide.errors import CheckpointError, ConfigError, explain, redacted
from springtide.eval import TextModel, open_checkpoint, open_export
from springtide.hf import HF_CONFIG, open_model
from springtide.hf.hf_config import FILE
from springtide.run.exchange import import_model
from springtide.run.folder import Run, check_model_code
from springtide.shards import TOKENIZER, Manifest
from springtide.storage import Folder, digest
from springtide.training.label import LabelModel, check_reads


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
        raise ConfigError(explain("step", step, f"needs a run, but {path} is a transformers folder", "omit step"))
    return open_export(folder)


def text_model(run: Run, step: int | None = None, trust_code: bool = False) -> TextModel:
    """Load the model of a checkpoint of ``run``. Args and errors as for ``open_text``."""
    config = run.config
    check_model_code(run.folder, config, trust_code)
    datasets = [url for url in (*config.stream.mixture.values(), config.shards.dataset) if url]
    return open_checkpoint(run.folder, run.checkpoint_at(step), config.model, datasets)


FIELD = "by"


@dataclasses.dataclass(frozen=True)
class Labeller:
    """A model that labels a dataset: for each row, it predicts tokens. Its vocabulary and maximum row length fit the dataset,
    which ``open_labeller`` has checked."""

    folder: Folder
    """The run's folder, or a ``transformers`` folder."""
    checkpoint: str
    """Name of the run's checkpoint; empty for a ``transformers`` folder, which has none."""
    model: ModelConfig
    parallel: ParallelConfig
    facts: dict[str, str | int]
    """Name -> value of facts that identify the model. They are stored with the labels."""

    def model_at(self, to: Folder, manifest: Manifest) -> LabelModel:
        """Return the model as a checkpoint to load. A ``transformers`` folder is imported into ``to`` first, unless an earlier
        call has done so. ``manifest``: file list of the dataset to label."""
        folder, name = self.folder, self.checkpoint
        if not name:
            folder = to
            if not (to.exists(RUN_CONFIG) and committed(to)):
                to.remove()  # remove what a killed import has left
                import_model(self.folder.url, to.url)
            name = committed(to)[-1]
        ids = manifest.vocab_size, *manifest.document_ids
        return LabelModel(folder.url, name, self.model, self.parallel, *ids)


def open_labeller(by: str, manifest: Manifest, trust_code: bool = False) -> Labeller:
    """Find the model that ``by`` names and check that it fits the dataset to label. Writes nothing.

    Args:
        by: path or URL of a run's folder (its newest checkpoint is used), of one checkpoint, or of a ``transformers`` folder.
        manifest: manifest (file list) of the dataset to label.
        trust_code: run the code of the user's own model if the run names one (``model.source``); needed unless you started
            the run with the same code.

    Raises:
        ConfigError: there is no such model, it has another vocabulary than the dataset, the dataset's rows are too long for it,
            or the run names code that is not trusted.

    Examples:
        >>> from springtide.run.text import open_labeller
        >>> from springtide.shards import load_manifest
        >>> from springtide.storage import Folder
        >>> dataset = st.open_run("runs/mine").config.shards.dataset
        >>> open_labeller("runs/mine", load_manifest(Folder(dataset))).facts["step"]
        8
    """
    run, name = split(by)
    if not name and run.exists(HF_CONFIG) and not run.exists(RUN_CONFIG):
        found, tokenizer = _of_transformers(run)
    else:
        found, tokenizer = _of_run(run, name, by, trust_code)
    check_reads(FIELD, by, found.model, tokenizer, manifest)
    return found


def _of_run(run: Folder, name: str, by: str, trust_code: bool) -> tuple[Labeller, str]:
    """Return (labeller, digest of its tokenizer) for the checkpoint ``name`` of a run; an empty ``name`` is the newest one."""
    names = committed(run)
    name = name or (names or [""])[-1]
    if name not in names:
        there = ", ".join(names[-3:]) or "none"
        problem = f"names no checkpoint that counts, and no folder of transformers; {run.url} has {there}"
        raise ConfigError(explain(FIELD, by, problem, "name a run, one of its checkpoints, or a model's folder"))
    try:
        manifest = read_manifest(run, name)
        weights = [
            (one.box, one.digests) for one in read_pieces(run, name, manifest) if one.tensor.startswith("model/")
        ]
    except CheckpointError as error:
        raise ConfigError(explain(FIELD, by, f"cannot be used: {error}", "name another checkpoint")) from None
    config = configs.build_stored(manifest.config) if manifest.config else Run(run).config
    sources = {field: value for field, value in config.sources.items() if field == "model.source"}
    if sources:
        claimed = leases.trusted_code(run, config.needs_trust)
        configs.check_trusted(sources, run.where(RUN_CONFIG), trust_code, claimed)
    facts: dict[str, str | int] = {"run": run.name, "checkpoint": name, "step": int(step_of(name) or 0)}
    facts |= {"weights": _hash(repr(sorted(weights))), "precision": config.parallel.precision}
    return Labeller(run, name, config.model, config.parallel, facts), manifest.meta.tokenizer_digest


def _of_transformers(folder: Folder) -> tuple[Labeller, str]:
    """Return (labeller, digest of its tokenizer) for a ``transformers`` folder. The digest is empty if the folder has no
    tokenizer."""
    found, parallel = open_model(folder), ParallelConfig()
    names = [name for name in folder.names() if name in (HF_CONFIG, TOKENIZER) or name.endswith(".safetensors")]
    digests = []
    for name in names:
        with found.folder.open(name) as file:
            digests.append((name, digest.of_file(file)))
    facts: dict[str, str | int] = {"folder": redacted(folder.url), "weights": _hash(repr(digests))}
    facts |= {"architecture": found.family.architecture, "precision": parallel.precision}
    tokenizer = digest.of_bytes(found.tokenizer.encode()) if found.tokenizer else ""
    return Labeller(folder, "", found.model, parallel, facts), tokenizer


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
