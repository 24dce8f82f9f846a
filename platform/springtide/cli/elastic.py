"""``springtide plan``: memory, time and cost of a run before paying. ``springtide drill``: test the loss of nodes.
``springtide notice``: announce the loss of a node."""

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


_DRILL = """  springtide drill --scenario kill    # kill a node during a step: steps since the last snapshot are trained again
  springtide drill --scenario drain --notice 120   # announce that a node leaves: no step is lost
  springtide drill --scenario trace --trace p3-trace.csv --faults 12   # and compare with the simulator"""
_NOTICE = """  springtide notice --in 25                     # in a preStop hook of Kubernetes, before `sleep 25`
  trap 'springtide notice --in 60' TERM         # in an sbatch script with --signal=B:TERM@60"""


def add(commands: Commands) -> None:
    """Add the commands ``springtide drill`` and ``notice``."""
    help = "Train on a local cluster whose nodes are lost, and compare with an undisturbed twin."
    commands.command("drill", _drill, help, _drill_options, _DRILL)
    help = "Announce that this node goes away, so that training leaves it in time. This cannot be taken back: "
    help += "Ray places nothing on the node until Ray itself is restarted there."
    commands.command("notice", _notice, help, _notice_options, _NOTICE)


def _drill_options(parser: argparse.ArgumentParser) -> None:
    from springtide.planning.scenarios import NOTICE_S

    scenario = "kill, copies, drain, regrow, hang, resize, all or trace"
    parser.add_argument("--scenario", metavar="NAME", default="kill", help=scenario)
    parser.add_argument("--faults", metavar="N", type=int, default=20, help="number of changes of the trace")
    parser.add_argument("--trace", metavar="FILE", default="", help="a trace of spot capacity, as for plan")
    notice = "of drain: time between the notice and the loss [s]"
    parser.add_argument("--notice", metavar="S", type=float, default=NOTICE_S, help=notice)
    parser.add_argument("--keep", metavar="FOLDER", default="", help="keep the runs there")
    add_json(parser)


def _notice_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in", dest="left_s", metavar="S", type=float, default=30.0, help="time left [s]")
    parser.add_argument(
        "--file", metavar="FILE", default="", help="the notice file, default: that of this user, of root for all users"
    )


def _drill(options: argparse.Namespace) -> int:
    from springtide.api.drill import drill

    with stdout_for_json() if options.json else contextlib.nullcontext() as answer:
        found = drill(options.scenario, say, options.faults, options.trace, options.keep, options.notice)
        answer(found.as_dict()) if answer else say(f"\n{found.describe()}")
    return 0 if found.ok else 1


def _notice(options: argparse.Namespace) -> int:
    from springtide.config import Config
    from springtide.preemption.notices import notice_files

    file = Path(options.file or notice_files(Config().elastic.notice_file, os.getuid())[0])
    if not 0 <= options.left_s < math.inf:
        raise ConfigError(explain("--in", options.left_s, "is not a finite time, 0 or more", "give seconds"))
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        # any user may write to this folder: refuse to open a file or link that another user has planted there
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(temporary.unlink, missing_ok=True)
            with open(descriptor, "w") as hint:
                os.fchmod(descriptor, 0o644)  # all users must be able to read root's notice, whatever the umask is
                hint.write(f"{options.left_s:g}")
            temporary.replace(file)
    except OSError as error:
        raise ConfigError(
            explain(
                "--file", str(file), f"cannot be written ({error})", "choose another, and set elastic.notice_file to it"
            )
        ) from None
    say(f"{file}: this node goes away in {options.left_s:g} s")
    return 0


# ``springtide plan``: on which nodes a run fits, how long it takes, what it costs; and its goodput (share of the time spent
# training) on recorded spot capacity.

_PLAN = """  springtide plan --recipe gpu_1b --workers 8 --parallel.recompute full      # the memory of a step on each worker
  springtide plan --recipe llama3_8b --cluster nodes.yaml             # node types, prices and links in a file
  springtide plan --recipe gpu_1b --cluster nodes.yaml --measured runs/RUN   # tokens/s from what a run measured
  springtide plan --trace p3-trace.csv                        # goodput of a run on recorded spot capacity
  springtide plan --trace p3-trace.csv --times 8 --notice 0   # on eight times the nodes, without notices
  springtide plan --trace p3-trace.csv --deadline 8 --work 180 --price 3.06 --spot-price 0.92   # and on demand
  springtide plan --mttf 3.09 --nodes 2048 --restart 20 --lanes 32768   # Llama 3's rate of failures"""


def add_plan(commands: Commands) -> None:
    """Add the command ``springtide plan``."""
    help = "Before paying: the memory of a step on each worker; with --cluster, on which node types a run fits, how long it "
    help += "takes there and what it costs; with --trace, its goodput on recorded spot capacity."
    commands.command("plan", _plan, help, functools.partial(_plan_options, commands.show_all), _PLAN)


def _plan_options(show_all: bool, parser: argparse.ArgumentParser) -> None:
    add_config(parser, show_all)
    add_trust(parser)
    parser.add_argument("--workers", metavar="N", type=int, help="without --cluster: number of workers (default 1)")
    cluster = "node types with devices, prices and links: docs/how-to/plan.md"
    parser.add_argument("--cluster", metavar="FILE", default="", help=cluster)
    measured = "folder of a run whose step time calibrates the roofline, and which tells what saves and restarts cost"
    parser.add_argument("--measured", metavar="RUN", default="", help=f"with --cluster: {measured}")
    measured_on = "with --measured: the node type that it ran on, where the file has several"
    parser.add_argument("--measured-on", metavar="NAME", default="", help=measured_on)
    add_vocabulary(parser)
    add_json(parser)
    _spot_options(parser)


