"""Torch records each rank's collectives; in a hang they tell which rank is behind."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from springtide.ray.train.hang import Collective, behind, newest_collectives

WHOLE = Collective("0 default_pg", 41, "nccl:all_reduce", "[64]", False)
SHARD = Collective("1 shard", 900, "nccl:_all_gather_base", "[4096]", True)


def test_the_newest_collective_of_a_real_group_is_known() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(4, 2))
        [found] = [one for one in newest_collectives() if one.group.endswith("default_pg")]
    finally:
        dist.destroy_process_group()
    assert (found.number, found.name, found.sizes) == (3, "gloo:all_reduce", "[4, 2]")


def test_a_group_that_has_the_name_of_an_earlier_one_counts_by_what_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"process_group": ["0", "default_pg"], "collective_seq_id": number, "profiling_name": "nccl:all_reduce"}
        for number in (7, 8, 1)
    ]
    private = torch._C._distributed_c10d
    dump = {"entries": [*entries, {"process_group": ["1", "shard"], "collective_seq_id": 5, "retired": True}]}
    monkeypatch.setattr(private, "_dump_nccl_trace_json", lambda: json.dumps(dump), raising=False)
    monkeypatch.setattr(private, "_dump_fr_trace_json", lambda: b"not of this form", raising=False)
    assert [(one.group, one.number, one.is_done) for one in newest_collectives()] == [
        ("0 default_pg", 1, False),
        ("1 shard", 5, True),
    ]


def test_who_never_came_to_a_collective_is_named_and_who_came_to_another() -> None:
    ranks = {rank: [SHARD, WHOLE] for rank in range(8)}
    assert behind(ranks) == ""
    ranks[5] = [SHARD, WHOLE._replace(number=40)]
    ranks[6] = [SHARD._replace(sizes="[1]"), WHOLE._replace(number=40)]
    assert behind(ranks) == (
        "rank 6 is in collective 900 of group 1 shard (nccl:_all_gather_base [1]), others in 900 "
        "(nccl:_all_gather_base [4096]); "
        "ranks 5, 6 are in collective 40 of group 0 default_pg (nccl:all_reduce [64]), others in 41 (nccl:all_reduce [64])"
    )
    assert behind({}) == ""
    odd = {0: [SHARD._replace(sizes="[1]")], 1: [SHARD], 2: [SHARD]}
    assert behind(odd).startswith("rank 0 is in collective 900")
