"""The check of ``springtide doctor`` that names a huge or changed folder before it is submitted as a Ray job."""

from __future__ import annotations

from pathlib import Path

from springtide.app.doctor import Check, Status
from springtide.app.provenance import checkout
from springtide.errors import ConfigError, explain

_USUAL_BYTES = 10 * 2**20
"""A folder of code and settings is smaller; larger ones hold data by mistake."""
_MIB = 2**20


class UploadCheck:
    """Looks at a folder as ``ray job submit --working-dir`` would."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if it is not a folder."""
        if not Path(folder).is_dir():
            raise ConfigError(explain("--upload", folder, "is not a folder", "name what you give --working-dir"))
        self._folder = folder

    def make(self) -> list[Check]:
        """Measure what would be sent, and compare the folder with its git commit."""
        from springtide.on_ray.cluster.upload import upload_of  # Ray loads only when needed

        found = upload_of(self._folder)
        size = found.num_bytes
        status: Status = "fail" if size >= found.refused_bytes else "warn" if size > _USUAL_BYTES else "ok"
        largest = ", ".join(f"{name} {one / _MIB:.2f}" for name, one in found.largest())
        figure = f"{len(found.sizes)} files, {size / _MIB:.2f} MiB; largest: {largest or 'nothing'}"
        limit = f"usually under {_USUAL_BYTES / _MIB:g} MiB; Ray refuses {found.refused_bytes / _MIB:g} MiB"
        remedy = "name what a job does not need in .rayignore" if status != "ok" else ""
        return [Check("upload", status, figure, limit, remedy), self._commit()]

    def _commit(self) -> Check:
        found = checkout(self._folder)
        if not found.commit:
            return Check("upload, commit", "ok", "the folder is in no git checkout")
        commit = found.commit[:12]
        if not found.is_changed:
            return Check("upload, commit", "ok", f"{commit}, unchanged")
        remedy = "commit first: the job has no .git, so nothing can say later what it ran"
        return Check("upload, commit", "warn", f"{commit}, with changes that are not committed", "no changes", remedy)