def _spot_options(parser: argparse.ArgumentParser) -> None:
    about = "The run in figures, in place of a config: its goodput, simulated with the policy of real training."
    group = parser.add_argument_group("spot capacity", about)
    for name, metavar, default, help in _SPOT:
        spelling = f"--{name.replace('_', '-')}"
        group.add_argument(spelling, metavar=metavar, type=type(default), default=default, help=help)


_SPOT: tuple[tuple[str, str, str | int | float, str], ...] = (
    ("trace", "FILE", "", "a record of spot capacity: of Bamboo or SkyPilot, dated numbers, or hours and numbers"),
    ("mttf", "H", 0.0, "in place of --trace: mean time between failures of a cluster of --nodes that are replaced [h]"),
    ("nodes", "N", 0, "with --mttf: number of nodes; with --deadline: most workers, 0: the most nodes of the trace"),
    ("days", "N", 30.0, "with --mttf: length of the run [days]"),
    ("spare", "S", 120.0, "with --mttf: time to replace a node [s]"),
    ("hangs", "SHARE", 0.0, "with --mttf: share of the failures in which a process hangs and no node is lost"),
    ("racks", "SHARE", 0.0, "with --mttf: share of the failures in which sixteen neighbours are lost together"),
    ("seed", "N", 0, "with --mttf: of the failures"),
    ("times", "N", 1, "number of clusters, each at another offset of the trace"),
    ("min_workers", "N", 1, "the run waits below this"),
    ("step", "S", 10.0, "duration of a step [s]"),
    ("restart", "S", 2.5, "time from one worker group to the next [s]"),
    ("warm_up", "S", 15.0, "time from a node's start until its worker is ready [s]"),
    ("notice", "S", 120.0, "time between a notice and the loss; 0: no notices [s]"),
    ("lanes", "N", 0, "lanes of a step, as stream.lanes or stream.global_batch; 0: work is dealt in any parts"),
    ("copies", "N", 1, "copies of each snapshot in memory, as checkpoint.memory_copies"),
    (
        "replica_shards",
        "N",
        0,
        "workers that hold one copy of the state on their devices: 1 for DDP, the shards of HSDP; 0: none is used",
    ),
    ("store_every", "S", 600.0, "save interval of checkpoints in the store [s]"),
    ("save", "S", 0.0, "training time that a save costs [s]"),
    ("hang", "S", 300.0, "time until a hang is found [s]"),
    ("deadline", "H", 0.0, "rent on-demand nodes as well, so that --work is done by then, and print the cost [h]"),
    ("work", "N", 0.0, "with --deadline: training that the run needs [worker-hours]"),
    ("price", "N", 0.0, "with --deadline: price of an on-demand node, as track.price [dollars/h]"),
    ("spot_price", "N", 0.0, "with --deadline: price of a spot node, as track.spot_price [dollars/h]"),
    ("order", "S", 180.0, "with --deadline: time from the order of an on-demand node until it is there [s]"),
)
"""Options of the simulation on recorded spot capacity: name, metavar, default, help."""


def _plan(options: argparse.Namespace) -> int:
    spot = [name for name, _, default, _ in _SPOT if getattr(options, name) != default]
    if options.trace or options.mttf:
        others = ("cluster", "recipe", "config_file", "config", "workers", "measured", "measured_on", "vocabulary")
        if given := [f"--{name.replace('_', '-')}" for name in others if getattr(options, name)] + _settings(options):
            limit = f"simulates a run by its figures alone, and {given[0]} is given"
            remedy = "leave the config and its options out; a trace in the cluster file is part of that plan"
            raise ConfigError(explain(*_named(options, "trace" if options.trace else "mttf"), limit, remedy))
        return _simulate(options)
    if spot:
        remedy = "give --trace or --mttf, too"
        raise ConfigError(explain(*_named(options, spot[0]), "is for recorded spot capacity", remedy))
    if not options.cluster:
        if options.measured or options.measured_on:
            name = "measured" if options.measured else "measured_on"
            raise ConfigError(explain(*_named(options, name), "calibrates a plan of node types", "give --cluster, too"))
        return _estimate(options)
    if options.workers is not None:
        limit = "is the plan's to choose: it prints one for each node type"
        raise ConfigError(explain(*_named(options, "workers"), limit, "leave it out, or leave --cluster out"))
    from springtide.planning.plan import plan

    config = config_of(options, runs_code=False)
    found = plan(config, options.cluster, options.measured, options.measured_on, options.vocabulary)
    print_json(found.as_dict()) if options.json else say(found.describe())
    return 0


def _settings(options: argparse.Namespace) -> list[str]:
    """Return the dotted names, such as ``train.total``, of the config settings given on the command line."""
    return [name for name in vars(options) if "." in name]


def _named(options: argparse.Namespace, name: str) -> tuple[str, object]:
    """Return an option as a user types it, such as ``--trace``, and its value."""
    return f"--{name.replace('_', '-')}", getattr(options, name)


def _estimate(options: argparse.Namespace) -> int:
    from springtide.planning.estimate import estimate_evenness, estimate_memory, gigabytes, num_ids

    config = config_of(options)
    eos_id = 0 if config.shards.mask_across_documents else None
    workers = 1 if options.workers is None else options.workers
    found = estimate_memory(config, num_ids(config, options.vocabulary), eos_id, workers)
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
    from springtide.elastic.simulate import Costs
    from springtide.elastic.traces import FailureRates
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
    if options.trace and options.mttf:
        limit = "is given, and --mttf, too"
        raise ConfigError(
            explain("--trace", options.trace, limit, "give a record of capacity or how often nodes fail, not both")
        )
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
