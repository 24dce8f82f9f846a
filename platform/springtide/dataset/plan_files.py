"""Store the plan of a dataset in files, so that a killed preparation can continue to write shards. A bundle is the
shards that one task writes. A task reads only the plan of its bundle.

plan/000000.npz   one bundle: the shards that one task writes    arrays of plan.ShardPlan, and the sizes of its segments
plan/plan.json    the plan without its shards, written last      if it is missing, the plan is made again
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from springtide.config.data import ShardsConfig
from springtide.dataset.columns import Sizes
from springtide.dataset.plan import Cut, Documents, Drop, Plan, ShardPlan, SplitPlan
from springtide.dataset.segments import Segment
from springtide.storage import Folder, to_json

_BUNDLE_BYTES = 256 * 2**20
"""Maximum size of a bundle (the shards that one task writes) [bytes of tokens]; a single shard may be larger. Bundles are large
because each task reads from every segment (sorted file of documents) of its source."""
_LEAST_BUNDLES = 64
"""The shards of a split are grouped into bundles (one task writes one bundle) only as far as this many bundles remain, so that
this many processes can write shards."""
_FOLDER, _PLAN = "plan", "plan/plan.json"


class Bundle(NamedTuple):
    """The shards that one task writes, and the segments (sorted files) that hold their documents."""

    shards: tuple[ShardPlan, ...]
    segments: dict[int, Segment]


class Planned(NamedTuple):
    """A plan whose shards are stored in files. One file holds a bundle, the shards that one task writes."""

    plan: Plan
    """The plan without shards: the bundle files hold them, so the lists of shards in its splits are empty."""
    bundles: tuple[tuple[tuple[str, str], int], ...]
    """Entry i: ((source, split), number of shards) of bundle i. A bundle is the shards that one task writes."""


def write_plan(work: Folder, plan: Plan, segments: Sequence[Segment], settings: ShardsConfig) -> Planned:
    """Write a plan to files in the folder ``work``. Return the plan without its shards, as ``read_plan`` does."""
    shard_bytes = settings.rows_per_group * settings.groups_per_shard * (settings.sequence_length + 1)
    shard_bytes *= np.dtype(settings.token_type).itemsize
    bundles: list[tuple[tuple[str, str], int]] = []
    for split in plan.splits:
        most = max(1, min(len(split.shards) // _LEAST_BUNDLES, _BUNDLE_BYTES // shard_bytes))
        for begin in range(0, len(split.shards), most):
            shards = split.shards[begin : begin + most]
            work.write(bundle_name(len(bundles)), _encode(shards, segments))
            bundles.append(((split.source, split.split), len(shards)))
    record = {
        "splits": [(one.source, one.split, one.documents, one.tokens) for one in plan.splits],
        "dropped": plan.dropped,
        "examples": plan.examples,
        "documents_by_tokens": plan.documents_by_tokens,
        "heldout_fraction": plan.heldout_fraction,
        "cut": plan.cut,
        "bundles": bundles,
    }
    work.write(_PLAN, to_json(record))
    return _planned(json.loads(to_json(record)))


def read_plan(work: Folder) -> Planned | None:
    """Read the plan from the folder ``work``, without its shards. Return None if the folder has no complete plan."""
    try:
        return _planned(work.read_json(_PLAN))
    except FileNotFoundError:
        return None


def read_bundle(work: Folder, number: int) -> Bundle:
    """Read bundle ``number``: the plan of the shards that one task writes, and the segments that hold their documents."""
    name = bundle_name(number)
    with np.load(io.BytesIO(work.read_range(name, 0, work.size(name))), allow_pickle=False) as found:
        facts, columns, pieces = json.loads(found["facts"].tobytes()), found["documents"], found["pieces"]
    shards = []
    document = piece = 0
    for fields, documents, many in facts["shards"]:
        mine = columns[:, document : document + documents]
        where = Documents(mine[0].astype(np.int32), mine[1].astype(np.int32), mine[2], mine[3].astype(np.int32))
        placed = None if many is None else pieces[piece : piece + many]
        shards.append(ShardPlan(**fields, documents=where, pieces=placed))
        document, piece = document + documents, piece + (many or 0)
    segments = {number: Segment(number, source, Sizes(*sizes)) for number, source, sizes in facts["segments"]}
    return Bundle(tuple(shards), segments)


def bundle_name(number: int) -> str:
    """Return the name of the file that stores a bundle: the plan of the shards that one task writes."""
    return f"{_FOLDER}/{number:06d}.npz"


def _encode(shards: Sequence[ShardPlan], segments: Sequence[Segment]) -> bytes:
    facts: dict[str, Any] = {"shards": [], "segments": []}
    for one in shards:
        fields = {name: getattr(one, name) for name in ("split", "number", "first_row", "rows", "skip")}
        facts["shards"].append((fields, len(one.documents.segment), None if one.pieces is None else len(one.pieces)))
    columns = np.concatenate(
        [np.stack([column.astype(np.int64) for column in one.documents]) for one in shards], axis=1
    )
    facts["segments"] = [segments[number] for number in np.unique(columns[0]).tolist()]
    pieces = [one.pieces for one in shards if one.pieces is not None]
    out = io.BytesIO()
    placed = np.concatenate(pieces) if pieces else np.empty((0, 4), np.int32)
    np.savez(out, facts=np.frombuffer(to_json(facts).encode(), np.uint8), documents=columns, pieces=placed)
    return out.getvalue()


def _planned(record: dict[str, Any]) -> Planned:
    def place(found: list[int] | None) -> Any:
        return None if found is None else tuple(found)

    plan = Plan(
        splits=tuple(SplitPlan(name, split, many, tokens, ()) for name, split, many, tokens in record["splits"]),
        dropped=record["dropped"],
        examples=tuple(Drop(reason, place(at), place(kept), how) for reason, at, kept, how in record["examples"]),
        documents_by_tokens=tuple((edge, count) for edge, count in record["documents_by_tokens"]),
        heldout_fraction=record["heldout_fraction"],
        cut=(cut := record.get("cut")) and Cut(place(cut[0]), cut[1]),
    )
    return Planned(plan, tuple(((source, split), shards) for (source, split), shards in record["bundles"]))
