"""Bytes at a path, committed or absent. Rule: only this package opens files that others will read; a name that can be
seen is complete."""

from springtide.store.cache import Cache
from springtide.store.folder import Folder

__all__ = ["Cache", "Folder"]
