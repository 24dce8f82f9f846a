"""Find the run that a call of ``train`` belongs to (a new run, or an existing run that it resumes), and the checkpoints that a
run descends from."""

from __future__ import annotations

import logging
import secrets
import shlex
import time
from typing import Literal

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.branch import split
from springtide.config import RUN_CONFIG, Config
from springtide.errors import ConfigError, RunExists, SpringtideError, explain, in_one_line, redacted
from springtide.run.folder import Run
from springtide.storage import Folder, to_json
from springtide.storage.errors import may_pass

_DECIDED_LATER = {"shards.dataset": "", "train.micro_batch": "auto"}
"""Setting -> the value that means "decide at the start of the run". If the config of a resume has such a value, the setting
does not count as changed."""
_log = logging.getLogger(__name__)


def find_run(config: Config, resume: bool | Literal["auto"], accept_changes: bool) -> tuple[Config, Run]:
    """Choose the run's id and find its folder. Returns the config with ``run.id`` and ``run.root`` filled in, and the run.

    Writes nothing: the folder becomes a run when the caller writes the config there. If ``resume`` is True, there must be a run
    to resume. If it is "auto", a new run starts if there is none.

    Raises RunExists if the id is taken and ``resume`` is False, or if changed settings would change what the run learns. Raises
    ConfigError if the folder is not writable, if there is no run to resume, or if this version lacks a setting of the stored
    config that decides what the run learns. ``accept_changes`` allows changed and lacking settings.
    """
    root = Folder(config.run.root)
    name = config.run.id or (_newest(root, config, needed=resume != "auto") if resume else "") or _made_up()
    config = config.override({"run.id": name, "run.root": root.url})
    run = Run(root / name)
    exists = run.folder.exists(RUN_CONFIG)
    if config.train.start_from:
        known = run.config.train.start_from if exists else ""
        config = config.override({"train.start_from": branch.resolve(config.train.start_from, known)})
    if config.objective.teacher:
        known = run.config.objective.teacher if exists else ""
        teacher = branch.resolve(config.objective.teacher, known, "objective.teacher")
        config = config.override({"objective.teacher": teacher})
    if exists:
        _check_resume(run, config, bool(resume), accept_changes)
        # keep skipping the steps that earlier starts of the run have skipped, such as loss spikes
        config = config.override({"stream.skip": sorted({*config.stream.skip, *run.config.stream.skip})})
    elif resume and resume != "auto":
        raise _nothing_to_resume(config, name, root)
    try:
        run.folder.check_writable()
    except OSError as error:
        raise ConfigError(
            explain("run.root", root.url, f"cannot be written ({error})", "set another run.root, or fix permissions")
        ) from None
    return config, run


def check_id(config: Config, resume: bool | Literal["auto"]) -> None:
    """Raise RunExists if ``run.id`` is taken by a run that is not resumed, and ConfigError if there is no run to resume. For
    callers whose config is not complete yet; ``find_run`` also compares the settings."""
    root = Folder(config.run.root)
    exists = bool(config.run.id) and Run(root / config.run.id).folder.exists(RUN_CONFIG)
    if exists and not resume:
        raise RunExists(f"run.id = {config.run.id!r} exists; resume it with --resume, or choose another run.id")
    if config.run.id and not exists and resume is True:
        raise _nothing_to_resume(config, config.run.id, root)


def _nothing_to_resume(config: Config, name: str, root: Folder) -> ConfigError:
    remedy = f"omit --resume{_or_root_of_model(config)}"
    return ConfigError(explain("run.id", name, f"is not under {root.url}: nothing to resume", remedy))


def config_or_problem(run: Run) -> tuple[Config | None, str]:
    """Return (the run's config, empty text), or (None, reason in one line) if the config cannot be read. An error of the store
    that may be temporary is raised instead, because it does not mean that the run is damaged."""
    try:
        return run.config, ""
    except (SpringtideError, OSError) as error:
        if may_pass(error):
            raise
        return None, in_one_line(error)


