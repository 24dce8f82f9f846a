"""Options that commands share: a config from a file or by --recipe, and one option per field of the config.

``--help`` shows the usual fields, ``--help-all`` every field. ``springtide.config`` is imported inside functions: its import
takes half of the time of ``springtide --help``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from springtide.cli.output import say
from springtide.errors import ConfigError, explain

if TYPE_CHECKING:
    from springtide.config import Config

_START_FROM = "train.start_from"
_URL = re.compile(r"[\w+.-]+://[^\s'\"{}\[\],]+")
_OF_CHATS = ("sft", "lora")
"""Fine-tuning recipes that start from an imported model and use its chat template by default."""


def add_config(parser: argparse.ArgumentParser, show_all: bool, sections: Collection[str] = ()) -> None:
    """Add CONFIG, --recipe, --config and ``--section.field`` for every field. The help shows every field of ``sections``.
    Without ``sections`` it shows the usual fields, or with ``show_all`` all fields."""
    from springtide import config as configs
    from springtide.config import Config
    from springtide.config.fields import USUAL, fields, mark

    parser.usage = f"{parser.prog} [CONFIG | --recipe NAME] [--SECTION.SETTING X ...] [OPTION ...]"
    parser.add_argument("config_file", metavar="CONFIG", nargs="?", default="", help="as --config CONFIG")
    begun = ", ".join(configs.recipes.FINE_TUNING)
    about = (
        f"one of {', '.join(configs.recipes.RECIPES)}; or, with the settings of the run in --train.start-from, {begun}"
    )
    parser.add_argument("--recipe", metavar="NAME", help=about)
    parser.add_argument(
        "--config", metavar="FILE", default="", help="a config file, YAML or JSON: docs/how-to/config-files.md"
    )
    parser.add_argument(
        "--help-all",
        action="help",
        help="show every setting. Those marked free may change at a resume, those marked ahead for the steps to come",
    )
    for section, field in Config.model_fields.items():
        is_of_it = show_all or not sections or section in sections
        group = parser.add_argument_group(section, field.description if is_of_it else None)
        for name, leaf in fields().items():
            if not name.startswith(f"{section}."):
                continue
            spellings = dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"])
            default = "" if leaf.default == "" else f"default {leaf.default}"
            about = ", ".join(filter(None, [default, mark(leaf)]))
            text = (f"{leaf.description} ({about})" if about else leaf.description).replace("%", "%%")
            shown = text if show_all or (is_of_it and (sections or name in USUAL)) else argparse.SUPPRESS
            option = group.add_argument(*spellings, dest=name, metavar="X", default=argparse.SUPPRESS, help=shown)
            option.option_strings = list(spellings)[:1]  # the help shows only the first spelling


def tokens(text: str) -> int:
    """Parse a number of tokens, such as 16k. Raises ArgumentTypeError for any other text."""
    from springtide.config.quantities import Tokens  # imports pydantic: only when needed

    try:
        return int(Tokens.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json to ``parser``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_vocabulary(parser: argparse.ArgumentParser) -> None:
    """Add the option --vocabulary, for commands that can run before a dataset exists."""
    help = "number of token ids; 0: model.vocab_size, or corpus.vocab_size if that is 0"
    parser.add_argument("--vocabulary", metavar="N", type=int, default=0, help=help)


def add_resume(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the option ``--resume``. Its value is False if it is absent, True for ``--resume``, "auto" for ``--resume auto``."""
    parser.add_argument("--resume", nargs="?", const=True, default=False, type=_auto, metavar="auto", help=help)


