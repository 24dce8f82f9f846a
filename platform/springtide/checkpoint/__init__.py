"""A step you can come back to, at another world size. Law: committed last; no file belongs to a rank's own history."""

from springtide.checkpoint.layout import Meta, committed, name_of, read_manifest
from springtide.checkpoint.load import load_tensors, problem, restore
from springtide.checkpoint.save import save

__all__ = ["Meta", "committed", "load_tensors", "name_of", "problem", "read_manifest", "restore", "save"]
