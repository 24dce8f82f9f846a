"""Write token ids as Parquet shards with a checksummed manifest, and read them. Rule: the manifest is written last. A folder
without a manifest is not a dataset, and a dataset with a manifest is sealed: it never changes."""

from springtide.shards.labels import (
    LABELS,
    Columns,
    LabelLayout,
    LabelReader,
    Labels,
    check_labels,
    id_type,
    label_file,
    load_labels,
    write_labels,
)
from springtide.shards.loss_mask import ids_of, is_predicted, masked, memory_type, most_ids, signed
from springtide.shards.manifest import (
    CHAT_TEMPLATE,
    HELDOUT,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    Manifest,
    Split,
    load_manifest,
    write_manifest,
)
from springtide.shards.packing import best_fit, shuffle_rows
from springtide.shards.row_group_index import ROW_GROUPS
from springtide.shards.shard_file import SplitReader, check_shard, write_shard
from springtide.shards.shard_table import Rows, Shard, ShardTable

__all__ = [
    "CHAT_TEMPLATE",
    "HELDOUT",
    "LABELS",
    "MANIFEST",
    "ROW_GROUPS",
    "TOKENIZER",
    "TRAIN",
    "Columns",
    "LabelLayout",
    "LabelReader",
    "Labels",
    "Manifest",
    "Rows",
    "Shard",
    "ShardTable",
    "Split",
    "SplitReader",
    "best_fit",
    "check_labels",
    "check_shard",
    "id_type",
    "ids_of",
    "is_predicted",
    "label_file",
    "load_labels",
    "load_manifest",
    "masked",
    "memory_type",
    "most_ids",
    "shuffle_rows",
    "signed",
    "write_labels",
    "write_manifest",
    "write_shard",
]
