"""Export a checkpoint as a Hugging Face ``transformers`` folder, and import such a folder as a run to start from."""

from __future__ import annotations

import contextlib
import secrets

from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.adapters import has_adapter
from springtide.checkpoint.branch import split
from springtide.checkpoint.format import IMPORTED, read_manifest
from springtide.config import Config
from springtide.errors import CheckpointError, ConfigError, SpringtideError, explain, redacted
from springtide.hf import (
    GENERATION,
    Exported,
    export_adapter,
    export_checkpoint,
    model_folder,
    open_model,
    with_adapter,
    write_checkpoint,
)
from springtide.run.find import lineage
from springtide.run.folder import Run
from springtide.shards import CHAT_TEMPLATE, TOKENIZER, load_manifest
from springtide.storage import Folder

_FORMATS = ("hf", "peft")
_UNFINISHED = "importing.json"
"""Marker file in a folder whose import has begun and is not complete."""
_WRITTEN = frozenset({"checkpoints", "leases", TOKENIZER, CHAT_TEMPLATE, GENERATION, configs.RUN_CONFIG, _UNFINISHED})
"""Names of all files and folders that an import writes into the run's folder."""


def export_model(
    run: Run, to: str, step: int | None = None, dtype: str = "", ema: bool = False, format: str = "hf"
) -> Exported:
    """Write a committed checkpoint as a folder that ``transformers`` loads: weights, tokenizer and a model card. An adapter is
    merged into the weights, or written alone for ``peft`` (see ``format``). The export needs little memory and no GPU, and is
    safe while the run trains.

    Args:
        run: the run of the checkpoint.
        to: folder or URL to create; an earlier export there is replaced.
        step: step of the checkpoint; None: the newest.
        dtype: ``fp32``, ``bf16`` or ``fp16``; empty: as the weights are stored.
        ema: write the moving average of the weights (``optim.ema_half_life``) instead of the weights.
        format: ``hf``: the whole model; ``peft``: only the adapter (``model.adapter``), which ``peft`` loads on its base model.

    Returns:
        What was written, and remarks for the user.

    Raises:
        ConfigError: there is no such checkpoint, no ``transformers`` architecture computes the same as its model, or ``to``
            holds files that no export wrote.
        CheckpointError: the checkpoint is corrupt, or it has no averaged weights.

    Examples:
        >>> from springtide.run.exchange import export_model
        >>> export_model(st.open_run("runs/mine"), "exports/mine").architecture
        'LlamaForCausalLM'
    """
    if format not in _FORMATS:
        raise ConfigError(explain("format", format, f"is not one of {', '.join(_FORMATS)}", "use hf for transformers"))
    name = run.checkpoint_at(step)
    manifest = read_manifest(run.folder, name)
    config = configs.build_stored(manifest.config) if manifest.config else run.config
    urls = [*config.stream.mixture.values(), config.shards.dataset]
    datasets = {redacted(url): _dataset_digest(url) for url in urls if url}
    ancestors = lineage(config)
    facts = {"run": run.id, "datasets": datasets, "descends_from": [redacted(url) for url in ancestors]}
    if format == "peft":
        base = manifest.meta.labels.get(IMPORTED) or _base_of(config)
        return export_adapter(run.folder, name, config.model, Folder(to), facts, base, dtype, ema)
    # search these folders for the chat template. A model that was imported and then fine-tuned on plain text has a template
    # only in the imported folder: the dataset of plain text has none
    folders = [*(Folder(url) for url in urls if url), run.folder, *(split(url)[0] for url in ancestors)]
    return export_checkpoint(run.folder, name, config.model, Folder(to), facts, folders, dtype, ema)


