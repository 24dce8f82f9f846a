"""Import and export of models in the formats of transformers and PEFT. Tables map the names of tensors; tensors are copied as
ranges of bytes.

In this package "their" and "theirs" mean transformers', "our" and "ours" springtide's. Layer rule: at most a few rows of one
tensor are in memory at a time. All names, types and offsets in an untrusted file are checked before its tensors are read.
"""

from springtide.hf.adapters import export_adapter
from springtide.hf.export_files import Exported
from springtide.hf.hf_config import FILE as HF_CONFIG
from springtide.hf.hf_export import export_checkpoint
from springtide.hf.hf_files import GENERATION
from springtide.hf.hf_import import ImportedModel, model_folder, open_model, read_weights, write_checkpoint
from springtide.hf.hf_tokenizer import their_template
from springtide.hf.peft_import import with_adapter

__all__ = [
    "GENERATION",
    "HF_CONFIG",
    "Exported",
    "ImportedModel",
    "export_adapter",
    "export_checkpoint",
    "model_folder",
    "open_model",
    "read_weights",
    "their_template",
    "with_adapter",
    "write_checkpoint",
]
