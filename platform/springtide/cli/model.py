"""``springtide model evaluate``, ``average``, ``generate``, ``export`` and ``import``."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from springtide.cli.commands import Commands
from springtide.cli.options import add_json, add_trust, tokens
from springtide.cli.output import print_json, say, write
from springtide.errors import ConfigError, explain

if TYPE_CHECKING:
    from springtide.run.exchange import Exported
    from springtide.run.folder import Run

_EVALUATE = """  springtide model evaluate runs/RUN                     # the newest checkpoint, on all held-out text
  springtide model evaluate runs/RUN --step 100 --tokens 16k --json
  springtide model evaluate runs/RUN --tasks hellaswag,arc_easy --limit 100"""

_AVERAGE = """  springtide model average runs/RUN --last 3 --to runs/RUN-average
  springtide model average runs/RUN --ema --to runs/RUN-ema
  springtide model evaluate runs/RUN-average"""

_EXPORT = """  springtide model export runs/RUN --to hf --out exports/RUN      # the newest checkpoint
  springtide model export runs/RUN --step 100 --to hf --out s3://bucket/RUN --dtype bf16
  springtide model export runs/RUN --to peft --out exports/RUN-adapter
  springtide model export runs/RUN --out exports/RUN --register MODEL"""

_IMPORT = """  springtide model import downloads/MODEL --out runs/MODEL        # or hf://OWNER/NAME, of the Hugging Face Hub
  springtide model import downloads/MODEL --adapter downloads/ADAPTER --out runs/ADAPTED
  springtide train --config runs/MODEL/config.yaml --run.id tuned --corpus.source texts \\
    --train.start-from runs/MODEL --train.start-with weights --optim.peak-lr 1e-5"""


def add(commands: Commands) -> None:
    """Add the group ``springtide model`` with its commands."""
    group = commands.group("model", "Use a checkpoint as a model.")
    help = "Print the held-out loss and bits per byte of a checkpoint, or its scores on tasks of lm-evaluation-harness."
    group.command("evaluate", _evaluate, help, _evaluate_options, _EVALUATE)
    add_generate(group)
    help = "Write the mean of the weights of a run's newest checkpoints as a checkpoint of its own."
    group.command("average", _average, help, _average_options, _AVERAGE)
    help = "Write a checkpoint as a folder that transformers or PEFT loads."
    group.command("export", _export, help, _export_options, _EXPORT)
    help = "Write a model of transformers as a run's folder of weights only, to start a run from."
    group.command("import", _import, help, _import_options, _IMPORT)


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    help = "format: hf, as transformers loads it, an adapter merged (default); peft: the adapter alone"
    parser.add_argument("--to", choices=["hf", "peft"], default="hf", help=help)
    parser.add_argument(
        "--out", metavar="FOLDER", required=True, help="folder or URL to create, or an export to replace"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, default=None, help="step of the checkpoint; default: the newest"
    )
    parser.add_argument("--dtype", default="", help="fp32, bf16 or fp16; default: as stored")
    parser.add_argument("--ema", action="store_true", help="the averaged weights (optim.ema_half_life)")
    help = "also register the export in MLflow, as the next version of this model; its weights stay where they are"
    parser.add_argument("--register", metavar="NAME", default=None, help=help)
    add_json(parser)


def _export(options: argparse.Namespace) -> int:
    from springtide.run.exchange import export_model
    from springtide.run.folder import open_run

    run = open_run(options.run)
    uri = _registry(run, options.register)
    found = export_model(run, options.out, options.step, options.dtype, options.ema, options.to)
    version = _register(run, uri, options.register, found) if options.register else ""
    if options.json:
        print_json({**found._asdict(), **({"version": version} if version else {})})
        return 0
    for remark in found.remarks:
        say(f"note: {remark}")
    say(f"wrote {found.url}: {found.checkpoint} as {found.architecture}, {found.size_bytes / 2**20:.1f} MiB of weights")
    if version:
        say(f"registered {options.register} version {version} in MLflow")
    return 0


def _registry(run: Run, name: str | None) -> str:
    """Return the URI of the MLflow server that will register the model as ``name``; empty without a name."""
    if name is None:
        return ""
    from springtide.api.tracking_server import mlflow_uri
    from springtide.tracking.mlflow_client import check_registry

    uri = mlflow_uri(run.config, must_be_named=True)
    check_registry(uri, name)
    return uri


def _register(run: Run, uri: str, name: str, found: Exported) -> str:
    """Register an export as a version of the MLflow model ``name``; return the number of the new version."""
    from springtide import config as configs
    from springtide.tracking.mlflow_client import register_export

    facts = {
        "checkpoint": found.checkpoint,
        "architecture": found.architecture,
        "bytes": found.size_bytes,
        "run": run.id,
    }
    return register_export(uri, name, run.folder, found.url, configs.flatten(configs.redact(run.config)), facts)


def _import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="folder or URL of the model, such as hf://OWNER/NAME")
    help = "folder or URL of a LoRA or DoRA adapter of that model, as PEFT saves it"
    parser.add_argument("--adapter", metavar="FOLDER", default="", help=help)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder or URL to create")


def _import(options: argparse.Namespace) -> int:
    from springtide.run.exchange import import_model

    run = import_model(options.folder, options.out, options.adapter)
    say(f"wrote {run.folder.url}/checkpoints/{run.checkpoints[-1]}: weights only")
    say(f"its settings are in {run.folder.where('config.yaml')}; start a run from it:")
    say(f"  springtide train --config {run.folder.where('config.yaml')} --run.id NAME --corpus.source TEXT \\")
    say(f"    --train.start-from {run.folder.url} --train.start-with weights --optim.peak-lr 1e-5")
    return 0


def _average_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="folder or URL to create")
    parser.add_argument("--last", metavar="N", type=int, default=1, help="number of checkpoints (default 1)")
    parser.add_argument(
        "--ema", action="store_true", help="average their exponential moving averages (optim.ema_half_life)"
    )


def _average(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    found = open_run(options.run).average(options.to, options.last, options.ema)
    say(f"wrote {found.folder.url}/checkpoints/{found.checkpoints[-1]}: weights only")
    return 0


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder")
    parser.add_argument(
        "--step", metavar="N", type=int, default=None, help="step of the checkpoint; default: the newest"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=tokens, default=0, help="held-out tokens, as train.eval_tokens; 0: all"
    )
    parser.add_argument(
        "--tasks", metavar="A,B", default="", help="tasks of lm-evaluation-harness, in place of the loss"
    )
    parser.add_argument("--limit", metavar="N", type=int, default=0, help="with --tasks: documents of each; 0: all")
    parser.add_argument(
        "--batch-size", metavar="N", type=int, default=8, help="with --tasks: requests at once (default 8)"
    )
    add_trust(parser)
    add_json(parser)


def _evaluate(options: argparse.Namespace) -> int:
    from springtide.run.folder import open_run

    if options.tasks:
        return _score(options)
    found = open_run(options.run).evaluate(options.step, options.tokens, options.trust_code)
    print_json(dataclasses.asdict(found)) if options.json else say(found.describe())
    return 0


def _score(options: argparse.Namespace) -> int:
    from springtide.checkpoint.format import step_of
    from springtide.run.folder import open_run
    from springtide.run.text import text_model

    names = [name for name in map(str.strip, options.tasks.split(",")) if name]
    if not names:
        raise ConfigError(explain("tasks", options.tasks, "names no task", "give task names, with commas between"))
    least = (("limit", options.limit, 0, "0 means all documents"), ("batch_size", options.batch_size, 1, "try 8"))
    for name, value, lowest, remedy in least:
        if value < lowest:
            raise ConfigError(explain(name, value, f"must be at least {lowest}", remedy))
    try:
        from springtide.eval.harness import score
    except ImportError as error:
        problem = f"needs lm-evaluation-harness, which cannot be imported ({error})"
        raise ConfigError(explain("tasks", options.tasks, problem, "pip install 'springtide[evaluate]'")) from None
    run, trust = open_run(options.run), options.trust_code
    checkpoint = run.checkpoint_at(options.step)
    found, table = score(
        lambda: text_model(run, step_of(checkpoint), trust), names, options.limit, options.batch_size, trust
    )
    print_json({"checkpoint": checkpoint, "tasks": found}) if options.json else say(table)
    return 0


# ``springtide model generate``: text from a checkpoint.

_GENERATE = """  springtide model generate runs/RUN --prompt "def " --tokens 64
  springtide model generate runs/RUN --prompts prompts.txt --temperature 0 --json
  springtide model generate runs/RUN --chat --prompt "What is a tide?" --top-p 0.9
  springtide model generate exports/RUN --prompt "def " """
_TOKENS = 96
_MOST_BYTES = 64 * 2**20


def add_generate(group: Commands) -> None:
    """Add ``generate`` to the group ``springtide model``."""
    group.command("generate", _generate, "Write text after prompts.", _generate_options, _GENERATE)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    from springtide.config.schema import SAMPLE_TEMPERATURE

    parser.add_argument("run", help="the run's folder, or a folder of transformers such as an export")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", action="append", help="text to continue; may be repeated")
    given.add_argument("--prompts", metavar="FILE", help="a file with a prompt on each line")
    parser.add_argument("--tokens", metavar="N", type=int, default=_TOKENS, help=f"most tokens (default {_TOKENS})")
    help = f"of the softmax; 0 takes the likeliest token each time (default {SAMPLE_TEMPERATURE})"
    parser.add_argument("--temperature", metavar="X", type=float, default=SAMPLE_TEMPERATURE, help=help)
    parser.add_argument("--top-k", metavar="N", type=int, default=0, help="draw from the N likeliest; 0: from all")
    help = "draw from the likeliest that have this probability together; 1: from all"
    parser.add_argument("--top-p", metavar="X", type=float, default=1.0, help=help)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the first prompt; others follow")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before it; may be repeated")
    help = "a prompt is what a user says, laid out by the chat template of the run's dataset"
    parser.add_argument("--chat", action="store_true", help=help)
    parser.add_argument(
        "--step", metavar="N", type=int, default=None, help="step of the checkpoint; default: the newest"
    )
    add_trust(parser)
    add_json(parser)


def _generate(options: argparse.Namespace) -> int:
    prompts = options.prompt or _read(options.prompts)
    from springtide.eval import Sampling
    from springtide.run.text import open_text

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    model = open_text(options.run, options.step, options.trust_code)
    streams = len(prompts) == 1 and not options.json
    if streams and not options.chat:
        write(prompts[0])
    found = model.generate(
        prompts,
        options.tokens,
        sampling,
        options.stop,
        options.chat,
        (lambda _, text: write(text)) if streams else None,
    )
    if options.json:
        print_json({"texts": [one._asdict() for one in found]})
    elif streams:
        write("\n")
    else:
        for one in found:
            write(f"--- {one.prompt}\n{one.text}\n")
    return 0


def _read(name: str) -> list[str]:
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(explain("prompts", name, f"has more than {_MOST_BYTES:,} bytes", "split the file"))
        lines = [line for line in data.decode().splitlines() if line]
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise ConfigError(explain("prompts", name, problem, "name a file with a prompt on each line")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(explain("prompts", name, f"is not UTF-8 ({error})", "save it as UTF-8")) from None
    if not lines:
        raise ConfigError(explain("prompts", name, "holds no prompt", "write one on each line"))
    return lines
