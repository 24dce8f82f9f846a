"""What of a GPU a step may fill, and whose word counts on how large it is."""

from __future__ import annotations

from typing import Any

import pytest

from springtide import config as configs
from springtide.planning.device_memory import CONTEXT_BYTES, nccl_bytes, usable_bytes
from springtide.ray.cluster import session
from springtide.ray.cluster.session import DeviceSize

CONFIG = configs.recipes.demo().override(
    {
        "elastic.gpus_per_worker": 1,
        "stream.global_batch": 64,
        "stream.lanes": 64,
        "elastic.max_workers": 16,
        "elastic.min_workers": 8,
    }
)
H100 = 85_030_000_000


def test_context_buffers_and_holes_are_kept_free() -> None:
    assert usable_bytes(CONFIG, H100) == round(0.96 * (H100 - CONTEXT_BYTES - nccl_bytes(16, 16, {})))
    assert usable_bytes(CONFIG, H100, 10**9) < usable_bytes(CONFIG, H100)
    copies = CONFIG.override({"parallel.shard_workers": 8})
    assert usable_bytes(copies, H100) < usable_bytes(CONFIG, H100)
    small = {"NCCL_MAX_NCHANNELS": "4", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert nccl_bytes(16, 16, small) == nccl_bytes(16, 16, {}) // 8
    assert usable_bytes(CONFIG.override({"elastic.env": small}), H100) < usable_bytes(CONFIG, H100)
    assert usable_bytes(CONFIG, 10**8) == 1  # known, and too small: 0 would be unknown
    assert usable_bytes(CONFIG.override({"elastic.gpus_per_worker": 0}), H100) == H100


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([], DeviceSize(80 * 10**9)),
        ([DeviceSize(H100, 7), DeviceSize(40 * 10**9, 9)], DeviceSize(H100, 7)),
        ([DeviceSize(10 * 10**9, 5)], DeviceSize(10 * 10**9, 5)),  # a slice of it
    ],
)
def test_a_device_knows_better_than_its_data_sheet(
    said: list[DeviceSize], expected: DeviceSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: list[dict[str, Any]] = [
        {"Alive": True, "Resources": {"GPU": 8.0, "accelerator_type:H100": 1.0, "CPU": 8.0}},
        {"Alive": True, "Resources": {"GPU": 8.0, "accelerator_type:L4": 1.0, "CPU": 8.0}},
    ]
    monkeypatch.setattr(session.ray, "nodes", lambda: nodes)
    asked: list[Any] = []
    monkeypatch.setattr(session, "device_sizes", lambda *given: asked.append(given) or said)
    assert session.device_size(CONFIG) == expected
    assert asked == [(["H100", "L4"], 1.0)]
    half = session.device_size(CONFIG.override({"elastic.gpus_per_worker": 0.5}))
    assert half.total_bytes == expected.total_bytes // 2
