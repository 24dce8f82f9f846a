"""Documents from somewhere: Python's own library, a file, a folder, a glob, any fsspec URL."""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import sysconfig
from collections.abc import Iterator

from springtide.errors import CorpusError, explain
from springtide.store import Folder

_LEFT_OUT = (
    *("/site-packages/", "/__pycache__/", "/ensurepip/", "/test/", "/tests/", "/idlelib/", "/lib2to3/"),
    *("/encodings/", "/pydoc_data/"),  # tables, not code
)


@dataclasses.dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    """Path below the source."""
    text: str

    @property
    def digest(self) -> bytes:
        """16 bytes over the text alone, so that the same document is the same wherever it lies."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder and the files in it that are documents; each file is one."""

    folder: Folder
    names: tuple[str, ...]

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or rewritten; reads no contents."""
        state = hashlib.blake2b(digest_size=16)
        for name in self.names:
            info = self.folder.fs.info(self.folder.where(name))
            changed = info.get("mtime") or info.get("ETag") or info.get("LastModified") or ""
            state.update(f"{name}\0{info['size']}\0{changed}\n".encode())
        return state.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Every file as text, in the order of names. Bytes that are not UTF-8 become U+FFFD; empty files are left out."""
        for name in self.names:
            text = self.folder.read(name).decode("utf-8", errors="replace")
            if text.strip():
                yield Document(name, text)


def open_source(source: str, max_documents: int = 0) -> Source:
    """Find the documents of ``corpus.source``; CorpusError when it is missing or holds none."""
    found = _stdlib() if source == "stdlib" else _files(source)
    if not found.names:
        raise CorpusError(
            explain("corpus.source", source, "holds no files", "point it at text files, a folder or a glob")
        )
    return dataclasses.replace(found, names=found.names[: max_documents or None])


def _stdlib() -> Source:
    root = Folder(sysconfig.get_path("stdlib"))
    paths = (str(path) for path in root.fs.find(root.path))
    names = (path[len(root.path) + 1 :] for path in paths if path.endswith(".py"))
    return Source(root, tuple(sorted(name for name in names if not any(part in f"/{name}" for part in _LEFT_OUT))))


def _files(source: str) -> Source:
    is_glob = any(char in source for char in "*?[")
    fixed = posixpath.dirname(source[: min(source.find(c) for c in "*?[" if c in source)]) if is_glob else source
    root = Folder(fixed or ".")
    if is_glob:
        pattern = source[len(fixed) :].lstrip("/")
        paths = root.fs.glob(posixpath.join(root.path, pattern))
    elif not root.exists():
        raise CorpusError(explain("corpus.source", source, "does not exist", "check the path or URL"))
    elif root.fs.isfile(root.path):
        root, paths = Folder(posixpath.dirname(root.url)), [root.path]
    else:
        paths = root.fs.find(root.path)
    files = (str(path) for path in paths if root.fs.isfile(path))
    names = (path[len(root.path) + 1 :] for path in files)
    return Source(root, tuple(sorted(name for name in names if not posixpath.basename(name).startswith("."))))
