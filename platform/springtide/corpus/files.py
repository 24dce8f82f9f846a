"""Find the files of a source, and detect which of them have changed."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sysconfig
from collections.abc import Mapping
from typing import Any, NamedTuple

from springtide.errors import CorpusError, SpringtideError, explain
from springtide.storage import Folder
from springtide.storage.local_files import stays_inside

_log = logging.getLogger(__name__)

_LEFT_OUT = {
    *("site-packages", "__pycache__", "ensurepip", "test", "tests", "idlelib", "lib2to3"),
    *("encodings", "pydoc_data"),  # data tables, not code
}
_CHANGES = ("mtime", "ETag", "etag", "blob_id", "LastModified", "last_modified", "Last-Modified", "created")
"""Keys under which stores report a property of a file that changes when the file is rewritten."""


class Look(NamedTuple):
    """Size and last change of a file, by which a rewrite is detected without reading it."""

    size: int
    """[bytes]"""
    change: str
    """A value that changes when the file is rewritten, such as the time of modification or the ETag."""


def library_files() -> tuple[Folder, tuple[str, ...]]:
    """Return the folder of the running Python's standard library, and its files without tests and tables."""
    root = Folder(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root.path):
        folders[:] = [
            name for name in folders if name not in _LEFT_OUT
        ]  # site-packages may be a hundred times as large as the library
        names += [os.path.relpath(os.path.join(folder, name), root.path) for name in files if name.endswith(".py")]
    return root, tuple(sorted(names))


def look_of(info: Mapping[str, Any]) -> Look | None:
    """Return the size and last change of a file from its store's ``info``; None if the store does not report both."""
    change = next((str(info[one]) for one in _CHANGES if info.get(one) not in (None, "")), "")  # an mtime of 0 is valid
    return Look(int(info["size"]), change) if change and info.get("size") is not None else None


class Found(NamedTuple):
    """The files of a source."""

    folder: Folder
    looks: dict[str, Look | None]
    """Name -> size and last change, or None if the listing lacks them; sorted by name."""
    hidden: tuple[str, ...]
    """Hidden files and folders, which are not read. A file in a hidden folder is listed as that folder."""


def find_files(source: str) -> Found:
    """List the files of ``source``: a file, folder or glob. Excludes hidden files, links to folders, and links that lead out of
    the source. CorpusError if the source is missing or cannot be reached, or if its store's client cannot request a file."""
    try:
        fixed, pattern = _cut_pattern(source)
        root = Folder(fixed, is_source=True)
        if pattern:
            found = root.glob(pattern)
        elif not root.exists():
            raise CorpusError(explain("corpus.source", source, "does not exist", "check the path or URL"))
        elif root.fs.isfile(root.path):
            look = look_of(root.fs.info(root.path))
            return _asked(Found(Folder(posixpath.dirname(root.url), is_source=True), {root.name: look}, ()))
        else:
            found = root.fs.find(root.path, detail=True)
        files = [path for path, info in found.items() if (_is_read(path) if root.is_local else _is_file(info))]
    except SpringtideError:
        raise
    except Exception as error:  # every object store raises its own errors
        raise CorpusError(
            explain("corpus.source", source, f"cannot be reached ({error})", _credentials(source))
        ) from error
    # skip hidden folders: .git and .aws may hold passwords; but a pattern that names a hidden folder reads it
    pattern_of_hidden = r"(^|/)\.[^/]*$" if "/." in f"/{pattern}" else r"(^|/)\.[^/]*"
    hides = {path: re.search(pattern_of_hidden, path[len(root.path) + 1 :]) for path in files}
    hidden = {path[len(root.path) + 1 :][: one.end()] for path, one in hides.items() if one}
    files = [path for path in files if not hides[path]]
    if root.is_local:
        files = _inside(root.path, source, files)
    looks = {path[len(root.path) + 1 :]: look_of(found[path]) for path in sorted(files)}
    return _asked(Found(root, looks, tuple(sorted(hidden))))


def _cut_pattern(source: str) -> tuple[str, str]:
    """Split a source into a folder or file, and a glob pattern below it, empty for all of it. The name of an existing file with
    ``*``, ``?`` or ``[`` is not a pattern: browsers name a second download ``x [2].jsonl``."""
    is_web = source.lower().startswith(("http://", "https://"))  # in a web URL, ? begins the query
    parts = source.split("/")
    if not any(map(_has_magic, parts)) or (not is_web and _exists(source)):
        return source, ""
    for end, part in enumerate(parts):
        if _has_magic(part) and (is_web or not _exists("/".join(parts[: end + 1]))):
            return "/".join(parts[:end]) or ("/" if end else "."), "/".join(parts[end:])
    return source, ""


def _has_magic(part: str) -> bool:
    return any(char in part for char in "*?[")


def _exists(url: str) -> bool:
    return Folder(url, is_source=True).exists()


def changed_files(source: str, seen: Mapping[str, Look | None]) -> list[str]:
    """Return the sorted names of the files in ``seen`` that were removed or changed, by a new listing of ``corpus.source``.

    Takes one listing, and no request per file. If listings lack size and last change, only removed files are found.

    Args:
        source: as for ``find_files``. Hub commits and Python's standard library are not checked, because they do not change.
        seen: name -> size and last change of the files in an earlier listing; None where that listing lacked them.
    """
    if source == "stdlib" or source.lower().startswith("hf://"):
        return []
    now = find_files(source).looks
    return sorted(name for name, look in seen.items() if name not in now or (look and now[name] not in (None, look)))


def _is_file(info: Mapping[str, Any]) -> bool:
    """Return whether an entry of a store's listing is a file: neither a folder nor the empty object that marks one."""
    return info["type"] != "directory" and not (info["name"].endswith("/") and not info["size"])


def _asked(found: Found) -> Found:
    """Return ``found`` if the store's client can request every file in it, else raise CorpusError."""
    for name in found.looks:
        if not found.folder.can_ask_for(name):
            problem = "has an empty part, '.', '..' or a control character in its name, which the client cannot ask for"
            remedy = "rename it, or give a glob that leaves it out"
            raise CorpusError(explain("corpus.source", found.folder.where(name), problem, remedy))
    return found


def _is_read(path: str) -> bool:
    """Return whether a local path is a file, or a link to a folder, which ``_inside`` excludes and reports."""
    return os.path.isfile(path) or (os.path.islink(path) and os.path.isdir(path))


def _inside(root: str, source: str, paths: list[str]) -> list[str]:
    """Return the local ``paths`` without links to folders and links that lead out of ``root``, and log how many there are. A
    folder that others made may link to any private file of ours."""
    inside = [path for path in paths if os.path.isfile(path) and stays_inside(path, root)]
    links, remedy = len(paths) - len(inside), "give the folder that they lead to, or copy the files (cp -rL)"
    what = f"{links} links that lead out of it or to a folder"
    if links and not inside:
        raise CorpusError(explain("corpus.source", source, f"holds only {what}", remedy))
    if links:
        _log.warning("%s: %s are not read; %s", source, what, remedy)
    return inside


def _credentials(source: str) -> str:
    """Return the remedy for a URL that cannot be read, such as which credentials to set."""
    return {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for your own server",
        "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud",
        "az": "set AZURE_STORAGE_CONNECTION_STRING",
        "abfs": "set AZURE_STORAGE_CONNECTION_STRING",
    }.get(source.partition("://")[0], "check the path, its permissions and the network")
