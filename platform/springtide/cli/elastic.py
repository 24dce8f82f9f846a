"""``springtide plan | estimate | simulate``: before paying. ``springtide drill | notice``: loss of nodes."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_config, add_json, add_trust, add_vocabulary, config_of
from springtide.cli.output import print_json, say, stdout_for_json
from springtide.errors import ConfigError, explain

if TYPE_CHECKING:
    from springtide.elastic.simulate import Costs


_ESTIMATE = """  springtide estimate --recipe llama3_8b --workers 16 --vocabulary 128256
  springtide estimate --recipe gpu_1b --workers 8 --parallel.recompute full --json"""
_DRILL = """  springtide drill --scenario kill    # kill a node during a step: steps since the last snapshot are trained again
  springtide drill --scenario drain --notice 120   # announce that a node leaves: no step is lost
  springtide drill --scenario trace --trace p3-trace.csv --faults 12   # and compare with the simulator"""
_SIMULATE = """  springtide simulate --trace p3-trace.csv                        # goodput of a run on recorded spot capacity
  springtide simulate --trace p3-trace.csv --times 8 --notice 0   # on eight times the nodes, without notices
  springtide simulate --trace p3-trace.csv --deadline 8 --work 180 --price 3.06 --spot-price 0.92   # and on demand
  springtide simulate --mttf 3.09 --nodes 2048 --restart 20 --lanes 32768   # Llama 3's rate of failures"""
_NOTICE = """  springtide notice --in 25                     # in a preStop hook of Kubernetes, before `sleep 25`
  trap 'springtide notice --in 60' TERM         # in an sbatch script with --signal=B:TERM@60"""


def add(commands: Commands) -> None:
    """Add the commands."""
    help = "Print the memory that a step needs on each worker, the settings that lower it, and how even the batch is."
    commands.command("estimate", _estimate, help, functools.partial(_estimate_options, commands.show_all), _ESTIMATE)
    help = "Print the goodput of a run on recorded spot capacity, simulated with the policy of real training."
    commands.command("simulate", _simulate, help, _simulate_options, _SIMULATE)
    help = "Train on a local cluster whose nodes are lost, and compare with an undisturbed twin."
    commands.command("drill", _drill, help, _drill_options, _DRILL)
    help = "Announce that this node goes away, so that training leaves it in time. This cannot be taken back: "
    help += "Ray places nothing on the node until Ray itself is restarted there."
    commands.command("notice", _notice, help, _notice_options, _NOTICE)


