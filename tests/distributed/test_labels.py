"""Labels: what a model says about the rows of a dataset; the same bytes after a kill; refused by name if they do not fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled import few_rows, plain_log_probabilities, teacher
from prepared import contents
from safetensors.numpy import load_file

from springtide.api.label import label
from springtide.cli.main import main
from springtide.config import Config
from springtide.errors import ConfigError, CorpusError, CorruptShard
from springtide.run.exchange import export_model
from springtide.run.folder import Run
from springtide.shards import HELDOUT, LABELS, TRAIN, LabelReader, load_labels, load_manifest
from springtide.storage import Folder

pytestmark = pytest.mark.distributed

KILLED = """
import os, signal
from springtide.api.label import label
from springtide.storage import Folder
written = []
put = Folder.write_json
def write_and_die(folder, name, value):
    written.extend([name] * name.startswith("groups/"))
    if len(written) == 3:  # its labels are written, its record is not
        os.kill(os.getpid(), signal.SIGKILL)
    put(folder, name, value)
Folder.write_json = write_and_die
label({dataset!r}, {by!r}, "topk", {out!r}, k=5)
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, datasets: Path) -> Config:
    """A dataset of few rows and a run on it, the teacher."""
    return teacher(tmp_path_factory.mktemp("taught"), datasets)


def read_all(config: Config, url: str, split: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    whole = load_manifest(Folder(config.shards.dataset)).splits[split]
    return LabelReader(Folder(url), load_labels(Folder(url)), whole).read(np.arange(whole.rows))


def test_labels_are_what_a_plain_forward_says(taught: Config, tmp_path: Path) -> None:
    run, dataset = f"{taught.run.root}/teacher", taught.shards.dataset
    best = label(dataset, run, "topk", str(tmp_path / "best"), k=5)
    each = label(dataset, run, "logprob", str(tmp_path / "each"))
    for split in (TRAIN, HELDOUT):
        ids, log_TLV = plain_log_probabilities(taught, run, split)
        numbers, columns = read_all(taught, best, split)
        wanted = log_TLV[..., :257].topk(5, dim=-1)  # the embedding is padded to 320 rows
        assert numbers.tolist() == list(range(len(ids)))
        assert columns["ids"].dtype == np.uint16
        assert np.array_equal(columns["ids"], wanted.indices.numpy())
        assert np.array_equal(columns["logprobs"], wanted.values.half().numpy())
        _, columns = read_all(taught, each, split)
        wanted = log_TLV.gather(-1, torch.from_numpy(ids[:, 1:, None].astype(np.int64)))[..., 0]
        assert columns["logprobs"].dtype == np.float32
        assert np.array_equal(columns["logprobs"], wanted.numpy())
    files = sorted(path.name for path in (tmp_path / "best").iterdir())
    manifest = load_manifest(Folder(dataset))
    groups = sum(len(shard.groups) for one in manifest.splits.values() for shard in one.shards)
    assert len(files) == groups + 1 >= 5, "a file for each row group, and the manifest"
    others = load_file(tmp_path / "best" / next(name for name in files if name.startswith("train")))
    assert others["ids"].shape == others["logprobs"].shape == (len(others["sample_ids"]), 64, 5)
    facts = load_labels(Folder(best))
    assert (facts.dataset, facts.labeller["run"], facts.labeller["step"]) == (manifest.digest, "teacher", 3)
    before = contents(best)
    assert label(dataset, run, "topk", best, k=5) == best
    assert contents(best) == before, "found again"
    rows = np.random.default_rng(0).permutation(manifest.splits[TRAIN].rows)[:40]
    numbers, columns = LabelReader(Folder(best), facts, manifest.splits[TRAIN]).read(rows)
    assert np.array_equal(numbers, rows)
    assert np.array_equal(columns["ids"], read_all(taught, best, TRAIN)[1]["ids"][rows])


def test_a_killed_labelling_resumes_with_the_same_bytes(taught: Config, tmp_path: Path) -> None:
    dataset, run, out = taught.shards.dataset, f"{taught.run.root}/teacher", str(tmp_path / "killed")
    program = KILLED.format(dataset=dataset, by=run, out=out)
    killed = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ}, capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()
    half = {name: os.stat(f"{out}/{name}").st_mtime_ns for name in os.listdir(out) if name.endswith(".safetensors")}
    assert len(half) == 3
    with pytest.raises(CorpusError, match="holds no sealed labels"):
        load_labels(Folder(out))
    with pytest.raises(ConfigError, match=r"holds the beginning of other labels: k 5, not 4"):
        label(dataset, run, "topk", out, k=4)
    label(dataset, run, "topk", out, k=5)
    again = [name for name, time in half.items() if os.stat(f"{out}/{name}").st_mtime_ns != time]
    assert len(again) == 1, "only the one without a record"
    assert contents(out) == contents(label(dataset, run, "topk", str(tmp_path / "whole"), k=5))
    assert not list((Path(run) / "checkpoints" / "readers").iterdir())


