"""Files that are committed or absent. Layer rule: only this package opens files that others will read; a name that is visible
is complete."""

from springtide.storage.cache import Cache
from springtide.storage.folder import Folder
from springtide.storage.plain_json import most_values, to_json

__all__ = ["Cache", "Folder", "most_values", "to_json"]
