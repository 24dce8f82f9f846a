"""The commands about losing nodes: ``springtide drill | plan | notice``."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from springtide.config import Config
from springtide.errors import ConfigError, explain

_DRILL = """examples:
  springtide drill --scenario kill    # a node is killed in mid-step: what was done since the last snapshot is trained again
  springtide drill --scenario drain   # a node is announced to go: no step is
  springtide drill --scenario storm --seed 3 --json
  springtide drill --scenario trace --trace p3-trace.csv --faults 12   # and what the simulator makes of it"""
_PLAN = """examples:
  springtide plan --trace p3-trace.csv                        # of a day of spot capacity, how much would have been training
  springtide plan --trace p3-trace.csv --times 8 --notice 0   # on eight times the nodes, without notices"""
_NOTICE = """examples:
  springtide notice --in 25                     # in a preStop hook of Kubernetes
  trap 'springtide notice --in 60' TERM         # in an sbatch script with --signal=B:TERM@60"""


def _drill(options: argparse.Namespace) -> int:
    from springtide.app.drill import drill

    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else print
    found = drill(options.scenario, say, options.seed, options.faults, options.trace, options.keep)
    if options.json:
        print(json.dumps(found))
        return 0 if found["ok"] else 1
    same = "the same samples at every step" if found["digests_match"] else "OTHER SAMPLES THAN THE TWIN"
    predicted = f", {found['predicted_goodput']:.1%} predicted" if "predicted_goodput" in found else ""
    gaps = ", ".join(f"{gap:.1f} s" for gap in found["gaps_s"]) or "none"
    print(
        f"""
{same}; losses differ by {found["loss_max_abs_diff"]:.1e} at most
without a step   {gaps}
steps lost       {", ".join(map(str, found["steps_lost"])) or "none"}
goodput          {found["goodput"]:.1%}{predicted}"""
    )
    return 0 if found["ok"] else 1


def _plan(options: argparse.Namespace) -> int:
    from springtide.app.simulate import simulate_trace, words
    from springtide.elastic.simulate import Costs

    costs = Costs(options.step, options.restart, warm_up_s=options.warm_up, notice_s=options.notice)
    found = simulate_trace(options.trace, options.times, options.min_workers, costs)
    print(json.dumps(found) if options.json else words(found))
    return 0


def _notice(options: argparse.Namespace) -> int:
    file = Path(options.file or Config().elastic.notice_file)
    if not 0 <= options.left_s < math.inf:
        raise ConfigError(explain("--in", options.left_s, "is no time that is left", "give seconds"))
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(f"{options.left_s:g}")
    beside.replace(file)
    print(f"{file}: this node goes in {options.left_s:g} s")
    return 0


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them to a parser: ``command(name, function, help, examples)`` makes one."""
    sub = command(
        "drill", _drill, "Train on a cluster of this machine's whose nodes are lost, and compare with a twin.", _DRILL
    )
    sub.add_argument(
        "--scenario", metavar="NAME", default="kill", help="kill, drain, regrow, hang, resize, all, storm or trace"
    )
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="of the storm")
    sub.add_argument("--faults", metavar="N", type=int, default=20, help="of the storm, or changes of the trace")
    sub.add_argument("--trace", metavar="FILE", default="", help="a record of spot capacity, as for plan")
    sub.add_argument("--keep", metavar="FOLDER", default="", help="leave both runs there")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command(
        "plan", _plan, "Say what a run would make of a record of spot capacity, by the policy that trains.", _PLAN
    )
    sub.add_argument(
        "--trace", metavar="FILE", required=True, help="of Bamboo, SkyPilot, dated numbers, or hours and numbers"
    )
    sub.add_argument(
        "--times", metavar="N", type=int, default=1, help="as many clusters, each at another place of the record"
    )
    sub.add_argument("--min-workers", metavar="N", type=int, default=1, help="below, the run waits")
    sub.add_argument("--step", metavar="S", type=float, default=10.0, help="what a step takes [s]")
    sub.add_argument(
        "--restart", metavar="S", type=float, default=2.5, help="from one group of workers to the next [s]"
    )
    sub.add_argument(
        "--warm-up", metavar="S", type=float, default=15.0, help="from a node's joining until its process stands [s]"
    )
    sub.add_argument("--notice", metavar="S", type=float, default=120.0, help="between a notice and the loss, or 0 [s]")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    sub = command(
        "notice", _notice, "Say that this node will be taken away: what trains on it leaves it in time.", _NOTICE
    )
    sub.add_argument("--in", dest="left_s", metavar="S", type=float, default=30.0, help="seconds that are left")
    sub.add_argument("--file", metavar="FILE", default="", help="where nodes look: elastic.notice_file")