def _estimate_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    add_trust(parser)
    parser.add_argument("--workers", metavar="N", type=int, default=1, help="number of workers")
    add_vocabulary(parser)
    add_json(parser)


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    trace = "a trace of Bamboo or SkyPilot, dated numbers, or hours and numbers"
    parser.add_argument("--trace", metavar="FILE", default="", help=trace)
    mttf = "instead of a trace: mean time between failures of a cluster of --nodes that are replaced [h]"
    parser.add_argument("--mttf", metavar="H", type=float, default=0.0, help=mttf)
    nodes = "with --mttf: number of nodes; with --deadline: most workers, 0: the most nodes of the trace"
    parser.add_argument("--nodes", metavar="N", type=int, default=0, help=nodes)
    parser.add_argument("--days", metavar="N", type=float, default=30.0, help="with --mttf: length of the run [days]")
    parser.add_argument(
        "--spare", metavar="S", type=float, default=120.0, help="with --mttf: time to replace a node [s]"
    )
    hangs = "with --mttf: share of the failures in which a process hangs and no node is lost"
    parser.add_argument("--hangs", metavar="SHARE", type=float, default=0.0, help=hangs)
    racks = "with --mttf: share of the failures in which sixteen neighbours are lost together"
    parser.add_argument("--racks", metavar="SHARE", type=float, default=0.0, help=racks)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="with --mttf: of the failures")
    times = "number of clusters, each at another offset of the trace"
    parser.add_argument("--times", metavar="N", type=int, default=1, help=times)
    parser.add_argument("--min-workers", metavar="N", type=int, default=1, help="the run waits below this")
    parser.add_argument("--step", metavar="S", type=float, default=10.0, help="duration of a step [s]")
    restart = "time from one worker group to the next [s]"
    parser.add_argument("--restart", metavar="S", type=float, default=2.5, help=restart)
    warm_up = "time from a node's start until its worker is ready [s]"
    parser.add_argument("--warm-up", metavar="S", type=float, default=15.0, help=warm_up)
    notice = "time between a notice and the loss; 0: no notices [s]"
    parser.add_argument("--notice", metavar="S", type=float, default=120.0, help=notice)
    lanes = "lanes of a step, as stream.lanes or stream.global_batch; 0: work is dealt in any parts"
    parser.add_argument("--lanes", metavar="N", type=int, default=0, help=lanes)
    copies = "copies of each snapshot in memory, as checkpoint.memory_copies"
    parser.add_argument("--copies", metavar="N", type=int, default=1, help=copies)
    replicas = (
        "workers that hold one copy of the state on their devices: 1 for DDP, the shards of HSDP; 0: none is used"
    )
    parser.add_argument("--replica-shards", metavar="N", type=int, default=0, help=replicas)
    every = "save interval of checkpoints in the store [s]"
    parser.add_argument("--store-every", metavar="S", type=float, default=600.0, help=every)
    parser.add_argument("--save", metavar="S", type=float, default=0.0, help="training time that a save costs [s]")
    parser.add_argument("--hang", metavar="S", type=float, default=300.0, help="time until a hang is found [s]")
    deadline = "rent on-demand nodes as well, so that --work is done by then, and print the cost [h]"
    parser.add_argument("--deadline", metavar="H", type=float, default=0.0, help=deadline)
    work = "with --deadline: training that the run needs [worker-hours]"
    parser.add_argument("--work", metavar="N", type=float, default=0.0, help=work)
    price = "with --deadline: price of an on-demand node, as track.price [dollars/h]"
    parser.add_argument("--price", metavar="N", type=float, default=0.0, help=price)
    spot_price = "with --deadline: price of a spot node, as track.spot_price [dollars/h]"
    parser.add_argument("--spot-price", metavar="N", type=float, default=0.0, help=spot_price)
    order = "with --deadline: time from the order of an on-demand node until it is there [s]"
    parser.add_argument("--order", metavar="S", type=float, default=180.0, help=order)
    add_json(parser)


def _drill_options(parser: argparse.ArgumentParser) -> None:
    from springtide.planning.scenarios import NOTICE_S

    scenario = "kill, copies, drain, regrow, hang, resize, all or trace"
    parser.add_argument("--scenario", metavar="NAME", default="kill", help=scenario)
    parser.add_argument("--faults", metavar="N", type=int, default=20, help="number of changes of the trace")
    parser.add_argument("--trace", metavar="FILE", default="", help="a trace of spot capacity, as for simulate")
    notice = "of drain: time between the notice and the loss [s]"
    parser.add_argument("--notice", metavar="S", type=float, default=NOTICE_S, help=notice)
    parser.add_argument("--keep", metavar="FOLDER", default="", help="keep the runs there")
    add_json(parser)


def _notice_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in", dest="left_s", metavar="S", type=float, default=30.0, help="time left [s]")
    parser.add_argument(
        "--file", metavar="FILE", default="", help="the notice file, default: that of this user, of root for all users"
    )


def _estimate(options: argparse.Namespace) -> int:
    from springtide.planning.estimate import estimate_evenness, estimate_memory, gigabytes, num_ids

    config = config_of(options)
    eos_id = 0 if config.shards.mask_across_documents else None
    found = estimate_memory(config, num_ids(config, options.vocabulary), eos_id, options.workers)
    even = estimate_evenness(config)
    if options.json:
        print_json({**found.as_dict(), "evenness": even.as_dict()})
        return 0
    say(f"tensors of a step, on each of {found.workers} workers:")
    for words, size in found.as_dict().items():
        say(f"  {gigabytes(size):>10}  {words}")
    say(even.describe())
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from springtide.elastic.failures import FailureRates
    from springtide.elastic.simulate import Costs
    from springtide.planning.simulation import simulate_failures, simulate_trace

    costs = Costs(
        options.step,
        options.restart,
        warm_up_s=options.warm_up,
        notice_s=options.notice,
        copies=options.copies,
        replica_shards=options.replica_shards,
        store_every_s=options.store_every,
        save_s=options.save,
        hang_s=options.hang,
    )
    if bool(options.trace) == bool(options.mttf):
        both = "is given, and --mttf, too" if options.trace else "is missing, and so is --mttf"
        raise ConfigError(explain("--trace", options.trace, both, "give a record of capacity, or how often nodes fail"))
    if options.deadline:
        return _simulate_deadline(options, costs)
    if options.trace:
        found = simulate_trace(options.trace, options.times, options.min_workers, costs, options.lanes)
    else:
        rates = FailureRates(options.mttf * 3600, options.spare, options.hangs, options.racks)
        least, seed = options.min_workers, options.seed
        found = simulate_failures(options.nodes, options.days, rates, least, costs, options.lanes, seed)
    print_json(found.as_dict()) if options.json else say(found.describe())
    return 0


