"""``springtide model generate``: text from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from springtide.cli.commands import Commands
from springtide.cli.options import add_json, add_trust
from springtide.cli.output import print_json, write
from springtide.errors import ConfigError, explain

_GENERATE = """  springtide model generate runs/RUN --prompt "def " --tokens 64
  springtide model generate runs/RUN --prompts prompts.txt --temperature 0 --json
  springtide model generate runs/RUN --chat --prompt "What is a tide?" --top-p 0.9
  springtide model generate exports/RUN --prompt "def " """
_TOKENS = 96
_MOST_BYTES = 64 * 2**20


def add(group: Commands) -> None:
    """Add the command to its group."""
    group.command("generate", _generate, "Write text after prompts.", _options, _GENERATE)


def _options(parser: argparse.ArgumentParser) -> None:
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
