"""Text to a sealed dataset, once: where corpus and shards meet. Rule: every stage may be killed at any moment and begun again,
by any number of processes, and the bytes are the same.

    source -> units -> parts       each unit alone: cleaned, hashed, tokenised          parts.py
    parts  -> plan                 duplicates out, global shuffle, splits, shard cuts   plan.py
    plan   -> shards -> manifest   each shard alone; the manifest last                  make.py
"""

from springtide.dataset.make import (
    Map,
    Progress,
    fingerprint,
    in_process,
    open_dataset,
    prepare,
    rows_text,
    silent,
    units_to_make,
)

__all__ = [
    "Map",
    "Progress",
    "fingerprint",
    "in_process",
    "open_dataset",
    "prepare",
    "rows_text",
    "silent",
    "units_to_make",
]