def import_model(folder: str, to: str, adapter: str = "") -> Run:
    """Import a ``transformers`` folder as a run's folder that holds weights only.

    The new run can be evaluated, generate text, or be the start of another run (``train.start_with = weights``). The import
    needs little memory and executes no code of the folder. A failed import leaves nothing behind. The files of a killed import
    are replaced by the next import.

    Args:
        folder: folder or URL with config.json and safetensors files of a supported model family; on the Hugging Face Hub
            ``hf://OWNER/NAME[@REVISION]``, whose files are read in place, not copied.
        to: folder or URL to create.
        adapter: folder or URL of a LoRA or DoRA adapter of that model, as PEFT saves it; empty for none.

    Returns:
        A handle on the new folder. Its config has the ``model`` section, and the tokenizer as ``corpus.tokenizer``. The chat
        template is stored next to the tokenizer: ``corpus.chat_template = model`` uses it.

    Raises:
        ConfigError: the model or its adapter cannot be imported (names the key, tensor or file, and the remedy), or ``to`` is
            not empty.
        RunExists: another process of this machine is importing into ``to``, or another import took ``to`` over meanwhile.
        CorpusError: a model of the Hub does not exist, or cannot be reached.

    Examples:
        >>> from springtide.run.exchange import export_model, import_model
        >>> exported = export_model(st.open_run("runs/mine"), "exports/again")
        >>> import_model("exports/again", "runs/imported").checkpoints
        ['step-0000000000']
    """
    target = Folder(to)
    existed, names = target.exists(), target.names()
    if names and not (_UNFINISHED in names and _WRITTEN.issuperset(names)):
        raise ConfigError(explain("out", to, "is not empty", "name another folder"))
    found = open_model(model_folder(folder))
    if adapter:
        found = with_adapter(found, Folder(adapter))
    root, _, name = target.url.rstrip("/").rpartition("/")
    changes = {f"model.{field}": value for field, value in found.model.model_dump().items()}
    changes |= {"run.id": name, "run.root": root}
    usual = Config()
    if usual.shards.sequence_length > found.model.max_sequence_length:
        changes["shards.sequence_length"] = found.model.max_sequence_length
    if found.model.vocab_size > 2**15:
        changes["shards.token_type"] = "uint32"
    if found.tokenizer:
        changes |= {"corpus.tokenizer": target.where(TOKENIZER), "corpus.end_of_text": found.end_of_text}
        changes["corpus.begin_of_text"] = found.begin_of_text
    config = usual.override(changes)
    target.write_json(_UNFINISHED, {"of": redacted(found.folder.url)})
    lease = leases.claim(target, secrets.token_hex(8))  # before any file is removed: raises if another import is active
    try:
        _clear(target, _WRITTEN - {"leases", _UNFINISHED})  # remove what a killed import has left
        write_checkpoint(found, target, config.model_dump(mode="json"), configs.fingerprint(config), lease=lease)
        leases.check(target, lease.term, lease.owner)  # raises if another import took over the folder: write no more
        if found.tokenizer:
            target.write(TOKENIZER, found.tokenizer)
        if found.template:
            target.write(CHAT_TEMPLATE, found.template)
        if found.generation:
            target.write_json(GENERATION, found.generation)
        run = Run(target)
        run.write_config(config)
    except BaseException:
        with contextlib.suppress(Exception):  # if removing files fails, the next import removes the rest
            leases.check(target, lease.term, lease.owner)  # raises if another import owns the folder: remove nothing
            _clear(target, _WRITTEN)
            if not existed:
                target.remove()
        raise
    leases.end(target, lease.term)
    target.remove(_UNFINISHED)
    return run


def _clear(target: Folder, written: frozenset[str]) -> None:
    """Remove the files ``written`` by an import. The marker file of an incomplete import is removed last: if this removal is
    killed, the marker makes the next import repeat it."""
    names = target.names()
    for name in sorted(written.intersection(names), key=lambda one: one == _UNFINISHED):
        target.remove(name)
    if target.is_local:
        target.sweep()


def _base_of(config: Config) -> str:
    """Return the base model of the adapter that a run with ``config`` trains: the imported ``transformers`` folder, or the URL
    of a checkpoint. Empty if there is none."""
    for url in lineage(config):
        try:
            manifest = read_manifest(*split(url))
        except CheckpointError:
            return redacted(url)
        if IMPORTED in manifest.meta.labels or not has_adapter(manifest):
            return manifest.meta.labels.get(IMPORTED, redacted(url))
    return ""


def _dataset_digest(url: str) -> str:
    try:
        return load_manifest(Folder(url)).digest
    except (SpringtideError, OSError) as error:
        return f"cannot be read: {redacted(str(error))[:200]}"
