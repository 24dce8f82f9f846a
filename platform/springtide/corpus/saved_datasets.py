"""Folders that the datasets library's ``save_to_disk`` wrote: which of their Arrow files are the data.

state.json            the files of a dataset; beside them may lie cache-*.arrow of later calls of ``map``
dataset_dict.json     the splits of several, each in a folder of its own
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection
from typing import Any

from springtide.errors import CorpusError, explain
from springtide.storage import Folder

STATE, SPLITS = "state.json", "dataset_dict.json"
_TRAIN = "train"
_MOST_BYTES = 4 * 2**20
"""Most bytes of one of these files."""


def no_data_of(folder: Folder, names: Collection[str]) -> set[str]:
    """Return the files of ``names`` that saved datasets among them do not list, and those of other splits than ``train``.

    Raises:
        CorpusError: a list is damaged, names a file that is not there, or names splits without ``train``.
    """
    left_out: set[str] = set()
    for name in (one for one in names if posixpath.basename(one) == SPLITS):
        root = posixpath.join(posixpath.dirname(name), "")
        splits = _read(folder, name).get("splits")
        if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
            raise _damaged(folder, name)
        if _TRAIN not in splits:
            problem = f"lists the splits {', '.join(splits)[:200]}, and no {_TRAIN}"
            raise CorpusError(
                explain("corpus.source", folder.where(name), problem, "point corpus.source at one of them")
            )
        others = tuple(f"{root}{split}/" for split in splits if split != _TRAIN)
        left_out.update(one for one in names if one.startswith(others))
    for name in (one for one in names if posixpath.basename(one) == STATE and one not in left_out):
        root = posixpath.dirname(name)
        arrows = {one for one in names if one.endswith(".arrow") and posixpath.dirname(one) == root}
        if not arrows:
            continue
        state = _read(folder, name)
        listed = state.get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise _damaged(folder, name)
        if state.get("_indices_files") or state.get("_indices_data_files"):
            problem = "chooses rows by an index, which is not read"
            remedy = "save it again with a newer version of datasets"
            raise CorpusError(explain("corpus.source", folder.where(name), problem, remedy))
        wanted = {str(one.get("filename")) for one in listed}
        if missing := sorted(wanted - {posixpath.basename(one) for one in arrows}):
            problem = f"lists {missing[0][:200]}, which is not in the source"
            raise CorpusError(explain("corpus.source", folder.where(name), problem, "copy the whole folder"))
        left_out |= {one for one in arrows if posixpath.basename(one) not in wanted}
    return left_out


def _read(folder: Folder, name: str) -> dict[str, Any]:
    if folder.size(name) > _MOST_BYTES:
        raise _damaged(folder, name)
    found = folder.read_json(name)
    if not isinstance(found, dict):
        raise _damaged(folder, name)
    return found


def _damaged(folder: Folder, name: str) -> CorpusError:
    problem = "is not what save_to_disk of the datasets library writes"
    return CorpusError(explain("corpus.source", folder.where(name), problem, "restore the file, or exclude it"))
