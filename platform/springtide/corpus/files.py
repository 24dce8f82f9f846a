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
    *("encodings", "pydoc_data"),  # these folders hold tables of data, not code
}
_CHANGES = ("mtime", "ETag", "etag", "blob_id", "LastModified", "last_modified", "Last-Modified", "created")
"""Keys in a store's listing of a file. Their values change when the file is rewritten. Stores use different keys."""


class Look(NamedTuple):
    """Size and last change of a file, by which a rewrite is detected without reading it."""

    size: int
    """Size of the file [bytes]."""
    change: str
    """A value that changes when the file is rewritten, such as the time of modification or the ETag."""


def library_files() -> tuple[Folder, tuple[str, ...]]:
    """Return the folder of the running Python's standard library, and the names of its .py files, without tests and data
    tables."""
    root = Folder(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root.path):
        folders[:] = [
            name for name in folders if name not in _LEFT_OUT
        ]  # site-packages may be a hundred times as large as the library
        names += [os.path.relpath(os.path.join(folder, name), root.path) for name in files if name.endswith(".py")]
    return root, tuple(sorted(names))


def look_of(info: Mapping[str, Any]) -> Look | None:
    """Return the size and last change of a file from ``info``, the entry in its store's listing. Return None if one of the two
    is missing."""
    change = next((str(info[one]) for one in _CHANGES if info.get(one) not in (None, "")), "")  # an mtime of 0 is valid
    return Look(int(info["size"]), change) if change and info.get("size") is not None else None


class Found(NamedTuple):
    """The files of a source."""

    folder: Folder
    looks: dict[str, Look | None]
    """File name -> size and last change; sorted by name. The value is None if the store's listing lacks size or last
    change."""
    hidden: tuple[str, ...]
    """Hidden files and folders, which are not read. For files in a hidden folder, only the folder is listed."""


def find_files(source: str) -> Found:
    """List the files of ``source``: a file, folder or glob. Excludes hidden files, links to folders, and links that lead out of
    the source. Raises CorpusError if the source does not exist or cannot be reached, or if the store's client cannot request a
    file because of its name."""
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
    except Exception as error:  # each object store raises errors of its own types
        raise CorpusError(
            explain("corpus.source", source, f"cannot be reached ({error})", _credentials(source))
        ) from error
    # skip hidden files and folders, because .git and .aws may hold passwords; read a hidden folder if the glob names it
    pattern_of_hidden = r"(^|/)\.[^/]*$" if "/." in f"/{pattern}" else r"(^|/)\.[^/]*"
    hides = {path: re.search(pattern_of_hidden, path[len(root.path) + 1 :]) for path in files}
    hidden = {path[len(root.path) + 1 :][: one.end()] for path, one in hides.items() if one}
    files = [path for path in files if not hides[path]]
    if root.is_local:
        files = _inside(root.path, source, files)
    looks = {path[len(root.path) + 1 :]: look_of(found[path]) for path in sorted(files)}
    return _asked(Found(root, looks, tuple(sorted(hidden))))


def _cut_pattern(source: str) -> tuple[str, str]:
    """Split a source into a folder or file, and a glob pattern below the folder. The pattern is empty if the source has none.
    An existing file whose name has ``*``, ``?`` or ``[`` is not a pattern: browsers name a second download ``x [2].jsonl``."""
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
    """List ``source`` again, and return the sorted names of the files in ``seen`` that were removed or changed since then.

    Needs one listing, and no request per file. If the store's listing lacks size or last change, only removed files are found.

    Args:
        source: a file, folder or glob, the value of ``corpus.source``. A commit on the Hugging Face Hub and Python's standard
            library are not checked, because they do not change.
        seen: file name -> size and last change in an earlier listing; None if the earlier listing lacked them.
    """
    if source == "stdlib" or source.lower().startswith("hf://"):
        return []
    now = find_files(source).looks
    return sorted(name for name, look in seen.items() if name not in now or (look and now[name] not in (None, look)))


def _is_file(info: Mapping[str, Any]) -> bool:
    """Return whether an entry of a store's listing is a file: neither a folder nor the empty object that marks a folder."""
    return info["type"] != "directory" and not (info["name"].endswith("/") and not info["size"])


def _asked(found: Found) -> Found:
    """Return ``found`` unchanged. Raise CorpusError if it has a file name that the store's client cannot request."""
    for name in found.looks:
        if not found.folder.can_ask_for(name):
            problem = "has an empty part, '.', '..' or a control character in its name, which the client cannot ask for"
            remedy = "rename it, or give a glob that leaves it out"
            raise CorpusError(explain("corpus.source", found.folder.where(name), problem, remedy))
    return found


def _is_read(path: str) -> bool:
    """Return whether a local path is a file or a link to a folder. ``_inside`` later removes links to folders and logs them."""
    return os.path.isfile(path) or (os.path.islink(path) and os.path.isdir(path))


def _inside(root: str, source: str, paths: list[str]) -> list[str]:
    """Return the local ``paths`` without links to folders and links that lead out of the folder ``root``; log their number.
    Otherwise a folder made by others could link to private files of this machine."""
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
