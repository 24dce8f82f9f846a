"""Targets: a sweep's folder, the note of an MLflow run, notices that a node goes away."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random

from fuzz.events import example
from fuzz.target import Target, must
from springtide import config as configs
from springtide.api.sweep import SweepReader
from springtide.events import Evaluated, Started, Stopped
from springtide.preemption.notices import (
    Notice,
    parse_aws_notice,
    parse_aws_rebalance,
    parse_azure_notice,
    parse_gcp_notice,
)
from springtide.storage import Folder
from springtide.tracking.journal import Journal
from springtide.tracking.ledger import Prices
from springtide.tracking.mlflow_client import RUN_FILE
from springtide.tune import Chosen, SweepFolder, TrialEnd, member_config, name_of, rank_trials, read, with_takeover

TINY = configs.recipes.tiny()
TABLE = read(
    {
        "SPACE": {"optim.peak_lr": ("log_uniform", 1e-4, 1e-1), "optim.warmup": ("uniform", 0, 10)},
        "OBJECTIVE": {"metric": "heldout_loss", "mode": "min"},
        "BUDGET": {"trials": 3, "tokens_per_trial": 40 * TINY.tokens_per_step, "rungs": 4, "seeds": 2, "finalists": 1},
    },
    TINY,
)
POINT = {"optim.peak_lr": 0.01, "optim.warmup": 3}


class Sweeps(Target):
    """A sweep of three trials."""

    name = "sweep"
    share = 3

    def make(self) -> None:
        folder = SweepFolder(Folder(self.root))
        folder.write_plan({"search": "random", "seed": 0, "space": [dataclasses.asdict(one) for one in TABLE.space]})
        for number in range(3):
            folder.write_point(number, POINT)
            config = member_config(TINY, TABLE.budget, name_of(number), POINT, "")
            run = folder.trials / name_of(number)
            run.write(configs.RUN_CONFIG, configs.dump(config))
            with Journal(run) as journal:
                for event in (Started, Evaluated, Stopped):
                    journal(example(event, 10))
        donor = f"{folder.url}/trials/trial-0001/checkpoints/step-0000000010"
        folder.write_lineage(2, with_takeover(2, folder.lineage(2, POINT), POINT, donor))
        folder.write_end(1, TrialEnd("failed", "its loss was not finite"))
        folder.write_finalists(Chosen([0], 3, 2))

    def names(self) -> tuple[str, ...]:
        return (super().names()[0].removesuffix(".json"),)

    def kinds(self) -> Mapping[str, str]:
        return {name: "json" for name in self.of(".json") if not name.startswith("trials/")}

    def read(self, random: Random) -> None:
        folder = SweepFolder(Folder(self.root))
        folder.plan()
        folder.ended()
        folder.finalists(TABLE.budget)
        reader = SweepReader(folder, TABLE, Prices())
        outcomes = reader.outcomes()
        for number, point in folder.points().items():
            for one in folder.lineage(number, point):
                member_config(TINY, TABLE.budget, one.run, one.point, "")
                where = Path(folder.trials.path, one.run).resolve()
                must(where.parent == Path(folder.trials.path).resolve(), f"a run outside the sweep: {one.run!r}")
        reader.interrupted(outcomes)
        reader.last_settled_rung([POINT, POINT, POINT])
        json.dumps(rank_trials(TABLE, outcomes).as_dict())


class MlflowNotes(Target):
    """Which MLflow run is this run's."""

    name = "mlflow"

    def make(self) -> None:
        from springtide.tracking.mlflow_client import write_run_note

        write_run_note(Folder(self.root), "0" * 32, "1")

    def kinds(self) -> Mapping[str, str]:
        return {RUN_FILE: "json"}

    def read(self, random: Random) -> None:
        from springtide.tracking.mlflow_client import read_run_note

        found = read_run_note(Folder(self.root))
        must(isinstance(found, str), f"the id of a run: {found!r}")
        must(found != "" or self.what != "json", "the run has no MLflow run any more")


class Notices(Target):
    """Answers of metadata services, and the file that a hook leaves."""

    name = "notice"
    share = 2

    def make(self) -> None:
        self.root.mkdir()
        (self.root / "aws").write_text(json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"}))
        (self.root / "rebalance").write_text(json.dumps({"noticeTime": "2026-11-21T08:22:00Z"}))
        (self.root / "gcp").write_text("TRUE")
        event = {"EventId": "1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["me"]}
        event |= {"EventStatus": "Scheduled", "NotBefore": "Sat, 21 Nov 2026 08:22:00 GMT", "Duration": -1}
        (self.root / "azure").write_text(json.dumps({"DocumentIncarnation": 1, "Events": [event]}))
        (self.root / "file").write_text("120")

    def kinds(self) -> Mapping[str, str]:
        return {"aws": "json", "rebalance": "json", "azure": "json", "gcp": "text", "file": "text"}

    place_share = 0.0

    def read(self, random: Random) -> None:
        from springtide.preemption import NoticeSource, left_in

        path, heard = self.root / self.changed, list[Notice]()
        text = path.read_bytes().decode("utf-8", "replace")
        ask = {
            "aws": lambda: parse_aws_notice(text),
            "rebalance": lambda: parse_aws_rebalance(text),
            "gcp": lambda: parse_gcp_notice(text, 0.0),
            "azure": lambda: parse_azure_notice(text, "me", 0.0),
            "file": lambda: left_in(path),
        }[self.changed]
        try:
            ask()
        except ValueError as error:
            must(len(str(error)) < 1000, "a long message")
        source = NoticeSource(self.changed, ask, heard.append)
        source.look()
        for one in heard:
            must(isinstance(one.at_s, float) and abs(one.at_s) < 1e12, f"a notice at {one.at_s!r}")
            must(isinstance(one.why, str), f"a reason that is no text: {one.why!r}")


TARGETS: tuple[type[Target], ...] = (Sweeps, MlflowNotes, Notices)
