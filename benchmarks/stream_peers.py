"""The peers of ``stream.py``, in an interpreter of their own: their dependencies and ours exclude each other.

    python stream_peers.py write mosaicml|litdata ROWS.npy FOLDER
    python stream_peers.py read  mosaicml|litdata URL LENGTH BATCH WORKERS CACHE     prints one line of JSON

Each writes the rows of ROWS.npy, uint16 (rows, length), in its own format with its own defaults, uncompressed, and reads one
shuffled epoch of them as batches of a torch DataLoader.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

_START = time.perf_counter()
_SLICES = 64

import claims  # noqa: E402 - the clock above starts first
import numpy as np  # noqa: E402
import torch  # noqa: E402


@functools.cache  # an operator lives as long as its library
def let_torchvision_load() -> torch.library.Library:
    """mosaicml-streaming and transformers import torchvision. Beside a CPU torch, one built for CUDA stops at operators
    that are missing; declaring them is enough, for nothing here calls them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms") if torch.version.cuda is None else ():
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def write_mosaicml(source: str, folder: str) -> None:
    let_torchvision_load()
    from streaming import MDSWriter

    rows = np.load(source, mmap_mode="r")
    with MDSWriter(out=folder, columns={"tokens": f"ndarray:uint16:{rows.shape[1]}"}) as writer:
        for row in rows:
            writer.write({"tokens": row})


def write_litdata(source: str, folder: str) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        functools.partial(_slice, source),
        list(range(_SLICES)),
        folder,
        chunk_bytes="64MB",
        item_loader=TokensLoader(block_size=np.load(source, mmap_mode="r").shape[1]),
        num_workers=1,
        verbose=False,
    )


def _slice(source: str, number: int) -> Iterator[np.ndarray]:
    yield from np.array_split(np.load(source, mmap_mode="r"), _SLICES)[number]


def open_mosaicml(url: str, length: int, batch: int, workers: int, cache: str) -> Any:
    let_torchvision_load()
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    # every sample is a dict of one array, which torch's own collation stacks
    place = {"remote": url, "local": cache} if "://" in url else {"local": url}
    data = StreamingDataset(**place, shuffle=True, batch_size=batch)
    return DataLoader(data, batch_size=batch, num_workers=workers, drop_last=True)


def open_litdata(url: str, length: int, batch: int, workers: int, cache: str) -> Any:
    import litdata
    from litdata.streaming import downloader

    remote = "://" in url
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the server is on loopback, without TLS
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]} if remote else {}
    data = litdata.StreamingDataset(
        litdata.streaming.dataset.Dir(path=cache, url=url) if remote else url,
        item_loader=litdata.TokensLoader(block_size=length),
        shuffle=True,
        drop_last=True,
        storage_options=options,
    )
    return litdata.StreamingDataLoader(data, batch_size=batch, num_workers=workers)


def main() -> None:
    action, peer, *rest = sys.argv[1:]
    if action == "write":
        source, folder = rest
        {"mosaicml": write_mosaicml, "litdata": write_litdata}[peer](source, folder)
        return
    url, *numbers, cache = rest
    length, batch, workers = map(int, numbers)
    loader = {"mosaicml": open_mosaicml, "litdata": open_litdata}[peer](url, length, batch, workers, cache)
    arrays = ((found["tokens"] if isinstance(found, dict) else found).numpy() for found in loader)
    found = claims.read_through(arrays, _START)
    found["peak_mib"] = claims.peak_mib()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
