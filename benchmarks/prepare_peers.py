"""datatrove, the peer of ``prepare.py``, in an interpreter of its own: its dependencies and ours exclude each other.

    python prepare_peers.py alone|deduplicated TEXTS TOKENIZER.json FOLDER     prints one line of JSON

TEXTS is a folder of .jsonl files, one for each task. "alone": read, tokenise, shuffle the documents, write. "deduplicated":
first MinHash in datatrove's own steps, which drops exact copies, too; then the same. There is a process for each core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import claims
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from loguru import logger

_CORES = os.cpu_count() or 1


def run(folder: Path, tasks: int, *steps: Any) -> None:
    """Run a pipeline."""
    LocalPipelineExecutor(
        list(steps), tasks=tasks, workers=min(tasks, _CORES), logging_dir=str(folder), start_method="spawn"
    ).run()


def main() -> None:
    """Prepare, and say how long it took."""
    kind, texts, tokenizer, name = sys.argv[1:]
    logger.remove()
    folder, tasks = Path(name), len(list(Path(texts).glob("*.jsonl")))

    def place(part: str) -> str:
        return str(folder / part)

    begin = time.perf_counter()
    read, kept = JsonlReader(texts, doc_progress=False), []
    if kind == "deduplicated":
        config = MinhashConfig()
        signatures, pairs, ids = place("signatures"), place("pairs"), place("ids")
        run(folder / "1", tasks, read, MinhashDedupSignature(signatures, config))
        run(folder / "2", config.num_buckets, MinhashDedupBuckets(signatures, pairs, config=config))
        run(folder / "3", 1, MinhashDedupCluster(pairs, ids, config=config))
        kept = [MinhashDedupFilter(ids)]
    write = DocumentTokenizer(place("tokens"), tokenizer, eos_token="<|endoftext|>", seed=0)
    run(folder / "4", tasks, read, *kept, write)
    seconds = time.perf_counter() - begin
    tokens = sum(file.stat().st_size for file in Path(place("tokens")).glob("*.ds")) // 2
    print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_mib": claims.peak_mib()}))


if __name__ == "__main__":
    main()
