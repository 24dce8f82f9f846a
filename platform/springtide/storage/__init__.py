"""Write files so that each is complete or absent: a reader never sees half a file.

Layer rule: other packages write files that other processes read only through this package.
"""

from springtide.storage.cache import Cache
from springtide.storage.folder import Folder
from springtide.storage.plain_json import most_values, to_json

__all__ = ["Cache", "Folder", "most_values", "to_json"]
