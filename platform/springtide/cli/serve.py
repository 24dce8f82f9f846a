"""``springtide model serve``: a checkpoint behind HTTP."""

from __future__ import annotations

import argparse

from springtide.cli.commands import Commands
from springtide.cli.options import add_trust
from springtide.errors import printable

_SERVE = """  springtide model serve runs/RUN                            # and each newer checkpoint, while the run trains
  springtide model serve runs/RUN --step 100 --port 8080
  springtide model serve exports/RUN --replicas 1:4 --max-batch 32 --batch-wait 20ms
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 64}'"""


def add(group: Commands) -> None:
    """Add the command to its group."""
    help = "Serve a checkpoint over HTTP, as OpenAI's API has it, and each newer one as soon as it is committed."
    group.command("serve", _serve, help, _options, _SERVE)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder, or a folder of transformers such as an export")
    help = "address to listen on (default 127.0.0.1: this machine only). There is no authentication"
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=help)
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="port to listen on (default 8000)")
    parser.add_argument("--route", metavar="PATH", default="/", help="what comes before /v1 in a URL (default /)")
    parser.add_argument("--name", default="", help="what clients call the model; default: the folder's name")
    help = "processes: a number, or the fewest and the most, between which requests decide (default 1)"
    parser.add_argument("--replicas", metavar="MIN:MAX", type=_replicas, default=(1, 1), help=help)
    help = "most requests that are written together (default 16)"
    parser.add_argument("--max-batch", metavar="N", type=int, default=16, help=help)
    help = "how long a batch that is not full waits for more (default 10ms)"
    parser.add_argument("--batch-wait", metavar="TIME", type=_seconds, default=0.01, help=help)
    help = "requests that may wait for a replica; above it, it answers 503 (default 256)"
    parser.add_argument("--max-waiting", metavar="N", type=int, default=256, help=help)
    parser.add_argument(
        "--step", metavar="N", type=int, default=None, help="serve this checkpoint; default: the newest, always"
    )
    help = "time between two looks for a newer checkpoint (default 10s)"
    parser.add_argument("--poll", metavar="TIME", type=_seconds, default=10.0, help=help)
    help = "CPUs of each replica, and its threads (default 1)"
    parser.add_argument("--cpus-per-replica", metavar="X", type=float, default=1.0, help=help)
    help = "GPUs of each replica; default: one if the cluster has any"
    parser.add_argument("--gpus-per-replica", metavar="X", type=float, default=None, help=help)
    add_trust(parser)


def _serve(options: argparse.Namespace) -> int:
    from springtide.app.serve import serve_until_stopped

    how = {
        "host": options.host,
        "port": options.port,
        "replicas": options.replicas,
        "max_batch": options.max_batch,
        "batch_wait_s": options.batch_wait,
        "max_waiting": options.max_waiting,
        "cpus": options.cpus_per_replica,
        "gpus": options.gpus_per_replica,
        "route": options.route,
    }
    serve_until_stopped(
        options.run,
        how,
        lambda line: print(printable(line), flush=True),
        name=options.name,
        step=options.step,
        poll_s=options.poll,
        trust_code=options.trust_code,
    )
    return 0


def _replicas(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not (least.isdecimal() and (most or least).isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no MIN:MAX, such as 1:4")
    return int(least), int(most or least)


def _seconds(text: str) -> float:
    from springtide.config.quantities import Seconds  # pydantic loads only when needed

    try:
        return float(Seconds.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