def test_a_folder_of_transformers_labels_as_the_run_that_it_is_of(taught: Config, tmp_path: Path) -> None:
    run, folder = f"{taught.run.root}/teacher", str(tmp_path / "exported")
    export_model(Run(Folder(run)), folder)
    found = [label(taught.shards.dataset, by, "topk", f"{tmp_path}/{n}", k=3) for n, by in enumerate((run, folder))]
    ours, theirs = (contents(url) for url in found)
    assert ours.pop(LABELS) != theirs.pop(LABELS)
    assert ours == theirs
    assert load_labels(Folder(found[1])).labeller["architecture"] == "LlamaForCausalLM"


def test_damaged_labels_are_refused_by_name(taught: Config, tmp_path: Path) -> None:
    url = label(taught.shards.dataset, f"{taught.run.root}/teacher", "topk", str(tmp_path / "best"), k=2)
    name = sorted(one for one in os.listdir(url) if one.startswith("train"))[1]
    data = bytearray(Path(url, name).read_bytes())
    for bad in (data[:-1], data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]):
        Path(url, name).write_bytes(bad)
        with pytest.raises(CorruptShard, match=rf"{re.escape(name)}: labels: .*--label-by"):
            read_all(taught, url, TRAIN)
    manifest = json.loads(Path(url, LABELS).read_text())
    Path(url, LABELS).write_text(json.dumps(manifest | {"k": 3}))
    with pytest.raises(CorpusError, match="digest expected"):
        load_labels(Folder(url))


def test_what_cannot_be_labelled_is_told_before_anything_is_written(
    taught: Config, tiny: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, dataset, out = f"{taught.run.root}/teacher", taught.shards.dataset, str(tmp_path / "labels")
    long = few_rows(tiny, shards__sequence_length=4096, model__max_sequence_length=4096, train__total="1M")
    other = few_rows(tiny, corpus__special_tokens=["<|more|>"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for arguments, problem in (
        ((dataset, run, "topk", out, 258), r"k = 258: must be from 1 to the 257 ids"),
        ((dataset, run, "topk", str(tmp_path / "full"), 5), r"full': is not empty, and holds no labels"),
        ((dataset, f"{tmp_path}/nothing", "topk", out, 5), r"names no checkpoint that counts, and no folder of transf"),
        ((long.shards.dataset, run, "topk", out, 5), r"reads at most 2048 tokens, a row has 4096"),
        ((other.shards.dataset, run, "topk", out, 5), r"has the tokenizer \w+, the dataset has \w+: their ids differ"),
    ):
        with pytest.raises(ConfigError, match=problem):
            label(*arguments)
    with pytest.raises(CorpusError, match="holds no sealed dataset"):
        label(str(tmp_path), run, "topk", out)
    assert not Path(out).exists()
    command = [
        *("data", "prepare", f"{run}/config.yaml", "--shards.dataset", dataset),
        *("--label-by", f"{run}/checkpoints/step-0000000003"),
        *("--label-what", "logprob", "--label-out", out),
    ]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labeller"]["checkpoint"] == "step-0000000003"
    assert main(command) == 0
    assert "logprob, 264 bytes a row" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds other labels: what 'logprob', not 'topk'"):
        label(dataset, run, "topk", out)
