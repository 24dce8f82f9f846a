"""Targets: what a run's folder holds. Checkpoints, leases, marks, journal, config, the note of its MLflow run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from random import Random

import torch
from torch import nn

from fuzz.events import example
from fuzz.target import TOLD, Target, must
from springtide import config as configs
from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import (
    COMMITTED,
    Meta,
    StagedPiece,
    abandon,
    committed,
    marked_by,
    name_of,
    quarantine,
)
from springtide.checkpoint.fresh_start import has_ever_committed, newer_of_other_orders
from springtide.checkpoint.inspect import inspect
from springtide.checkpoint.load import load
from springtide.checkpoint.restore import restore
from springtide.checkpoint.retention import Rule, being_read, hold
from springtide.checkpoint.tensors import materialize, named_tensors, raw, type_name
from springtide.cli.options import _value
from springtide.config.fields import fields
from springtide.config.steps import StepsDone
from springtide.errors import CheckpointError
from springtide.events import EVENTS, Evaluated, Event, Sampled, Saved, Started, StepDone, Stopped, record
from springtide.run import control
from springtide.run.folder import Run
from springtide.run.report.run_page import render
from springtide.run.verify import read_history
from springtide.storage import Folder, digest
from springtide.tracking import journal as journal_module
from springtide.tracking.journal import Journal, last_steps, read_journal
from springtide.tracking.ledger import Prices, ledger

STEPS = (5, 10)


class Checkpoints(Target):
    """Two checkpoints of two ranks; the second refers to a file of the first."""

    name = "checkpoint"
    share = 6

    def make(self) -> None:
        run = Folder(self.root)
        term = leases.claim(run, "me").term
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        writers = [PieceWriter(run) for _ in range(2)]
        for step in STEPS:
            torch.manual_seed(step)
            tensors = self._tensors(*self._model(0.0))
            for name, tensor in tensors.items():
                if name != "model/frozen":
                    tensor.copy_(torch.randn(tensor.shape))
                else:
                    tensor.fill_(0.5)
            self.state[step] = {name: tensor.clone() for name, tensor in tensors.items()}
            meta = Meta(step=StepsDone(step), tokens=step, world_size=2, order_identity="o", config_fingerprint="c")
            for rank in (1, 0):
                pieces, data = self._part(tensors, rank)
                config = configs.recipes.tiny().model_dump(mode="json")
                job = CommitJob(run.url, term, rank, meta, config, pieces, Rule(3))
                view = memoryview(data)
                writers[rank].write(job, lambda one, view=view: view[one.begin :][: one.size_bytes], lambda: False)

    @staticmethod
    def _model(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        for name, shape in (("table", (6, 4)), ("bias", (8,)), ("frozen", (2, 4)), ("scale", ())):
            model.register_parameter(name, nn.Parameter(torch.full(shape, value)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @staticmethod
    def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        materialize(optimizer)
        return dict(named_tensors(model, optimizer))

    @staticmethod
    def _part(tensors: Mapping[str, torch.Tensor], rank: int) -> tuple[list[StagedPiece], bytes]:
        """Rank 0 has the first half of the rows, rank 1 the rest."""
        pieces, data = [], b""
        for name, tensor in tensors.items():
            whole = tuple(tensor.shape)
            if not whole:
                if rank:
                    continue
                begin, part = (), tensor
            else:
                half = whole[0] // 2
                begin = (half * rank, *([0] * (len(whole) - 1)))
                part = tensor[half:] if rank else tensor[:half]
            found = raw(part.contiguous()).numpy().tobytes()
            pieces.append(
                StagedPiece(name, type_name(tensor.dtype), whole, begin, tuple(part.shape), len(data), len(found))
            )
            data += found
        return pieces, data

    def kinds(self) -> Mapping[str, str]:
        found = {name: "json" for name in self.of(".json", COMMITTED) if name.startswith("checkpoints/")}
        return found | dict.fromkeys(self.of(".safetensors"), "bytes")

    def names(self) -> tuple[str, ...]:
        *_, folder, _ = self.changed.split("/")
        return (folder, *super().names())

    def sign(self, random: Random) -> None:
        self.is_signed = False
        if self.changed.endswith(".safetensors") or random.random() < 0.3:
            return
        self.is_signed = True
        folder = (self.root / self.changed).parent
        [manifest] = folder.glob("*-manifest.json")
        if "-r0" in self.changed:  # an index
            data = (self.root / self.changed).read_bytes()
            if random.random() < 0.5:
                data = self._with_digests(data)
                (self.root / self.changed).write_bytes(data)
            found = json.loads(manifest.read_bytes())
            found["files"][Path(self.changed).name] = {"size_bytes": len(data), "digest": digest.of_bytes(data)}
            manifest.write_text(json.dumps(found))
        if not self.changed.endswith(COMMITTED):
            marker = json.loads((folder / COMMITTED).read_bytes())
            marker["digest"] = digest.of_bytes(manifest.read_bytes())
            (folder / COMMITTED).write_text(json.dumps(marker))

    def _with_digests(self, data: bytes) -> bytes:
        """An index with the digest of what each of its pieces names."""
        try:
            index = json.loads(data)
            for piece in index["pieces"]:
                file, begin, size, _ = piece[5:]
                with (self.root / "checkpoints" / file).open(
                    "rb"
                ) as opened:  # which may be sparse, and larger than memory
                    opened.seek(begin)
                    piece[8] = [digest.of_bytes(opened.read(max(0, min(size, 2**20))))]
            return json.dumps(index).encode()
        except (ValueError, LookupError, TypeError, OSError, RecursionError):
            return data

    def change(self, random: Random) -> None:
        self.is_signed = False
        super().change(random)

    def read(self, random: Random) -> None:
        run = Folder(self.root)
        seen = inspect(run, verify=True)
        for one in seen:
            str(one), json.dumps(one.facts)
        found = [self._restored(run, value) for value in (3.0, -7.0)]
        must(found[0][0] == found[1][0], "another checkpoint the second time")
        step, tensors = found[0]
        for name, tensor in tensors.items():
            same = torch.equal(raw(tensor), raw(found[1][1][name]))
            must(same, f"SILENT CORRUPTION: {name} keeps what was in memory")
            if not self.is_signed:
                must(step in STEPS, f"step {step} was never committed")
                must(torch.equal(tensor, self.state[step][name]), f"SILENT CORRUPTION: {name} of step {step} is other")

    def _restored(self, run: Folder, value: float) -> tuple[int, dict[str, torch.Tensor]]:
        model, optimizer = self._model(value)
        tensors = self._tensors(model, optimizer)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(value)
        found = restore(run, model, optimizer, lambda step: "o")
        assert found is not None, "the run begins at step 0"
        must(found.name == name_of(found.meta.step), f"{found.name} is of step {found.meta.step}")
        for name, _ in found.rejected:
            must(name == self.changed.split("/")[-2], f"{name} is put in quarantine")
        for name in committed(run):  # each alone, as an evaluation loads it
            try:
                load(run, name, *self._model(value))
            except CheckpointError:
                must(name in self.names(), f"{name} cannot be loaded")
        newer_of_other_orders(run, lambda step: "o", go_back=True)
        return found.meta.step, named_tensors(model, optimizer)


class Leases(Target):
    """Leases of a driver and its worker groups."""

    name = "lease"
    share = 2

    def make(self) -> None:
        if not (child := os.fork()):  # a process that has ended holds nothing
            try:
                self._claim(Folder(self.root))
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    def names(self) -> tuple[str, ...]:
        return (*super().names(), "held by lease")  # to a group whose owner is another now

    @staticmethod
    def _claim(run: Folder) -> None:
        leases.claim(run, "one", trains=False)
        first = leases.claim(run, "one").term
        leases.note_commit(run, first)
        leases.claim(run, "one", again=True)
        leases.note_scratch(run, leases.claim(run, "two", trains=False).term)
        leases.claim(run, "two", again=True)

    def kinds(self) -> Mapping[str, str]:
        return dict.fromkeys(self.of(".json"), "json")

    def read(self, random: Random) -> None:
        run = Folder(self.root)
        has_ever_committed(run)
        leases.check(run, 5)
        must(leases.begun_at(run) == 4, "the request to begin at step 0 is lost")
        leases.losses(run)
        leases.has_trained(run, 5)
        str(leases.newest(run))
        leases.check_free(run)
        match random.randrange(3):
            case 0:
                found = leases.claim(run, "two", again=True)
            case 1:
                found = leases.claim(run, "three", trains=False)
            case _:
                found = leases.claim(run, "two", trains=False)
        must(found.term > 5 or self.what == "gone", f"lease {found.term} is taken again")
        must(leases.newest(run) == found, "another lease is the newest")


class Controls(Target):
    """Commands to a run and their results."""

    name = "control"

    def make(self) -> None:
        run = Folder(self.root)
        leases.claim(run, "me", trains=False)
        for number, (verb, workers) in enumerate((("resize", 3), ("pause", 0), ("save", 0))):
            control.give(run, verb, workers)  # type: ignore[arg-type]
            control.write_result(run, control.CommandResult(number=number, done=True, step=number, text="done"))

    def kinds(self) -> Mapping[str, str]:
        return {name: "json" for name in self.of(".json") if name.startswith("control/")}

    def read(self, random: Random) -> None:
        run = Folder(self.root)
        found = control.standing(run)
        must(found.following == 3, "the next command would have the number of another")
        must(found.workers in range(10**6 + 1), "a limit that is not a number of workers")
        for number in range(3):
            control.read_command(run, number)
            control.read_result(run, number)


class Notes(Target):
    """Notes of quarantined and abandoned checkpoints, of readers and branches."""

    name = "note"

    def make(self) -> None:
        self.run = Folder(self.root)
        quarantine(self.run, "step-0000000005", "its bytes differ", 3)
        abandon(self.run, ["step-0000000010"], "another order", 2)
        hold(self.run, "step-0000000005", "branch")

    def kinds(self) -> Mapping[str, str]:
        return dict.fromkeys(self.before, "json")

    def names(self) -> tuple[str, ...]:
        *_, folder, _ = self.changed.split("/")
        return (folder, *super().names())

    def read(self, random: Random) -> None:
        run = Folder(self.root)
        for one in inspect(run):
            str(one)
        marked_by(run, "step-0000000005", "QUARANTINED")
        marked_by(run, "step-0000000010", "ABANDONED")
        being_read(run)


class JournalFiles(Target):
    """Every kind of event, in segments of three leases."""

    name = "journal"
    share = 4

    def make(self) -> None:
        run = Run(Folder(self.root))
        run.write_config(configs.recipes.tiny().override({"run.id": "it"}))
        for term in (1, 2, 3):
            with Journal(run.folder, term=term) as journal:
                journal(example(Started, 10 * term))
                for step in range(10 * term, 10 * term + 5):
                    journal(example(StepDone, step))
                for kind in EVENTS.values() if term == 2 else (Saved, Evaluated, Sampled, Stopped):
                    journal(example(kind, 10 * term + 5))

    def kinds(self) -> Mapping[str, str]:
        return dict.fromkeys(self.of(".jsonl"), "lines")

    def change(self, random: Random) -> None:
        super().change(random)
        journal_module._TOLD.clear()  # each process warns once of a line

    def read(self, random: Random) -> None:
        run = Run(Folder(self.root))
        events = read_journal(run.folder)
        self._check_kept(events)
        for one in events:
            one.describe()
            json.dumps(record(one))
        steps = [one.step for one in last_steps(events)]
        must(steps == sorted(set(steps)), "steps are out of order")
        str(ledger(events, Prices(1.0, 2.0)))
        for look in ("status", "finished", "last_step", "sample", "evaluations", "starts"):
            getattr(run, look)
        read_history(run.folder)
        timeline = run.timeline
        must(len(timeline.tries) + len(timeline.events) == len(events), "columns and events differ")
        run.why().as_dict()
        if random.random() < 0.02:  # it draws charts
            render(run.id, timeline)

    def _check_kept(self, events: list[Event]) -> None:
        """Each line that is as it was written is an event; where one is not, the log names the segment."""
        kept = [(one.kind, getattr(one, "step", None), one.term) for one in events]
        path = self.root / self.changed
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() and self.what == "lines" else []
        written = set(self.before[self.changed].splitlines())
        for line in lines:
            if line in written:
                one = json.loads(line)
                must((one["kind"], one["step"], one["term"]) in kept, f"a good line is not read: {line[:80]!r}")
        others = sum(len(self.before[name].splitlines()) for name in self.kinds() if name != self.changed)
        if len(lines) + others > len(events) and any(lines):
            told = any(Path(self.changed).name in line for line in TOLD.lines)
            must(told, "a line is left out, and nobody is told")


class Configs(Target):
    """A run's config.yaml, and values as the command line gives them."""

    name = "config"
    share = 4

    def make(self) -> None:
        changes = {
            "run.id": "it",
            "stream.mixture": {"web": "datasets/web", "code": "datasets/code"},
            "stream.weights": [{"from_step": 0, "shares": {"web": 0.5, "code": 0.5}}],
            "stream.skip": [3, 4],
            "track.mlflow_uri": "postgresql://ml:hunter2@host/db",
        }
        Run(Folder(self.root)).write_config(configs.recipes.tiny().override(changes))

    def kinds(self) -> Mapping[str, str]:
        return {configs.RUN_CONFIG: "yaml"}

    def names(self) -> tuple[str, ...]:
        return (*super().names(), *(f"{name} = " for name in self.fields), *self.fields)

    fields: tuple[str, ...] = ()

    def change(self, random: Random) -> None:
        super().change(random)
        self.fields = ()
        self.changes: dict[str, str] = {}
        if random.random() < 0.4:
            self.restore()
            self.what = "override"
            for name in random.sample(list(fields()), random.choice((1, 1, 2, 3))):
                self.changes[name] = self._text(random, name)
            self.fields = tuple(self.changes)

    def _text(self, random: Random, name: str) -> str:
        from fuzz import mutations

        value = configs.flatten(configs.recipes.tiny())[name]
        found = mutations.change_value(random, value)
        text = found if isinstance(found, str) else json.dumps(found)
        for mark, texts in mutations._RAW.items():
            text = text.replace(f'"{mark}"', random.choice(texts)).replace(mark, random.choice(texts))
        return random.choice(
            (text, text, text + random.choice(("k", "M", "e999", " MiB", "{", "]")), f"[{text}", f"{{a: {text}}}")
        )

    def read(self, random: Random) -> None:
        path = self.root / configs.RUN_CONFIG
        config = configs.load_config(path, trust_code=True)
        must(Run(Folder(self.root)).config == config, "the run has another config")
        if self.changes:
            config = config.override({name: _value(name, text) for name, text in self.changes.items()})
        must(configs.parse(configs.dump(config).encode()) == config, "it does not survive its file")
        json.dumps(configs.flatten(config), allow_nan=False)
        configs.fingerprint(config)
        configs.difference(config, configs.recipes.tiny())
        must("hunter2" not in configs.dump(configs.redact(config)), "a password is shown")
        must(config.num_steps >= 0, "a negative number of steps")
        config.tokens_after(config.num_steps)


TARGETS: tuple[type[Target], ...] = (Checkpoints, Leases, Controls, Notes, JournalFiles, Configs)
