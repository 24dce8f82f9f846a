"""Play inputs.

python -m fuzz SEED                              one again, with what it is
python -m fuzz --seeds 0 100000 --jobs 2         many
python -m fuzz --seeds 0 5000 --target journal   of one target alone
python -m fuzz --seeds 0 4000 --defect holes     until one finds this defect, planted back
python -m fuzz --seeds 0 4000 --table            each mended defect, planted back, and the seed that finds it
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")

from fuzz import data_files, defects, model_files, run_files, sweep_files
from fuzz.child import Outcome, play
from fuzz.target import TOLD, Target

TARGETS: tuple[type[Target], ...] = (
    *run_files.TARGETS,
    *data_files.TARGETS,
    *sweep_files.TARGETS,
    *model_files.TARGETS,
)
_CHUNK = 12_500
"""Inputs of one process with ``--jobs``."""


def main() -> int:
    """Exit status 1 if an input found something, or a defect was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "END"), default=(0, 1000))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--target", choices=[one.name for one in TARGETS])
    parser.add_argument("--defect", choices=sorted(defects.DEFECTS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--counts", metavar="FILE", help="add the counts to this JSON file")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")
    seeds = range(*options.seeds) if options.seed is None else range(options.seed, options.seed + 1)
    if options.jobs > 1:
        return _spread(seeds, options.jobs)
    logging.getLogger().addHandler(TOLD)
    logging.getLogger("springtide").propagate = True
    with tempfile.TemporaryDirectory(prefix="springtide-fuzz-") as folder:
        if options.table or options.defect:
            planted = [options.defect] if options.defect else list(defects.DEFECTS)
            return max([_find(defect, seeds, Path(folder)) for defect in planted])
        wanted = [one for one in TARGETS if options.target in (None, one.name)]
        targets = [one(Path(folder, one.name)) for one in wanted]
        counts: collections.Counter[str] = collections.Counter()
        began_s, found = time.monotonic(), 0
        for outcome in play(seeds, targets):
            counts[f"{outcome.target} {outcome.result}"] += 1
            if outcome.result == "VIOLATION" or options.seed is not None:
                found += outcome.result == "VIOLATION"
                print(_shown(outcome), flush=True)
        _report(counts, options.counts)
        print(f"{len(seeds)} inputs, {found} violations, {time.monotonic() - began_s:.0f} s", flush=True)
    return int(found > 0)


def _shown(one: Outcome) -> str:
    return f"seed {one.seed}: {one.target}: {one.file} ({one.what}): {one.result} {one.detail}"


def _report(counts: collections.Counter[str], file: str | None) -> None:
    if file:
        earlier = json.loads(Path(file).read_text()) if Path(file).exists() else {}
        Path(file).write_text(json.dumps(counts + collections.Counter(earlier), indent=1, sort_keys=True))
    by_target: dict[str, list[str]] = {}
    for name, count in sorted(counts.items()):
        target, result = name.split(" ")
        by_target.setdefault(target, []).append(f"{count} {result}")
    for target, results in by_target.items():
        print(f"  {target}: {', '.join(results)}")


def _find(defect: str, seeds: Sequence[int], folder: Path) -> int:
    """Plant a defect, and look for the first input that finds it."""
    planted = defects.DEFECTS[defect]
    [kind] = [one for one in TARGETS if one.name == planted.target]
    target = kind(folder / defect)
    with planted.plant():
        for count, outcome in enumerate(_of_target(seeds, target), 1):
            if outcome.result == "VIOLATION":
                print(f"{defect}: found by input {count} of {target.name}: {outcome.detail}", flush=True)
                return 0
    print(f"{defect}: not found by {len(seeds)} inputs", flush=True)
    return 1


def _of_target(seeds: Sequence[int], target: Target) -> Iterable[Outcome]:
    return play(seeds, [target])


def _spread(seeds: range, jobs: int) -> int:
    """Play the seeds in several processes; their lines come as they do."""
    left, running, worst = list(seeds[::_CHUNK]), [], 0
    with tempfile.TemporaryDirectory() as folder:
        files = []
        while left or running:
            while left and len(running) < jobs:
                first = left.pop(0)
                files.append(Path(folder, f"{first}.json"))
                ends = [str(first), str(min(first + _CHUNK, seeds.stop)), "--counts", str(files[-1])]
                running.append(subprocess.Popen([sys.executable, "-m", "fuzz", "--seeds", *ends]))
            worst = max(worst, running.pop(0).wait())
        whole: collections.Counter[str] = collections.Counter()
        for file in files:
            whole += collections.Counter(json.loads(file.read_text())) if file.exists() else collections.Counter()
    print("all:")
    _report(whole, None)
    print(f"{sum(whole.values())} inputs: {'nothing found' if not worst else 'see above'}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
