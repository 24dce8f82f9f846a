"""How long a new node takes to have a block ready: with no compiled code, with the run's, and with its own of before.

Each node is a process with a folder of compiled code of its own; the run's folder is common. ``python cold.py RUN`` is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD_S = 120.0


def nodes() -> dict[str, dict[str, Any]]:
    """What each of three nodes says: cold, a new one with the run's code, and that one again."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, node in {"cold": "first", "with the run's code": "second", "again": "second"}.items():
            here = {"HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{node}"}
            command = [sys.executable, str(Path(__file__).resolve()), f"{folder}/run"]
            done = subprocess.run(
                command, env=os.environ | here, capture_output=True, text=True, timeout=CHILD_S, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Compile a block of 8B's shape with documents apart, and keep the code with the run."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch
    from measure import CUDA, DEVICE

    from springtide import config as configs
    from springtide.model.decoder import Decoder
    from springtide.model.flex import block_mask
    from springtide.parallel.compiled import compile_block, compiled_flex
    from springtide.store import Folder
    from springtide.training.compile_cache import CompileCache, key_of
    from springtide.training.group_lease import GroupLease

    length, recipe = (8192, configs.recipes.llama3_8b) if CUDA else (64, configs.recipes.tiny)
    config = recipe().override({"parallel.compile": True, "model.num_layers": 1})
    run = Folder(sys.argv[1])
    compiled, begin = CompileCache(run, key_of(run, config), config), time.perf_counter()
    loaded = compiled.load(DEVICE)
    load_s = time.perf_counter() - begin
    model = Decoder(config.model, 256, 0).to(DEVICE, torch.bfloat16)
    model.place(DEVICE)
    block, mask = model.blocks[0], None
    if CUDA:
        model.attend_by(compiled_flex())
        mask = block_mask(torch.zeros(1, length, dtype=torch.int64, device=DEVICE))
    compile_block(block)
    x = torch.randn(1, length, config.model.dim, device=DEVICE, dtype=next(block.parameters()).dtype)
    begin = time.perf_counter()
    block(x, model.cos[:length], model.sin[:length], mask).sum().backward()
    if CUDA:
        torch.cuda.synchronize()
    ready_s = time.perf_counter() - begin
    lease = GroupLease(run, "", "")
    lease.term = lease.claim()
    name, begin = compiled.name(DEVICE, 1), time.perf_counter()
    saved = compiled.save(name, lease, lease.term)
    said = {"loaded": int(loaded), "load_s": load_s, "ready_s": ready_s, "saved": int(saved)}
    said |= {"save_s": time.perf_counter() - begin, "file_mb": run.size(name) / 1e6 if run.exists(name) else 0.0}
    print(json.dumps({key: round(value, 3) for key, value in said.items()}, allow_nan=False))


if __name__ == "__main__":
    main()
