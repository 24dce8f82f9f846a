"""Prepare a sealed dataset from a corpus. Layer rule: every stage may be killed at any moment and restarted with any number of
processes, and yields the same bytes.

    source -> units -> parts       per unit: clean, hash, tokenise                             parts.py
    units  -> repeats              find lines or paragraphs that occurred before               repeats.py
    parts  -> segments             merge about thirty, sorted: first pass of the shuffle       segments.py, columns.py
    segments -> plan               drop duplicates, shuffle globally, split, cut shards        near.py, plan.py, plan_files.py
    plan   -> shards -> manifest   pack and write shards: second pass; the manifest is last    sealing.py
"""

from springtide.dataset.make import (
    Map,
    Progress,
    fingerprint,
    in_process,
    make_dataset,
    open_dataset,
    rows_text,
    silent,
    units_to_make,
)

__all__ = [
    "Map",
    "Progress",
    "fingerprint",
    "in_process",
    "make_dataset",
    "open_dataset",
    "rows_text",
    "silent",
    "units_to_make",
]
