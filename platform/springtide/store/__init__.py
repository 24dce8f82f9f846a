"""Files that are committed or absent. Layer rule: only this package opens files that others will read; a name that is visible
is complete."""

from springtide.store.cache import Cache
from springtide.store.folder import Folder

__all__ = ["Cache", "Folder"]