def check_taken_up(config: Config, run: Run) -> None:
    """Raise ConfigError if ``config`` lacks a dataset that was added to the run during training. Up to commit 0ba2dd87,
    datasets could be added to a running run. Each addition left a record in the run's folder ``followed/``, and the run's
    stored config names all added datasets."""
    if not run.folder.exists("followed/0000.json"):
        return
    known = run.config.stream.model_dump(mode="json")
    lacking = set(known["mixture"].values()) - set(config.stream.mixture.values())
    if lacking:
        limit = f"lacks {len(lacking)} of the datasets that {run.id} took up while it was trained"
        settings = " ".join(f"--stream.{name} '{to_json(known[name])}'" for name in ("mixture", "weights"))
        remedy = f"resume with --config {run.folder.where(RUN_CONFIG)}, or add {settings}"
        raise ConfigError(explain("stream.mixture", dict(config.stream.mixture), limit, remedy))


def trusted_code(config: Config) -> str:
    """Return the digest of the user's own code that was trusted at the last start of the run that ``config`` would resume.
    Empty if there is no such run, or if it runs no code of the user."""
    if not config.needs_trust:
        return ""
    root = Folder(config.run.root)
    name = config.run.id or _newest(root, config, needed=False)
    return leases.trusted_code(root / name, config.needs_trust) if name else ""


def _check_resume(run: Run, config: Config, resume: bool, accept_changes: bool) -> None:
    changed = {
        name: change
        for name, change in configs.difference(run.config, config).items()
        if not name.startswith("run.") and change[1] != _DECIDED_LATER.get(name)
    }
    shown = redacted("".join(f"\n  {name}: {old!r} -> {new!r}" for name, (old, new) in changed.items()))
    if not resume:
        what = f"under another config:{shown}\n" if shown else "under this config; "
        raise RunExists(f"run.id = {run.id!r} exists {what}resume it with --resume, or choose another run.id")
    if not accept_changes:
        configs.check_nothing_lost(run.folder.read(RUN_CONFIG), run.folder.where(RUN_CONFIG), "--accept-changes")
    configs.check_same_run(run.config, config, accept_changes)


def _newest(root: Folder, config: Config, needed: bool) -> str:
    """Return the id of the newest run whose config has the same fingerprint (all settings that decide what is learned). Ids
    start with the time of creation. If there is no such run, return an empty text, or raise ConfigError if ``needed``. A run
    that cannot be read is skipped with a warning."""
    wanted = configs.fingerprint(config)
    for name in reversed(root.names()):
        run = Run(root / name)
        if not run.folder.exists(RUN_CONFIG):
            continue
        found, problem = config_or_problem(run)
        if found is None:
            _log.warning("skipping run %s, whose config cannot be read: %s", redacted(run.folder.url), problem)
        elif configs.fingerprint(found) == wanted:
            return name
    if not needed:
        return ""
    remedy = f"name the run with --run.id, or start one{_or_root_of_model(config)}"
    raise ConfigError(explain("run.id", "", f"no run of this config is under {root.url}", remedy))


def _or_root_of_model(config: Config) -> str:
    """Return a further remedy for the error that the run to resume was not found; empty if there is none. Up to commit
    9c427aee, a run that started from another run's model was created in the root folder of that run. So the remedy names
    that folder. Reads only the config of the other run, and contacts nothing that the config names."""
    if not config.train.start_from:
        return ""
    model = Run(branch.split(config.train.start_from)[0])
    try:
        root = model.config.run.root
    except (SpringtideError, OSError):
        return ""
    if Folder(config.run.root).url == root or config.run.root == root:
        return ""
    return f", or search where the model's run is: --run.root {shlex.quote(redacted(root))}"


def _made_up() -> str:
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""Model settings that do not change the outputs that given weights compute."""
_ADAPTER = "model.adapter"


def remarks_on(saved: Config, config: Config) -> list[str]:
    """Return remarks for the user about a run that starts from a checkpoint. There is one for each changed model setting with
    which the same weights compute other outputs.

    A new adapter and new blocks get no remark, because they change no output before they are trained. A setting that changes
    the shape of a weight gets an error later, when the weights are loaded. ``saved``: config of the checkpoint; ``config``:
    config of the new run.
    """
    adds = saved.model.adapter == "none"
    known = {*_SAME_FUNCTION, *(("model.num_layers",) if config.train.new_blocks else ())}
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in known and not (adds and name.startswith(_ADAPTER))
    ]


def lineage(config: Config) -> list[str]:
    """Return the URLs of the checkpoints that a run of ``config`` descends from: the checkpoint that it starts from, then the
    one that the first one's run started from, and so on. The list ends at a run that is gone or cannot be read."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = Run(split(url)[0])
        before, _ = config_or_problem(run) if run.folder.exists(RUN_CONFIG) else (None, "")
        url = before.train.start_from if before else ""
    return found
