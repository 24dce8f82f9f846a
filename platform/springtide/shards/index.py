"""The index of datasets that are prepared as their text arrives: one sealed entry per dataset, appended and never changed.

index/0000.json   files -> dataset, digest of its manifest        index/0001.json   ..., digest of entry 0000
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from springtide.errors import CorpusError, explain
from springtide.store import Folder, digest, to_json

INDEX = "index"
_NAME = r"^[0-9a-f]{16}$"
_DIGEST = r"^[0-9a-f]{32}$"


class IndexEntry(BaseModel):
    """A dataset, and the files that it was made of."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    number: int = Field(ge=0)
    """From 0, without gaps."""
    dataset: str = Field(pattern=_NAME)
    """Name of its folder, beside the index."""
    digest: str = Field(pattern=_DIGEST)
    """Digest of its manifest."""
    files: dict[str, Annotated[str, Field(max_length=1000)]]
    """Name of a file below the source -> its size and last change, as they were."""
    before: Annotated[str, Field(pattern=_DIGEST)] | None = None
    """Digest of the entry before; None for the first."""

    @property
    def file(self) -> str:
        """Its name in the index."""
        return _file(self.number)

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return to_json(self.model_dump(mode="json"), sort_keys=True).encode()


_ENTRY: TypeAdapter[IndexEntry] = TypeAdapter(IndexEntry)


def _file(number: int) -> str:
    return f"{number:04d}.json"


def has_more_entries(root: Folder, known: int) -> bool:
    """Return whether the index below ``root`` has more than ``known`` entries. Reads none: one request."""
    return (root / INDEX).exists(_file(known))


def read_index(root: Folder) -> list[IndexEntry]:
    """Return the entries of the index below ``root``, in order; none if there is no index.

    Raises:
        DamagedFile: an entry is damaged.
        CorpusError: an entry is missing, or is not the one that the next one follows.
    """
    folder, found = root / INDEX, list[IndexEntry]()
    entries = (one for one in folder.names() if one.endswith(".json") and one[:-5].isdecimal())
    for name in sorted(entries, key=lambda one: int(one[:-5])):  # 10000.json is after 9999.json
        entry = folder.read_as(name, _ENTRY)
        before = digest.of_bytes(found[-1].data) if found else None
        if (entry.file, entry.number, entry.before) != (name, len(found), before):
            problem = f"does not follow the {len(found)} entries before it: one is missing, or was changed"
            raise CorpusError(explain("index", folder.where(name), problem, "copy the whole folder again"))
        found.append(entry)
    return found


def append_entry(
    root: Folder, entries: list[IndexEntry], dataset: str, sealed: str, files: dict[str, str]
) -> IndexEntry:
    """Append a sealed dataset to the index below ``root`` and return its entry. FileExistsError if another process has
    appended one meanwhile. ``entries``: those that are there; ``sealed``: digest of the dataset's manifest."""
    before = digest.of_bytes(entries[-1].data) if entries else None
    entry = IndexEntry(number=len(entries), dataset=dataset, digest=sealed, files=files, before=before)
    (root / INDEX).create(entry.file, entry.data)
    return entry
