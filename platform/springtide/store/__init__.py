"""Files that are committed or absent. Layer rule: only this package opens files that others will read; a name that is visible
is complete."""

from springtide.store.cache import Cache
from springtide.store.folder import Folder
from springtide.store.plain_json import most_values, to_json

__all__ = ["Cache", "Folder", "most_values", "to_json"]
