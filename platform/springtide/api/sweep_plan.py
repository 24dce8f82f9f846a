"""What decides the points and the trials of a sweep; a resumed sweep must be started with the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from springtide import config as configs
from springtide.config import Config
from springtide.config.fields import fields, mark
from springtide.config.renames import ADDED_SETTINGS, current, lost, newest_name
from springtide.errors import ConfigError, RunExists, explain
from springtide.storage import to_json
from springtide.tune import Budget, Sweep, SweepFolder
from springtide.tune.space import WEIGHT

_OF_POINTS = ("search", "seed", "space")
_OF_TRIALS = ("train.total", "train.eval_every")
"""Settings that a trial takes from the budget."""
_OF_VALUES = ("train.eval_tokens",)
"""Settings that a run may change, but trials whose values are compared may not."""


def plan_of(base: Config, table: Sweep, search: str, seed: int) -> dict[str, Any]:
    """Return the plan of a new sweep, as ``sweep.json`` has it.

    >>> from springtide.tune import read
    >>> base = configs.recipes.tiny()
    >>> budget = {"trials": 4, "tokens_per_trial": 40 * base.tokens_per_step}
    >>> space = {"optim.peak_lr": ("uniform", 0.01, 0.02)}
    >>> table = read({"SPACE": space, "OBJECTIVE": {"metric": "loss", "mode": "min"}, "BUDGET": budget}, base)
    >>> plan = plan_of(base, table, "random", seed=0)
    >>> sorted(plan), plan["base"]["stream.seed"], "optim.peak_lr" in plan["base"]
    (['base', 'distinct', 'search', 'seed', 'space'], 0, False)
    """
    plan = {"search": search, "seed": seed, "space": [dataclasses.asdict(one) for one in table.space]}
    tried = {WEIGHT.rstrip(".") if one.field.startswith(WEIGHT) else one.field for one in table.space}
    counts = {name for name, field in fields().items() if mark(field) != "free"} | {*_OF_VALUES}
    counts -= {*_OF_TRIALS, *tried}
    shown = configs.flatten(configs.redact(base))
    settings = {name: value for name, value in shown.items() if name in counts}
    return {**plan, "distinct": True, "base": settings}


def started_with(folder: SweepFolder, plan: dict[str, Any], resume: bool | Literal["auto"]) -> dict[str, Any]:
    """Return the plan that counts: of an earlier start if there was one, else ``plan``.

    Raises RunExists if there was an earlier start but not ``resume``; ConfigError if ``resume`` is True but there was none, or
    if it had another space, search, seed, or base, or a retired setting without which its trials train something else.
    """
    earlier = _under_new_names(folder.plan())
    if earlier is not None and not resume:
        raise RunExists(f"the sweep {folder.url} exists; continue it with --resume, or choose another --name")
    if resume is True and earlier is None:
        raise ConfigError(
            explain("--name", folder.name, f"is not a sweep in {folder.url.rpartition('/')[0]}", "omit --resume")
        )
    if earlier is None:
        return plan
    now, remedy = json.loads(to_json(plan)), "use the same ones, or another name"
    if any(earlier.get(key) != now[key] for key in _OF_POINTS):
        problem = "was started with another space, --search or --seed"
        raise ConfigError(explain("--name", folder.name, problem, remedy))
    if changed := _changed(earlier.get("base"), now["base"]):
        raise ConfigError(explain("--name", folder.name, f"was started with other settings: {changed}", remedy))
    return earlier


def check_finalists(folder: SweepFolder, budget: Budget) -> None:
    """Raise ConfigError if finalists were chosen under another BUDGET.trials or BUDGET.seeds, which number their repeats: other
    trials would be taken for them."""
    chosen = folder.finalists(budget)
    for name in ("trials", "seeds") if chosen else ():
        before, now = getattr(chosen, name), getattr(budget, name)
        if now != before:
            limit = f"was {before} when the finalists were chosen"
            raise ConfigError(explain(f"BUDGET.{name}", now, limit, "use that, or start a sweep with another --name"))


def _under_new_names(plan: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the plan of an earlier start under the names that settings have now, without retired ones. Raises ConfigError for
    one that changed the training."""
    base, space = (plan or {}).get("base"), (plan or {}).get("space")
    if plan is not None and isinstance(base, dict):
        sections: dict[str, dict[str, Any]] = {}
        for name, value in base.items():
            section, _, field = name.partition(".")
            sections.setdefault(section, {})[field] = value
        if problems := lost(sections):
            raise ConfigError("\n".join(problems))
        named = {
            f"{section}.{field}": value for section, of in current(sections).items() for field, value in of.items()
        }
        plan = {**plan, "base": named}
    if plan is not None and isinstance(space, list):
        ranges = [{**one, "field": newest_name(str(one.get("field")))} for one in space if isinstance(one, dict)]
        plan = {**plan, "space": ranges}
    return plan


def _changed(before: object, now: Mapping[str, Any]) -> str:
    """Return, as text, which settings of the base differ. A sweep from before they were recorded has none. One that was added
    since was at the value that changes nothing."""
    known = {**ADDED_SETTINGS, **before} if isinstance(before, Mapping) else {}
    differ = [name for name in now if name in known and known[name] != now[name]]
    return "; ".join(f"{name} was {known[name]!r}, is {now[name]!r}" for name in differ)
