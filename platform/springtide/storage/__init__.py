"""Files that are complete or absent: a reader never sees half a file.

Layer rule: only this package opens files that other processes will read.
"""

from springtide.storage.cache import Cache
from springtide.storage.folder import Folder
from springtide.storage.plain_json import most_values, to_json

__all__ = ["Cache", "Folder", "most_values", "to_json"]
