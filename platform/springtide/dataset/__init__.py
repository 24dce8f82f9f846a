"""Prepare a dataset from a corpus. A finished (sealed) dataset has a manifest and never changes. Rule of this package: every
stage may be killed at any moment and restarted with any number of processes, and the dataset has the same bytes.

    source -> units -> parts       clean, hash and tokenise each unit, a few source files      parts.py
    units  -> repeats              find lines or paragraphs that occurred before               repeats.py
    parts  -> segments             merge about 30 parts, sorted: first pass of the shuffle     segments.py, columns.py
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
