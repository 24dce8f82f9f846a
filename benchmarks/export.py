"""What an export to the format of transformers costs: memory, against the largest tensor, and speed, against a copy.

    memory     peak of the exporting process over what it had when it began, against the size of the largest tensor
    speed      the export, against a copy of the checkpoint's data files by shutil.copyfile, synced as the export is; both read
               from the page cache, in alternation, and the best of each counts: the disk is everybody's

The checkpoint is of one process, in fp32, with an embedding as large as all of its blocks. Each measurement is a fresh process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import claims

LAYERS = 4


def written(folder: str, mib: float) -> int:
    """Write a checkpoint with an embedding of ``mib``; returns the size of that."""
    import torch

    from springtide.checkpoint.format import Meta
    from springtide.checkpoint.weights_only import write_weights
    from springtide.config import Config
    from springtide.hf.families import FAMILIES
    from springtide.model import skeleton
    from springtide.run.folder import Run
    from springtide.storage import Folder

    width = 1024
    rows = int(mib * 2**20 / 4 / width)
    shape = {"dim": width, "ffn_dim": 3 * width, "num_layers": LAYERS, "num_heads": 8, "num_kv_heads": 4}
    config = Config().override({f"model.{key}": value for key, value in shape.items()} | {"model.vocab_size": rows})
    tensors = {f"model/{name}": tuple(one.shape) for name, one in skeleton(config.model, rows).named_parameters()}
    assert {f"model/{one}" for match in FAMILIES["LlamaForCausalLM"].tensors(config.model) for one in match.ours} == {
        *tensors
    }
    meta = Meta(step=1, tokens=1, world_size=1, order_identity="o", config_fingerprint="c")
    kinds = {name: ("F32", shape) for name, shape in tensors.items()}
    noise = torch.randint(0, 256, (2**20,), dtype=torch.uint8)

    def data(one: Any) -> torch.Tensor:
        return noise.repeat(-(-one.size_bytes // len(noise)))[: one.size_bytes]

    write_weights(Folder(folder), meta, config.model_dump(mode="json"), kinds, data)
    Run(Folder(folder)).write_config(config)
    return rows * width * 4


def export(run: str, out: str) -> dict[str, Any]:
    """Seconds of an export, its bytes, and the memory that the process had when it began [MiB]."""
    from springtide.run.exchange import export_model
    from springtide.run.folder import open_run

    opened = open_run(run)
    assert opened.checkpoints
    before = claims.peak_mib()
    begin = time.perf_counter()
    found = export_model(opened, out)
    return {"seconds": time.perf_counter() - begin, "bytes": found.size_bytes, "before_mib": before}


def copy(run: str, out: str) -> dict[str, Any]:
    """Seconds of a copy of the data files."""
    os.mkdir(out)
    files = sorted(Path(run).glob("checkpoints/*/*.safetensors"))
    begin = time.perf_counter()
    for file in files:
        target = Path(out) / file.name
        shutil.copyfile(file, target)
        with target.open("rb+") as written:
            os.fsync(written.fileno())
    return {"seconds": time.perf_counter() - begin, "bytes": sum(file.stat().st_size for file in files)}


def main() -> None:
    """Measure, and print the claims."""
    options = claims.options(__doc__, rounds=5, text="folder", mib=(512, 64))
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        run, out = f"{folder}/run", f"{folder}/out"
        largest = written(run, options.mib)
        found: dict[str, list[dict[str, Any]]] = {"export": [], "copy": []}
        for number in range(options.rounds):
            for name, function in (("export", export), ("copy", copy)):
                os.sync()
                found[name].append(claims.alone(function, run, f"{out}-{name}-{number}"))
                shutil.rmtree(f"{out}-{name}-{number}")
    rate = {name: max(one["bytes"] / one["seconds"] for one in rounds) for name, rounds in found.items()}
    memory = max((one["peak_mib"] - one["before_mib"]) * 2**20 for one in found["export"]) / largest
    detail = {"largest_mib": round(largest / 2**20), "mib": round(found["export"][0]["bytes"] / 2**20)}
    rates = {name: round(one / 2**20) for name, one in rate.items()}
    shown = [
        claims.claim("export_memory_vs_largest_tensor", memory, 1.2, "lower", detail),
        claims.claim("export_vs_copy", rate["export"] / rate["copy"], 0.8, "higher", {**detail, "mib_per_s": rates}),
    ]
    claims.show(options, shown)


if __name__ == "__main__":
    main()
