"""Datasets that a run takes up while it is trained: those of the index that ``stream.follow`` names.

    start of the run -> entries of the index that no record has -> a record: datasets, shares, the step from which they are read
    config + records -> stream.mixture and stream.weights

A record is written once, under the run's lease, before a step that it decides is trained; it never changes. So which rows a
step reads follows from the config and the records, on any number of workers and after any restart.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from springtide.checkpoint.format import step_of
from springtide.config import Config
from springtide.config.data import WHOLE
from springtide.config.steps import OrderStep, StepsDone, step_after
from springtide.errors import ConfigError, damaged, explain
from springtide.run.folder import Run
from springtide.shards import TRAIN, load_manifest, read_index
from springtide.store import Folder, to_json

_FIELD, _RECORDS = "stream.follow", "followed"


class TakeUp(BaseModel):
    """Datasets that are read from a step on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    number: int = Field(ge=0)
    from_step: int = Field(ge=0)
    """First step of the order that reads them [steps]."""
    datasets: dict[str, str]
    """Name -> URL, in the order of the index."""
    digests: dict[str, str]
    """Name -> digest of its manifest."""
    shares: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """Weight of every corpus from that step on."""

    @model_validator(mode="after")
    def _check(self) -> TakeUp:
        if self.datasets.keys() != self.digests.keys():
            raise ValueError("datasets and digests have other names")
        return self


_TAKE_UP: TypeAdapter[TakeUp] = TypeAdapter(TakeUp)


def read_take_ups(run: Folder) -> list[TakeUp]:
    """Return the records of a run, in order. Raises DamagedFile for one that is damaged."""
    folder, found = run / _RECORDS, list[TakeUp]()
    for name in sorted(folder.names(), key=len):  # 10000.json is after 9999.json
        record = folder.read_as(name, _TAKE_UP)
        if (record.number, _file(record)) != (len(found), name):
            raise damaged(folder.where(name), f"is record {record.number}, and {len(found)} stand before it")
        found.append(record)
    return found


def write_take_up(run: Folder, record: TakeUp) -> None:
    """Append a record. FileExistsError if another process has meanwhile."""
    (run / _RECORDS).create(_file(record), to_json(record.model_dump(mode="json")).encode())


def _file(record: TakeUp) -> str:
    return f"{record.number:04d}.json"


def followed(config: Config, run: Run) -> tuple[Config, TakeUp | None]:
    """Return ``config`` with the datasets that the run has taken up and takes up now, and the record of the latter, which is
    not written yet; None if nothing is new.

    Raises:
        ConfigError: the index has no dataset and the config names none, other weights begin later, or a dataset is not what
            it was.
    """
    if not config.stream.follow:
        return config, None
    _check(config)
    past = read_take_ups(run.folder)
    for name, url, sealed in ((name, one.datasets[name], one.digests[name]) for one in past for name in one.datasets):
        if load_manifest(Folder(url)).digest != sealed:
            raise ConfigError(explain(_FIELD, url, f"is not the dataset that {run.id} reads as {name}", "restore it"))
    given = config.stream.mixture or ({WHOLE: config.shards.dataset} if config.shards.dataset else {})
    known = {name for one in past for name in one.datasets}
    base = {name: url for name, url in given.items() if name not in known}
    root = Folder(config.stream.follow)
    new = read_index(root)[len(known) :]
    record = None
    if new:
        names = {f"followed-{entry.number:04d}": entry for entry in new}
        shares = dict(past[-1].shares) if past else _shares(config, base)
        urls = {**base, **{name: url for one in past for name, url in one.datasets.items()}}
        fresh = {name: f"{root.url}/{entry.dataset}" for name, entry in names.items()}
        record = TakeUp(
            number=len(past),
            from_step=_next_step(config, run),
            datasets=fresh,
            digests={name: entry.digest for name, entry in names.items()},
            shares={**shares, **_by_rows(shares, urls, fresh)},
        )
    records = [*past, *([record] if record else [])]
    if not records and not base:
        problem = "has no dataset yet, and the config names none"
        raise ConfigError(
            explain(_FIELD, config.stream.follow, problem, "run `springtide data prepare --follow` first")
        )
    return _applied(config, base, records), record


def _check(config: Config) -> None:
    if config.stream.epoch_caps:
        problem = "are computed for all steps before the first, and stream.follow adds text later"
        raise ConfigError(
            explain("stream.epoch_caps", dict(config.stream.epoch_caps), problem, "leave one of them out")
        )


def _shares(config: Config, base: dict[str, str]) -> dict[str, float]:
    """Return the weights of what the config names: its own, or the rows of each dataset."""
    if config.stream.weights:
        return dict(config.stream.weights[-1].shares)
    return {name: float(_rows(url)) for name, url in base.items()}


def _by_rows(shares: dict[str, float], urls: dict[str, str], fresh: dict[str, str]) -> dict[str, float]:
    """Return the weights of new datasets: a row of theirs weighs as much as one of those before, on average."""
    read = {name for name in urls if any(one.partition("/")[0] == name and weight for one, weight in shares.items())}
    rows = sum(_rows(urls[name]) for name in read)
    a_row = sum(shares.values()) / rows if rows else 1.0
    return {name: _rows(url) * a_row for name, url in fresh.items()}


def _rows(url: str) -> int:
    return sum(splits[TRAIN].rows for splits in load_manifest(Folder(url)).sources.values() if TRAIN in splits)


def _next_step(config: Config, run: Run) -> int:
    """Return the first step of the order that nothing of the run was trained on."""
    saved = [step_of(name) or 0 for name in run.checkpoints]
    done = max([run.last_step, *saved])
    return int(step_after(StepsDone(done), map(OrderStep, config.stream.skip))) if done else 0


def _applied(config: Config, base: dict[str, str], records: list[TakeUp]) -> Config:
    """Return ``config`` with the datasets and weights of ``records`` after its own."""
    if not records:
        return config
    tables: dict[int, dict[str, Any]] = {}
    own = {one.from_step for one in records}
    for one in config.stream.weights:
        if one.from_step not in own and (one.from_step or one.from_tokens):
            problem = "begins later than the run, and would leave out what stream.follow takes up"
            raise ConfigError(explain("stream.weights", one.from_step, problem, "give one table, from step 0"))
        tables[one.from_step] = one.model_dump(mode="json")
    if base and 0 not in tables:
        tables[0] = {"from_step": 0, "shares": _shares(config, base)}
    for record in records:
        tables[record.from_step] = {"from_step": record.from_step, "shares": dict(record.shares)}
    mixture = base | {name: url for one in records for name, url in one.datasets.items()}
    changes = {"stream.mixture": mixture, "stream.weights": [tables[step] for step in sorted(tables)]}
    return config.override(changes)