def _simulate_deadline(options: argparse.Namespace, costs: Costs) -> int:
    from springtide.planning.simulation import simulate_deadline
    from springtide.tracking.ledger import Prices

    if not options.trace:
        raise ConfigError(explain("--deadline", options.deadline, "needs a record of spot capacity", "give --trace"))
    found = simulate_deadline(
        options.trace,
        options.deadline,
        options.work,
        Prices(options.price, options.spot_price),
        options.nodes,
        options.order,
        options.times,
        options.min_workers,
        costs,
        options.lanes,
    )
    print_json(found.as_dict()) if options.json else say(found.describe())
    return 0


def _drill(options: argparse.Namespace) -> int:
    from springtide.api.drill import drill

    with stdout_for_json() if options.json else contextlib.nullcontext() as answer:
        found = drill(options.scenario, say, options.faults, options.trace, options.keep, options.notice)
        answer(found.as_dict()) if answer else say(f"\n{found.describe()}")
    return 0 if found.ok else 1


def _notice(options: argparse.Namespace) -> int:
    from springtide.config import Config
    from springtide.elastic.notices import notice_files

    file = Path(options.file or notice_files(Config().elastic.notice_file, os.getuid())[0])
    if not 0 <= options.left_s < math.inf:
        raise ConfigError(explain("--in", options.left_s, "is not a finite time, 0 or more", "give seconds"))
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        # the folder may be everyone's: neither a name nor a link that somebody has planted there may be used
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(temporary.unlink, missing_ok=True)
            with open(descriptor, "w") as hint:
                os.fchmod(descriptor, 0o644)  # root's is for every user, whatever root's umask
                hint.write(f"{options.left_s:g}")
            temporary.replace(file)
    except OSError as error:
        raise ConfigError(
            explain(
                "--file", str(file), f"cannot be written ({error})", "choose another file, also as elastic.notice_file"
            )
        ) from None
    say(f"{file}: this node goes away in {options.left_s:g} s")
    return 0


# ``springtide plan``: which nodes a run fits, how long it takes there, and what that costs.

_PLAN = """  springtide plan --recipe llama3_8b --cluster nodes.yaml             # node types, prices and links in a file
  springtide plan --recipe gpu_1b --cluster nodes.yaml --measured runs/RUN   # tokens/s from what a run measured
  springtide plan --recipe gpu_1b --cluster nodes.yaml --train.micro-batch auto --json"""


def add_plan(commands: Commands) -> None:
    """Add the command."""
    help = "Print on which node types a run fits, how long it takes there and what it costs, cheapest first."
    commands.command("plan", _plan, help, functools.partial(_plan_options, commands.show_all), _PLAN)


def _plan_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        required=True,
        help="node types with devices, prices and links: docs/how-to/plan.md",
    )
    measured = "folder of a run whose step time calibrates the roofline, and which tells what saves and restarts cost"
    parser.add_argument("--measured", metavar="RUN", default="", help=measured)
    measured_on = "with --measured: the node type that it ran on, where the file has several"
    parser.add_argument("--measured-on", metavar="NAME", default="", help=measured_on)
    add_vocabulary(parser)
    add_json(parser)


def _plan(options: argparse.Namespace) -> int:
    from springtide.planning.plan import plan

    config = config_of(options, runs_code=False)
    found = plan(config, options.cluster, options.measured, options.measured_on, options.vocabulary)
    print_json(found.as_dict()) if options.json else say(found.describe())
    return 0
