"""Inject faults into a run that trains on a local cluster. Exit status 1 if a fault cost more than is promised.

python -m fault_points cross                        a fault of each kind at each point: 15 minutes
python -m fault_points cross --only restore,claim   the cases whose names have one of these parts
python -m fault_points storm --seed 3               twenty faults at random, and the undisturbed twin: five minutes
python -m fault_points storm --seed 3 --stops       half of the faults stop a worker for good in a phase of a restart
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from fault_points.cases import CrossingResult
from fault_points.crossing import cross
from fault_points.storm import storm
from springtide.api.drill import DrillResult
from springtide.errors import ConfigError


def main() -> int:
    """Run the faults; print the result, as text or as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cross", "storm"))
    parser.add_argument(
        "--only", metavar="PARTS", default="", help="of cross: parts of names, as restore-before-kill or kill,stop"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the storm")
    parser.add_argument("--faults", metavar="N", type=int, default=20, help="number of faults of the storm")
    parser.add_argument("--stops", action="store_true", help="of the storm: stop a worker in each phase of a restart")
    parser.add_argument("--keep", metavar="FOLDER", default="", help="keep the runs there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    say = functools.partial(print, file=sys.stderr, flush=True)
    found: CrossingResult | DrillResult
    try:
        if options.what == "cross":
            found = cross(say, options.only, options.keep)
        else:
            found = storm(say, options.seed, options.faults, options.keep, options.stops)
    except ConfigError as error:
        parser.error(str(error))
    print(json.dumps(found.as_dict()) if options.json else found.describe())
    if isinstance(found, DrillResult) and found.ledger.restarts and not options.json:
        worst = max(found.ledger.restarts, key=lambda one: one.gap_s)
        print(f"longest gap      {worst.gap_s:.1f} s at step {worst.step}: {worst.cause}")
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
