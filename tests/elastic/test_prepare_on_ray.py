"""Preparing on a cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from labelled import few_rows, teacher
from prepared import contents, prepare

from springtide import config as configs
from springtide.api import label as labelling
from springtide.corpus import sources
from springtide.dataset import in_process, make_dataset, open_dataset
from springtide.errors import CorpusError
from springtide.ray.data.feed import feed
from springtide.ray.data.prepare import ray_map
from springtide.storage import Folder
from springtide.stream import RankReader, load, open_data

pytestmark = pytest.mark.cluster


def test_on_a_cluster_the_bytes_are_those_of_one_process(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_UNIT_BYTES", 150_000)
    changes = {"corpus.max_files": 60, "shards.rows_per_group": 16}
    config = configs.recipes.tiny().override(changes)
    found = []
    for name, run in (("one", in_process), ("cluster", ray_map)):
        stages: dict[str, int] = {}
        url = make_dataset(
            config.corpus,
            config.override({"shards.root": str(tmp_path / name)}).shards,
            lambda stage, done, total, stages=stages: stages.__setitem__(stage, done),  # type: ignore[misc]
            run,
        )
        assert stages["reading and tokenising"] > 4
        assert stages["packing and sealing"] > 4
        manifest, _ = open_dataset(url)
        found.append((manifest, {file: Folder(url).read(file) for file in ("tokenizer.json",)}))
    assert found[0] == found[1]


def test_what_is_wrong_with_a_source_comes_back_as_itself(ray_cluster: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["text"] * 9}), tmp_path / "a.parquet", row_group_size=3)
    changes = {"corpus.source": str(tmp_path / "a.parquet"), "shards.root": str(tmp_path / "data")}
    config = configs.recipes.tiny().override(changes)
    with pytest.raises(CorpusError, match=r"corpus.field = 'text': is not a column of .*choose one of body"):
        prepare(config, run=ray_map)


@pytest.mark.full
def test_on_a_cluster_the_labels_are_those_of_one_process(
    ray_cluster: str, tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = teacher(tmp_path, datasets)
    dataset = few_rows(taught, shards__rows_per_group=8).shards.dataset
    how = (dataset, f"{taught.run.root}/teacher", "topk")
    shown: list[tuple[str, int, int]] = []
    found = labelling.label(*how, str(tmp_path / "cluster"), k=3, progress=lambda *told: shown.append(told))
    assert shown[-1][1] == shown[-1][2] == len(shown) > labelling._LARGE_GROUPS
    monkeypatch.setattr(labelling, "_LARGE_GROUPS", 1000)
    assert contents(found) == contents(labelling.label(*how, str(tmp_path / "one"), k=3))
    learns = {"shards.dataset": dataset, "objective.source": "distill", "objective.labels": found}
    reader = RankReader(open_data(taught.override(learns).data), 0, 2)
    plan = reader.plan(0, 9, 2**14)
    for one, other in zip(feed(reader, plan, taught.feed), load(reader, plan), strict=True):
        assert one.step == other.step
        assert one.columns.keys() == other.columns.keys() == {"ids", "logprobs"}
        for name, column in one.columns.items():
            assert column.dtype == other.columns[name].dtype
            assert np.array_equal(column, other.columns[name])