def _auto(word: str) -> str:
    """Return ``auto``, the only value of --resume. Raises ArgumentTypeError for other words, such as a config file after it."""
    if word != "auto":
        raise argparse.ArgumentTypeError(f"{word!r} is not auto; a config file goes before --resume")
    return word


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option --trust-code."""
    parser.add_argument("--trust-code", action="store_true", help="run the code that the run or --config FILE names")


def config_of(options: argparse.Namespace, runs_code: bool = True) -> Config:
    """Return the config of --recipe or --config with every override applied.

    Args:
        options: parsed arguments of a command that has ``add_config``.
        runs_code: True if the command runs the model. Then code that a config file names needs --trust-code, unless the
            command resumes a run that was already started with trust in this code. Code that the command line names needs no
            --trust-code. The same rule holds for ``corpus.filter`` whenever a dataset may have to be prepared.

    Raises:
        ConfigError: a recipe, file, field or value is not valid, or code is not trusted.
    """
    from springtide import config as configs

    given = {name: value for name, value in vars(options).items() if "." in name}
    base, file = _base(options)
    config = base.override(_changes(given))
    if "track.mlflow_uri" in given:
        from springtide.api.tracking_server import name_server

        name_server(given["track.mlflow_uri"])
    trusts, sources = getattr(options, "trust_code", False), config.prepare_sources
    if runs_code:
        sources = sources | config.needs_trust
    if file and sources.keys() - given.keys() and not trusts:
        from springtide.run.find import trusted_code

        claimed = trusted_code(config) if getattr(options, "resume", False) else ""
        configs.check_trusted(sources, file, False, claimed, given)
    return config


def _base(options: argparse.Namespace) -> tuple[Config, str]:
    """Return the config before overrides by options, and the path of the file that the config comes from; the path is empty
    without a file."""
    from springtide import config as configs

    start_from = getattr(options, _START_FROM, "")
    if file := _file_of(options):
        return configs.load_config(file, True, lambda name, named: _recipe(name, start_from or named, options)[0]), file
    return _recipe(options.recipe, start_from, options)


def _recipe(name: str, start_from: str, options: argparse.Namespace) -> tuple[Config, str]:
    """Return the config of a recipe, and the path of the file that the config comes from; the path is empty without a file.

    Args:
        name: name of the recipe.
        start_from: run or checkpoint whose model a fine-tuning recipe starts from; empty for none.
        options: parsed arguments.
    """
    from springtide import config as configs

    if name not in configs.recipes.FINE_TUNING or not start_from:
        return configs.recipe(name), ""
    from springtide.checkpoint.branch import split
    from springtide.config.data import MODEL_TEMPLATE
    from springtide.config.inherit import left_behind
    from springtide.run.folder import Run
    from springtide.shards import CHAT_TEMPLATE

    folder, _ = split(start_from)
    if not folder.exists(configs.RUN_CONFIG):
        remedy = "name the folder of a run, or of an imported model"
        raise ConfigError(explain(_START_FROM, start_from, f"has no {configs.RUN_CONFIG}", remedy))
    run, given = Run(folder).config, vars(options)
    if name == "continue":
        typed = [url for field, text in given.items() if "." in field for url in _URL.findall(text)]
        config = configs.recipes.continued(run, start_from, typed)
    else:
        config = configs.recipes.FINE_TUNING[name](run, start_from)
    for field, line in left_behind(run, config).items():
        if field not in given:
            say(f"note: {line}", error=True)
    if name in _OF_CHATS and not config.corpus.chat_template and folder.exists(CHAT_TEMPLATE):
        config = config.override({"corpus.chat_template": MODEL_TEMPLATE})
    return config, folder.where(configs.RUN_CONFIG)


def _file_of(options: argparse.Namespace) -> str:
    """Return the config file that a command line names; empty if it names a recipe. Raises ConfigError unless the command
    line names exactly one config."""
    from springtide.config import recipes

    named, file, known = (
        options.config_file,
        options.config or options.config_file,
        [*recipes.RECIPES, *recipes.FINE_TUNING],
    )
    if named in known and not os.path.exists(named):
        raise ConfigError(explain("config", named, "is a recipe, not a file", f"write --recipe {named}"))
    if options.config and named and options.config != named:
        raise ConfigError(explain("--config", options.config, f"and {named} are two config files", "name one of them"))
    if options.recipe and file:
        remedy = f"name one of them, or write 'recipe: {options.recipe}' into the file"
        raise ConfigError(explain("--recipe", options.recipe, f"and {file} are two configs", remedy))
    if not options.recipe and not file:
        remedy = f"name a file, or --recipe and one of {', '.join(known)}"
        raise ConfigError(explain("config", "", "is missing", remedy))
    return file


def program() -> str:
    """Return the word that starts this program in the user's shell: its name if it is on PATH, else its path."""
    here = os.path.join(os.path.dirname(sys.executable), "springtide")
    found = shutil.which("springtide")
    return "springtide" if found and os.path.exists(here) and os.path.samefile(found, here) else os.path.relpath(here)


def _changes(given: Mapping[str, str]) -> dict[str, Any]:
    """Return dotted name of a field -> parsed value. ``given``: dotted name -> text from the command line."""
    from springtide.config.input_paths import expand_home

    changes = {name: _value(name, text) for name, text in given.items()}
    for name in changes:
        section, field = name.split(".")
        one = {section: {field: changes[name]}}
        expand_home(one)
        changes[name] = one[section][field]
    return changes


def _value(name: str, text: str) -> Any:
    """Parse a list or a table as YAML; return other text unchanged, for the field's type to parse. ``name``: dotted name of the
    field."""
    if not text.startswith(("[", "(", "{")):
        return text
    from springtide.config.fields import fields
    from springtide.config.yaml_text import read_value

    return read_value(text, name, fields()[name].annotation)
