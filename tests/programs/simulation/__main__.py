"""Play schedules of faults.

python -m simulation SEED                          one again, with all that happens, and the digest of its history
python -m simulation SEED --watched                and what springtide calls that a schedule must not depend on
python -m simulation --seeds 0 200 --digests       the digest of each
python -m simulation --seeds 0 20000 --jobs 2      many
python -m simulation --seeds 0 2000 --defect A3    until one finds this defect, planted back
python -m simulation --seeds 0 2000 --table        each defect, and the seed that finds it
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from simulation.defects import DEFECTS
from simulation.play import play

_CHUNK = 250
"""Seeds of one process: its memory is freed now and then."""


def main() -> int:
    """Exit status 1 if a seed found something, or a defect was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "END"), default=(0, 300))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--defect", choices=sorted(DEFECTS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--watched", action="store_true")
    options = parser.parse_args()
    if options.seed is not None:
        return _play(range(options.seed, options.seed + 1), verbose=True, watched=options.watched)
    seeds = range(*options.seeds)
    if options.table:
        return max([_find(defect, seeds) for defect in DEFECTS])
    if options.defect:
        return _find(options.defect, seeds)
    return (
        _spread(seeds, options.jobs)
        if options.jobs > 1
        else _play(seeds, digests=options.digests, watched=options.watched)
    )


def _play(seeds: range, verbose: bool = False, digests: bool = False, watched: bool = False) -> int:
    begin, found = time.process_time(), 0
    for seed in seeds:
        outcome = play(seed, verbose=verbose, watched=watched)
        violations = outcome.violations
        if verbose or digests:
            print(f"seed {seed}: {outcome.digest}", flush=True)
        for one in violations:
            print(f"seed {seed}: {one}", flush=True)
        found += bool(violations)
    print(f"{len(seeds)} seeds, {found} found something, {time.process_time() - begin:.0f} s of CPU", flush=True)
    return int(found > 0)


def _find(defect: str, seeds: range) -> int:
    for seed in seeds:
        if (violations := play(seed, defect).violations) and not play(seed).violations:
            print(f"{defect}: found by seed {seed}: {violations[0]}", flush=True)
            return 0
    print(f"{defect}: not found by {len(seeds)} seeds", flush=True)
    return 1


def _spread(seeds: range, jobs: int) -> int:
    """Play the seeds in several processes, each some hundred; their lines come as they do."""
    left, running, worst = list(seeds[::_CHUNK]), [], 0
    while left or running:
        while left and len(running) < jobs:
            first = left.pop(0)
            ends = ["--seeds", str(first), str(min(first + _CHUNK, seeds.stop))]
            running.append(subprocess.Popen([sys.executable, "-m", "simulation", *ends]))
        worst = max(worst, running.pop(0).wait())
    print(f"{len(seeds)} seeds: {'nothing found' if not worst else 'see above'}", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
