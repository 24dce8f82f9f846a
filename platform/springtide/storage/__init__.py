"""Write files so that each is complete or absent: a reader never sees half a file.

Layer rule: a package that writes a file for other processes to read must write the file through this package.
"""

from springtide.storage.cache import Cache
from springtide.storage.folder import Folder
from springtide.storage.plain_json import most_values, to_json

__all__ = ["Cache", "Folder", "most_values", "to_json"]
