"""What the proof of a run finds, from a journal and checkpoints that are written here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared import prepare

from springtide.checkpoint import leases
from springtide.checkpoint.commit import CommitJob, PieceWriter
from springtide.checkpoint.format import Meta, checkpoints
from springtide.checkpoint.retention import Rule
from springtide.cli.main import main
from springtide.config import Config
from springtide.config.steps import OrderStep, StepsDone
from springtide.events import Event, Started, StepDone, Stopped
from springtide.run.folder import Run
from springtide.run.verify import ChainMismatch, TokenMismatch, Verification
from springtide.shards import signed
from springtide.storage import Folder
from springtide.stream import Data, digest, open_data
from springtide.stream.chain import SKIPPED_UPDATES_KEPT, next_chain
from springtide.tracking.journal import Journal
from springtide.training.losses import loss_mask

ZEROS = dict.fromkeys(
    ("loss", "grad_norm", "learning_rate", "step_time_s", "data_wait_s", "tokens_per_s", "mfu", "memory_bytes"), 0
)


class Model:
    """A model that is trained here by arithmetic: its steps, and what becomes of them."""

    def __init__(self, config: Config, run: str = "proven", data: Data | None = None) -> None:
        self.config, self.run = config, Run(Folder(config.run.root) / run)
        self.run.write_config(config)
        self.data = data or open_data(config.data)
        self.term = leases.claim(self.run.folder, "me").term
        self.step, self.tokens, self.chain = 0, 0, ""
        self.skipped_updates: tuple[OrderStep, ...] = ()

    def train(self, steps: int = 1, *, updated: bool = True, tokens: int = 0) -> list[StepDone]:
        """What is told of the next steps; ``tokens``: those that count, if not all."""
        told = []
        for _ in range(steps):
            order = self.data.order
            step = order.step_after(StepsDone(self.step))
            ids = order.batch(step)
            counted = tokens or int(loss_mask(torch.from_numpy(signed(self.data.rows(ids)[1]))).sum())
            self.step, self.tokens = self.step + 1, self.tokens + counted
            self.chain = next_chain(self.chain, step, digest(ids), counted, updated)
            self.skipped_updates += () if updated else (step,)
            figures = {"tokens": self.tokens, "step_tokens": counted, "world_size": 1, "updated": updated}
            told.append(StepDone(step=StepsDone(self.step), digest=f"{digest(ids):016x}", **figures, **ZEROS))
        return told

    def started(self, **changes: Any) -> Started:
        """What a worker group says that begins here."""
        found = Started(
            step=StepsDone(self.step),
            world_size=1,
            order_identity=self.data.order.identity,
            chain=self.chain,
            skipped_updates=list(self.skipped_updates[-SKIPPED_UPDATES_KEPT:]),
        )
        return dataclasses.replace(found, **changes)

    def save(self, **changes: Any) -> str:
        """Commit a checkpoint of now; returns its URL."""
        meta = Meta(
            step=self.step,
            tokens=self.tokens,
            chain=self.chain,
            skipped_updates=self.skipped_updates[-SKIPPED_UPDATES_KEPT:],
            world_size=1,
            order_identity=self.data.order.identity_at(StepsDone(self.step)),
            config_fingerprint="c",
            tokenizer_digest=self.data.tokenizer_digest,
        ).model_copy(update=changes)
        url = self.run.folder.url
        job = CommitJob(url, self.term, 0, meta, self.config.model_dump(mode="json"), [], Rule(9))
        PieceWriter(self.run.folder).write(job, lambda _: memoryview(b""), lambda: False)
        return f"{url}/checkpoints/step-{self.step:010d}"

    def verify(self, *events: Event) -> Verification:
        """The proof of the run whose journal has these events."""
        with Journal(self.run.folder) as journal:
            for event in events:
                journal(event)
        return self.run.verify()


@pytest.fixture
def model(tiny: Config) -> Model:
    return Model(tiny)


def test_a_journal_that_ends_before_the_last_start_is_no_proof_of_the_steps_between(model: Model) -> None:
    told = [model.started(), *model.train(5)]
    model.train(5)
    found = model.verify(*told, model.started(chain="", skipped_updates=[]), Stopped(step=10, status="finished"))
    assert not found.ok
    assert found.missing == (6, 7, 8, 9, 10)
    assert (found.steps_checked, found.steps_proven_by_chain) == (5, 0)


def test_a_checkpoint_beyond_the_journal_proves_its_steps_or_finds_that_they_are_others(model: Model) -> None:
    told = [model.started(), *model.train(5)]
    model.train(5)
    model.save()
    found = model.verify(*told)
    assert found.ok
    assert (found.steps_checked, found.steps_proven_by_chain, found.steps_proven_by_chain_alone) == (10, 10, 5)
    assert (found.checkpoints_checked, found.missing) == (1, ())
    model.data = model.data.skipping([OrderStep(11)])  # which the order of its config does not skip
    model.train(2)
    model.save()
    found = model.verify()
    assert not found.ok
    [wrong] = found.chain_mismatches
    assert (wrong.step, wrong.after, wrong.where, wrong.found) == (12, 10, "step-0000000012", model.chain)
    assert found.missing == (11, 12)
    assert (found.steps_proven_by_chain, found.checkpoints_checked) == (10, 2)


def test_a_checkpoint_that_cannot_be_read_is_a_record_of_its_steps_and_no_proof(model: Model) -> None:
    told = [model.started(), *model.train(5)]
    model.save()
    model.train(5)
    url = Folder(model.save())
    url.write("COMMITTED", b"{}")
    found = model.verify(*told)
    assert not found.ok
    assert (found.checkpoints_checked, found.checkpoints_unread) == (1, (url.name,))
    assert found.missing == (6, 7, 8, 9, 10)


def test_steps_that_a_killed_driver_did_not_write_are_proven_by_the_state_that_lived_on(model: Model) -> None:
    """The snapshots in memory outlive a driver that is killed before its journal is in the store."""
    told: list[Event] = [model.started(), *model.train(5)]
    model.train(5)
    found = model.verify(*told, model.started(), *model.train(2))
    assert found.ok
    assert (found.missing, found.mismatches, found.chain_mismatches) == ((), (), ())
    assert (found.steps_checked, found.steps_proven_by_chain, found.steps_proven_by_chain_alone) == (12, 10, 5)


def test_a_state_of_memory_that_is_not_of_the_order_is_found(model: Model) -> None:
    told: list[Event] = [model.started(), *model.train(5)]
    model.train(5, tokens=100)
    found = model.verify(*told, model.started(term=3), *model.train(2))
    assert not found.ok
    [wrong] = found.chain_mismatches
    assert (wrong.step, wrong.after, wrong.where) == (10, 0, "start of term 1")
    assert found.missing == (6, 7, 8, 9, 10)


def test_half_of_a_step_s_tokens_is_found(model: Model) -> None:
    length = model.data.sequence_length
    told = [model.started(), *model.train(2), *model.train(tokens=6 * length), *model.train()]
    found = model.verify(*told)
    assert not found.ok
    assert found.token_mismatches == (TokenMismatch(3, 12 * length, 6 * length),)
    assert not found.mismatches
    model.save()
    found = model.verify()
    [wrong] = found.chain_mismatches
    assert (wrong.step, wrong.after) == (4, 0)


def test_a_damaged_line_with_a_step_that_the_run_cannot_have_is_told_at_once(model: Model) -> None:
    """Its steps, a million million, would be recomputed for years."""
    *good, last = model.train(6)
    far = StepsDone(10**12)
    found = model.verify(*good, last, dataclasses.replace(last, step=far), model.started(step=far))
    assert (found.ok, found.steps_proven_by_chain, found.missing) == (False, 0, ())
    assert [(one.step, one.expected, one.found) for one in found.mismatches] == [(far, "", last.digest)]
    assert [(one.step, one.expected) for one in found.chain_mismatches] == [(far, "")]


def test_updates_that_were_skipped_are_known_without_the_journal(model: Model) -> None:
    told = [model.started(), *model.train(2), *model.train(updated=False), *model.train()]
    model.train(3, updated=False)
    model.save()
    model.train(updated=False)
    assert model.verify(*told, model.started()).ok
    model.save(skipped_updates=())
    found = model.verify()
    assert [(one.step, one.where) for one in found.chain_mismatches] == [(8, "step-0000000008")]


def test_updates_older_than_a_state_lists_are_those_of_the_journal(tiny: Config) -> None:
    tiny = tiny.override({"stream.global_batch": 2, "stream.lanes": 2})
    model = Model(tiny)
    told = [model.started(), *model.train(), *model.train(updated=False), *model.train()]
    told += model.train(SKIPPED_UPDATES_KEPT, updated=False)
    model.save()
    assert len(model.skipped_updates) == SKIPPED_UPDATES_KEPT + 1
    found = model.verify(*told)
    assert found.ok
    assert found.steps_proven_by_chain == SKIPPED_UPDATES_KEPT + 3


def test_a_history_that_was_given_up_is_not_the_model_s(model: Model) -> None:
    """A rollback from step 8 to 5, after a restart at 7: the start at 7 and the steps after 5 are of the order before it."""
    told: list[Event] = [model.started(), *model.train(5)]
    kept = dataclasses.replace(model.started())
    told += [*model.train(2), model.started(), *model.train()]
    model.step, model.chain = kept.step, kept.chain
    model.data = model.data.skipping([OrderStep(6), OrderStep(7)])
    model.run.write_config(model.config.override({"stream.skip": [6, 7]}))
    found = model.verify(*told, model.started())
    assert found.ok
    assert (found.steps_checked, found.steps_abandoned, found.steps_trained_again) == (5, 3, 0)
    told = model.train(4)  # type: ignore[assignment]
    model.save()
    found = model.verify(*told)
    assert found.ok
    assert (found.steps_checked, found.steps_abandoned, found.steps_trained_again) == (9, 3, 3)
    assert found.steps_proven_by_chain == 9


def test_steps_that_a_restart_went_back_on_are_checked_once_they_are_trained_again(model: Model) -> None:
    told: list[Event] = [model.started(), *model.train(5)]
    kept = model.started()
    told += [*model.train(3)]
    model.step, model.chain = kept.step, kept.chain
    found = model.verify(*told, model.started())
    assert (found.steps_checked, found.steps_abandoned, found.steps_trained_again) == (5, 3, 0)
    found = model.verify(*model.train(2))
    assert found.ok
    assert (found.steps_checked, found.steps_abandoned, found.steps_trained_again) == (7, 1, 2)


def test_a_branch_goes_on_from_the_chain_of_its_trunk(tiny: Config) -> None:
    trunk = Model(tiny, "trunk")
    trunk.train(4)
    url = trunk.save()
    model = Model(tiny.override({"train.start_from": url}), "branch", trunk.data)
    model.step, model.chain = trunk.step, trunk.chain
    told = [model.started(), *model.train(3)]
    model.save()
    found = model.verify(*told)
    assert found.ok
    assert (found.steps_checked, found.steps_proven_by_chain) == (3, 3)
    trunk.chain = "0" * 32
    checkpoints(trunk.run.folder).remove(f"step-{4:010d}")
    assert model.verify().ok  # the trunk is gone: what the branch said at its start is taken
    trunk.save()
    [wrong] = [one for one in model.verify().chain_mismatches if one.step == 4]
    assert wrong == ChainMismatch(4, 4, "start of term 1", "0" * 32, told[0].chain)  # type: ignore[attr-defined]


def test_weights_of_another_run_begin_an_empty_chain(tiny: Config) -> None:
    trunk = Model(tiny, "trunk")
    trunk.train(4)
    changes = {"train.start_from": trunk.save(), "train.start_with": "weights"}
    model = Model(tiny.override(changes), "tuned", trunk.data)
    told = [model.started(), *model.train(3)]
    model.save()
    found = model.verify(*told)
    assert found.ok
    assert found.steps_proven_by_chain == 3


@pytest.fixture
def masked(tiny: Config, poems: str, datasets: Path) -> Model:
    """A run of rows that hold different numbers of tokens that count."""
    changes = {"shards.packing": "best_fit", "shards.mask_across_documents": True, "shards.dataset": ""}
    changes |= {"corpus.source": str(datasets / "parts"), "corpus.near_duplicates": False}
    return Model(prepare(tiny.override(changes)))


def test_masked_tokens_are_counted_in_the_rows_where_the_journal_lacks_them(masked: Model) -> None:
    told = masked.train(40)
    assert len({one.step_tokens for one in told}) > 1
    masked.save()
    begun = Started(step=StepsDone(0), world_size=1, order_identity=masked.data.order.identity)
    found = masked.verify(begun, *told[:20], *told[30:])
    assert found.ok
    assert (found.steps_proven_by_chain, found.steps_proven_by_chain_alone) == (40, 10)


def test_masked_tokens_are_counted_in_the_rows_of_a_sample_of_steps(masked: Model) -> None:
    found = masked.verify(masked.started(), *masked.train(), *masked.train(tokens=300), *masked.train(6))
    assert not found.ok
    [wrong] = found.token_mismatches
    assert (wrong.step, wrong.found) == (2, 300)


@pytest.fixture
def shown(model: Model, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit status and output of ``springtide verify`` after more events."""

    def verify(*events: Event) -> tuple[int, str]:
        model.verify(*events)
        return main(["verify", model.run.folder.url]), capsys.readouterr().out

    return verify


def test_the_command_says_what_the_chain_proves(model: Model, shown: Callable[..., tuple[int, str]]) -> None:
    told: list[Event] = [model.started(), *model.train(2)]
    model.train(2)
    model.save()
    status, out = shown(*told)
    assert status == 0
    assert "the chain of the training state proves 4 steps, in 1 checkpoint; 2 of them are not in the journal" in out
    model.train(tokens=1)
    model.save()
    status, out = shown()
    assert status == 1
    assert re.search(r"step-0000000005: other steps 5 to 5: chain expected [0-9a-f]{32}, found [0-9a-f]{32}", out)
    assert "neither in the journal nor proven by a chain: [5]" in out
    status, out = shown(*model.train(tokens=7))
    assert re.search(r"step 6: \d+ tokens expected, found 7", out)
