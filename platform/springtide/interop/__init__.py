"""Models in and out: the formats of others, as tables of names and streams of byte ranges.

Layer rule: no more than a few rows of one tensor are in memory, and every number of a file from outside is checked before a
byte of its data is read.
"""

from springtide.interop.adapters import export_adapter
from springtide.interop.export_files import Exported
from springtide.interop.hf_config import FILE as HF_CONFIG
from springtide.interop.hf_export import export_checkpoint
from springtide.interop.hf_import import ImportedModel, open_model, write_checkpoint

__all__ = [
    "HF_CONFIG",
    "Exported",
    "ImportedModel",
    "export_adapter",
    "export_checkpoint",
    "open_model",
    "write_checkpoint",
]
