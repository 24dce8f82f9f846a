"""Learning from labels: the same bits at any world size, as plain torch says, and never from labels of something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled import plain_log_probabilities, teacher
from loops import every_tensor, train
from ranks import run_here

from springtide.api.label import label
from springtide.api.resolve import resolve
from springtide.checkpoint.format import Meta, read_manifest
from springtide.checkpoint.fresh_start import newer_of_other_orders
from springtide.checkpoint.load import read_pieces
from springtide.checkpoint.restore import Restored
from springtide.config import Config
from springtide.errors import CheckpointError, ConfigError, CorpusError, CorruptShard
from springtide.events import Event, StepDone
from springtide.model.objective import Objective, divergence
from springtide.planning.step_memory import predicted_bytes
from springtide.run.find import find_run
from springtide.shards import LabelLayout, ids_of, load_labels
from springtide.storage import Folder
from springtide.stream import RankReader, load, open_data
from springtide.training.evaluate import evaluate_checkpoint
from springtide.training.start_check import check_objective
from springtide.training.teacher import Teacher

pytestmark = pytest.mark.distributed
Ranks = Callable[..., list[Any]]
STEPS = 5


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, datasets: Path) -> Config:
    """A dataset of few rows and a run on it, the teacher; ``labels/best`` and ``labels/each`` beside its runs."""
    config = teacher(tmp_path_factory.mktemp("taught"), datasets)
    for what in ("topk", "logprob"):
        label(config.shards.dataset, f"{config.run.root}/teacher", what, labels(config, what), k=8)
    return config


def labels(config: Config, what: str = "topk") -> str:
    return f"{config.run.root}/../labels/{what}"


def student(taught: Config, name: str, **changes: Any) -> Config:
    step = taught.tokens_per_step
    fixed = {"run.id": name, "parallel.reduction": "fp64", "stream.lanes": 6, "train.total": STEPS * step}
    fixed |= {"train.micro_batch": 2, "model.init_seed": 5, "objective.source": "distill"}
    fixed |= {"objective.labels": labels(taught), "objective.cross_entropy": 0.25}
    return taught.override({**fixed, **{key.replace("__", "."): value for key, value in changes.items()}})


def told(events: list[Event]) -> dict[int, tuple[float, dict[str, float]]]:
    return {one.step: (one.loss, one.extra) for one in events if isinstance(one, StepDone)}


def test_a_student_learns_the_same_bits_through_resizes(taught: Config, ranks: Ranks) -> None:
    whole = student(taught, "whole")
    expected = told(ranks(1, train, whole)[0])
    assert expected[STEPS][1]["objective/kl"] < 0.8 * expected[1][1]["objective/kl"]
    for loss, parts in expected.values():
        mixed = 0.75 * parts["objective/kl"] + 0.25 * parts["objective/cross_entropy"]
        assert loss == pytest.approx(mixed, abs=1e-6)
    resized, found = student(taught, "resized"), {}
    for world_size, stop_at in ((2, 2), (3, 4), (1, 0)):
        found |= told(ranks(world_size, train, resized, stop_at)[0])
    assert found == expected
    [state], [other] = ranks(1, every_tensor, whole), ranks(1, every_tensor, resized)
    assert other.keys() == state.keys()
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    plain = student(taught, "plain", objective__source="", objective__labels="", objective__cross_entropy=0.0)
    assert open_data(plain.data).order.batch(0).tolist() == open_data(whole.data).order.batch(0).tolist()


def test_the_loss_is_what_plain_torch_says(taught: Config, ranks: Ranks) -> None:
    """A model diverges from its own labels by rounding only; from those of another model by what all ids, binned, give."""
    itself = {
        "train__start_from": f"{taught.run.root}/teacher/checkpoints/step-0000000003",
        "train__start_with": "weights",
        "objective__cross_entropy": 0.0,
    }
    [first] = told(ranks(1, train, student(taught, "itself", **itself, train__total=768))[0]).values()
    assert abs(first[0]) < 1e-5
    config = student(taught, "other", objective__cross_entropy=0.0, train__total=768)
    [(loss, _)] = told(ranks(1, train, config)[0]).values()
    data = open_data(config.data)
    [batch] = load(RankReader(data, 0, 1), RankReader(data, 0, 1).plan(0, 1, 2**20))
    _, teacher_TLV = plain_log_probabilities(taught, f"{taught.run.root}/teacher", "train")
    student_TLV = initial_log_probabilities(config)
    rows = batch.sample_ids.astype(np.int64)
    total, count = 0.0, 0
    for row, wanted in zip(rows, batch.labels[:, 1:], strict=True):
        for place in np.flatnonzero(wanted != -100):
            best = torch.from_numpy(batch.columns["ids"][rows == row][0, place].astype(np.int64))
            p, q = (one[row, place].double().exp() for one in (teacher_TLV, student_TLV))
            p, q = (torch.cat([one[best], (one.sum() - one[best].sum())[None]]) for one in (p, q))
            total, count = total + float((p * (p / q).log()).sum()), count + 1
    assert loss == pytest.approx(total / count, abs=2e-4)


def initial_log_probabilities(config: Config) -> torch.Tensor:
    """What the student says before its first step, of each row to train on."""
    from springtide.model import build
    from springtide.shards import SplitReader, ids_of, load_manifest

    manifest = load_manifest(Folder(config.shards.dataset))
    reader = SplitReader(Folder(config.shards.dataset), manifest, "train")
    ids = ids_of(reader.read(np.arange(manifest.splits["train"].rows)).tokens)
    model = build(config.model, manifest.vocab_size, *manifest.document_ids)
    with torch.no_grad():
        return model(torch.from_numpy(ids[:, :-1].astype(np.int64))).log_softmax(-1)


def test_the_divergence_has_the_gradient_of_its_definition() -> None:
    torch.manual_seed(0)
    teacher_BLV, logits_BLV = torch.randn(2, 3, 12).log_softmax(-1), torch.randn(2, 3, 12, requires_grad=True)
    best = teacher_BLV.topk(4, dim=-1)
    divergence(logits_BLV.log_softmax(-1), best.indices, best.values).sum().backward()
    found, logits_BLV.grad = logits_BLV.grad, None
    p_BLV, q_BLV = teacher_BLV.exp(), logits_BLV.softmax(-1)
    in_BLV = torch.zeros_like(p_BLV).scatter(-1, best.indices, 1.0)
    rest = [(one * (1 - in_BLV)).sum(-1) for one in (p_BLV, q_BLV)]
    ((in_BLV * p_BLV * (p_BLV / q_BLV).log()).sum() + (rest[0] * (rest[0] / rest[1]).log()).sum()).backward()
    assert found is not None
    assert torch.allclose(found, logits_BLV.grad, atol=1e-6)
    everything = teacher_BLV.topk(12, dim=-1)
    over_all = divergence(logits_BLV.log_softmax(-1), everything.indices, everything.values)
    assert torch.allclose(over_all, (p_BLV * (p_BLV / q_BLV).log()).sum(-1), atol=1e-6)
    some = divergence(logits_BLV.log_softmax(-1), best.indices, best.values)
    assert bool((some <= over_all + 1e-6).all())


def test_labels_of_something_else_are_refused(taught: Config, tiny: Config, ranks: Ranks, tmp_path: Path) -> None:
    config = student(taught, "first", train__total=768)
    ranks(1, train, config)
    run, other = Folder(config.run.root) / "first", str(tmp_path / "other")
    gone = student(taught, "first", objective__labels="/gone", train__eval_tokens=64)
    assert evaluate_checkpoint(run, gone, "step-0000000001").heldout_loss > 0, "labels are learned from only"
    label(config.shards.dataset, f"{run.url}/checkpoints/step-0000000001", "topk", other, k=8)
    changed = open_data(student(taught, "first", objective__labels=other).data)
    with pytest.raises(CheckpointError, match="another dataset, other labels"):
        newer_of_other_orders(run, changed.order.identity_at, False)
    assert newer_of_other_orders(run, open_data(config.data).order.identity_at, False) == []
    with pytest.raises(CorpusError, match=r"are labels of another dataset, \w+: .* is \w+; label this dataset"):
        open_data(config.override({"shards.dataset": tiny.shards.dataset}).data)
    with pytest.raises(CorpusError, match="holds no sealed labels"):
        resolve(student(taught, "second", objective__labels=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"learns from topk, and objective\.labels holds logprob"):
        check_objective(config, open_data(student(taught, "x", objective__labels=labels(taught, "logprob")).data))
    unlabelled = student(taught, "x", objective__labels="")
    with pytest.raises(ConfigError, match=r"learns from topk, and objective\.labels names none"):
        check_objective(unlabelled, open_data(unlabelled.data))
    for changes, problem in (
        ({"objective__source": "", "objective__cross_entropy": 0.0}, "without objective.source the loss is"),
        ({"stream__mixture": {"one": "a", "two": "b"}}, "are labels of one dataset, and stream.mixture names several"),
        ({"objective__source": "own_training:entropy"}, "is for objective.source = distill"),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            student(taught, "wrong", **changes)


def online(taught: Config, name: str, **changes: Any) -> Config:
    """A student whose teacher computes in the step."""
    of = {"objective__labels": "", "objective__teacher": f"{taught.run.root}/teacher", "objective__teacher_k": 8}
    return student(taught, name, **{**of, "train__total": 2 * taught.tokens_per_step, **changes})


def test_a_teacher_in_the_step_says_what_its_labels_say(taught: Config) -> None:
    """Labels are rounded to fp16; all else is the same."""
    data = open_data(student(taught, "x").data)
    [batch] = load(RankReader(data, 0, 1), RankReader(data, 0, 1).plan(0, 1, 2**20))
    rows_BL = torch.from_numpy(ids_of(batch.tokens).astype(np.int64))[:, :-1]
    some, every = (teacher_of(online(taught, "x", objective__teacher_k=k)) for k in (8, 0))
    found = some(rows_BL)
    stored = torch.from_numpy(batch.columns["logprobs"].astype(np.float32))
    assert torch.allclose(found["logprobs"], stored, rtol=2**-11, atol=1e-6)
    differ = found["ids"] != torch.from_numpy(batch.columns["ids"].astype(np.int64))
    assert differ.float().mean() < 0.01, "of equally likely ids any may come first"
    assert every(rows_BL)["ids"].shape[-1] == 257
    assert torch.equal(every(rows_BL)["logprobs"].gather(-1, found["ids"]), found["logprobs"])
    assert not found["logprobs"].requires_grad


@pytest.mark.full
def test_a_student_learns_the_same_bits_beside_its_teacher_at_any_world_size(taught: Config, ranks: Ranks) -> None:
    expected = told(run_here(train, online(taught, "beside")))
    assert expected[2][1]["objective/kl"] < expected[1][1]["objective/kl"]
    assert told(ranks(3, train, online(taught, "beside_too"))[0]) == expected


def teacher_of(config: Config) -> Teacher:
    """The teacher of a config, loaded."""
    teacher = Teacher(config, 257, 256, None, False, torch.device("cpu"))
    teacher.begin(None)
    return teacher


def test_a_teacher_that_cannot_be_is_told_before_the_run_begins(taught: Config, tmp_path: Path) -> None:
    run = Folder(taught.run.root) / "teacher"
    pinned, _ = find_run(online(taught, "pinned"), False, False)
    assert pinned.objective.teacher == f"{run.url}/checkpoints/step-0000000003"
    data = open_data(taught.data)
    check_objective(pinned, data)
    with pytest.raises(ConfigError, match=r"objective\.teacher = .* names no checkpoint that counts"):
        find_run(online(taught, "gone", objective__teacher=str(tmp_path)), False, False)
    for changes, problem in (
        ({"objective__labels": labels(taught)}, "objective.labels give the same targets"),
        (
            {"objective__source": "dpo", "objective__cross_entropy": 0.0},
            "is for distillation, and objective.source = 'dpo'",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(problem)):
            online(taught, "wrong", **changes)
    plain = student(taught, "plain", objective__source="", objective__labels="", objective__cross_entropy=0.0)
    sizes = [predicted_bytes(one, 257, 256, 2) for one in (plain, pinned)]
    weights = sum(
        piece.size_bytes for piece in read_pieces(run, "step-0000000003", read_manifest(run, "step-0000000003"))
    )
    assert sizes[1] > sizes[0] + weights / 3, "a model more, without optimizer state"


def test_another_teacher_does_not_teach_on(taught: Config) -> None:
    teacher, url = teacher_of(online(taught, "x")), f"{taught.run.root}/teacher"
    known = teacher.describe(Meta.model_construct(step=1, components={}, metrics={}))
    teacher.begin(Restored(known, "a"))
    other = {"teacher": dict.fromkeys(known.components["teacher"], "0" * 32)}
    with pytest.raises(CheckpointError, match=re.escape(f"{url}/checkpoints/step-0000000003 was '000")):
        teacher.begin(Restored(Meta.model_construct(step=1, components=other), "b"))


def test_a_damaged_group_ends_training_by_name(taught: Config, tmp_path: Path) -> None:
    url = label(taught.shards.dataset, f"{taught.run.root}/teacher", "topk", str(tmp_path / "best"), k=8)
    names = [path.name for path in Path(url).iterdir() if path.name.startswith("train")]
    for name in names:
        data = bytearray(Path(url, name).read_bytes())
        data[-1] ^= 1
        Path(url, name).write_bytes(data)
    reader = RankReader(open_data(student(taught, "damaged", objective__labels=url).data), 0, 1)
    with pytest.raises(CorruptShard, match="|".join(map(re.escape, names))):
        list(load(reader, reader.plan(0, 1, 2**20)))


def test_a_function_of_ones_own_gets_the_labels(taught: Config, ranks: Ranks) -> None:
    own = {"objective__source": "own_training:reads_labels", "objective__cross_entropy": 0.0}
    config = student(taught, "own", **own, objective__labels=labels(taught, "logprob"), train__total=768)
    [(loss, parts)] = told(ranks(2, train, config)[0]).values()
    assert loss == pytest.approx(parts["objective/nats"] - parts["objective/reference"], rel=1e-4)
    cpu, each = torch.device("cpu"), load_labels(Folder(labels(taught, "logprob"))).layout
    assert Objective("own_training:reads_labels", 257, cpu, each).names == ("nats", "reference")
    with pytest.raises(ConfigError, match=r"takes labels, and objective\.labels names none"):
        Objective("own_training:reads_labels", 257, cpu)
    with pytest.raises(ConfigError, match="are read by nobody: own_training:entropy takes three arguments"):
        Objective("own_training:entropy", 257, cpu, each)
    plain = student(taught, "bytes", objective__source="", objective__labels="", objective__cross_entropy=0.0)
    assert predicted_bytes(student(taught, "bytes"), 257, 256, 2) > predicted_bytes(plain, 257, 256, 2)
    best = LabelLayout("topk", 8, "uint16", 64)
    assert best.size_bytes(1) == 8 + 64 * 8 * 4
    assert RankReader(open_data(config.data), 0, 1).nothing(3).columns["logprobs"].shape == (0, 64)
