"""Find the files of a source."""

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
    *("encodings", "pydoc_data"),  # tables, not code
}
_CHANGES = ("mtime", "ETag", "etag", "blob_id", "LastModified", "last_modified", "Last-Modified", "created")
"""What stores call the property of a file that changes when it is rewritten."""


class Look(NamedTuple):
    """How a file looks without reading it."""

    size: int
    """[bytes]"""
    change: str
    """What changes when it is rewritten."""


def library_files() -> tuple[Folder, tuple[str, ...]]:
    """Return the folder of the running Python's own library, and its files without tests and tables."""
    root = Folder(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root.path):
        folders[:] = [
            name for name in folders if name not in _LEFT_OUT
        ]  # site-packages may be a hundred times as large as the rest
        names += [os.path.relpath(os.path.join(folder, name), root.path) for name in files if name.endswith(".py")]
    return root, tuple(sorted(names))


def look_of(info: Mapping[str, Any]) -> Look | None:
    """Return the size and the last change of a file from what its store says of it; None if it does not say both."""
    change = next((str(info[one]) for one in _CHANGES if info.get(one) not in (None, "")), "")  # an mtime may be 0
    return Look(int(info["size"]), change) if change and info.get("size") is not None else None


class Found(NamedTuple):
    """The files of a source."""

    folder: Folder
    looks: dict[str, Look | None]
    """By name, sorted."""
    hidden: tuple[str, ...]
    """Hidden files and folders, which are not read: names as far as the part that hides them."""


def find_files(source: str) -> Found:
    """Return the files of a file, folder or glob, as one listing tells them; hidden ones and links that lead out of it or to a
    folder are excluded. CorpusError if it is missing, cannot be reached, or has a file that the client of its store cannot ask
    for."""
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
    # .git and .aws have passwords; a pattern that names a hidden folder wants it
    pattern_of_hidden = r"(^|/)\.[^/]*$" if "/." in f"/{pattern}" else r"(^|/)\.[^/]*"
    hides = {path: re.search(pattern_of_hidden, path[len(root.path) + 1 :]) for path in files}
    hidden = {path[len(root.path) + 1 :][: one.end()] for path, one in hides.items() if one}
    files = [path for path in files if not hides[path]]
    if root.is_local:
        files = _inside(root.path, source, files)
    looks = {path[len(root.path) + 1 :]: look_of(found[path]) for path in sorted(files)}
    return _asked(Found(root, looks, tuple(sorted(hidden))))


def _cut_pattern(source: str) -> tuple[str, str]:
    """Return the folder or file that a source names, and the pattern below it, empty if it names all. What exists under a name
    with ``*``, ``?`` or ``[`` is no pattern: browsers call a second download ``x [2].jsonl``."""
    is_web = source.lower().startswith(("http://", "https://"))  # a ? begins the query there
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
    """Return the names of the files of ``seen`` that a new listing of ``corpus.source`` lacks or shows otherwise, sorted.

    One listing, and no request for a file; where a listing does not tell how files look, only those that are gone are found.

    Args:
        source: as for ``find_files``; a commit of the Hub and Python's own library do not change, and are not looked at.
        seen: files of the source, by name, as an earlier listing told them.
    """
    if source == "stdlib" or source.lower().startswith("hf://"):
        return []
    now = find_files(source).looks
    return sorted(name for name, look in seen.items() if name not in now or (look and now[name] not in (None, look)))


def _is_file(info: Mapping[str, Any]) -> bool:
    """Return whether an entry of a store's listing is a file: neither a folder nor the empty object that marks one."""
    return info["type"] != "directory" and not (info["name"].endswith("/") and not info["size"])


def _asked(found: Found) -> Found:
    """Return ``found``. CorpusError if the client of the store cannot ask for one of the files."""
    for name in found.looks:
        if not found.folder.can_ask_for(name):
            problem = "has an empty part, '.', '..' or a control character in its name, which the client cannot ask for"
            remedy = "rename it, or give a glob that leaves it out"
            raise CorpusError(explain("corpus.source", found.folder.where(name), problem, remedy))
    return found


def _is_read(path: str) -> bool:
    """Return whether a local path is a file, or a link to a folder, which ``_inside`` counts."""
    return os.path.isfile(path) or (os.path.islink(path) and os.path.isdir(path))


def _inside(root: str, source: str, paths: list[str]) -> list[str]:
    """Return the local ``paths`` without links to folders, and without those that lead out of ``root``: what others made may
    link to any file of ours."""
    inside = [path for path in paths if os.path.isfile(path) and stays_inside(path, root)]
    links, remedy = len(paths) - len(inside), "give the folder that they lead to, or copy the files (cp -rL)"
    what = f"{links} links that lead out of it or to a folder"
    if links and not inside:
        raise CorpusError(explain("corpus.source", source, f"holds only {what}", remedy))
    if links:
        _log.warning("%s: %s are not read; %s", source, what, remedy)
    return inside


def _credentials(source: str) -> str:
    """Return a remedy for a URL that cannot be read: the credentials to set."""
    return {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for your own server",
        "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud",
        "az": "set AZURE_STORAGE_CONNECTION_STRING",
        "abfs": "set AZURE_STORAGE_CONNECTION_STRING",
    }.get(source.partition("://")[0], "check the path, its permissions and the network")
