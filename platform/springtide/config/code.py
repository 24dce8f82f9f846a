"""Fingerprint the code that trains a run, and check that a config may name code to run.

A run's lease (a file in the run's folder) holds a digest of the user's code at the start of the run. The folder may be somebody
else's, so the lease also holds a seal of the digest (an HMAC) that only this user can compute. While the code has this digest,
the run resumes without asking for trust again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import importlib
import inspect
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from springtide.errors import ConfigError, explain

LISTENER, PARTS = "track.listener", "train.parts"
CODE_FIELDS = ("model.source", "optim.source", "objective.source", LISTENER, PARTS)
"""Fields that name a user's function that a run calls, ``package.module:function``. The seal (HMAC) in a run's lease is
computed over the fields in this order, so new fields are appended."""
BESIDE_THE_MODEL = frozenset({LISTENER, PARTS})
"""Fields in ``CODE_FIELDS`` that do not affect how much memory and time a step takes."""
_RETURNS = {
    "model.source": "an nn.Module",
    "optim.source": "a torch.optim.Optimizer",
    "objective.source": "(sum, weight, parts)",
    LISTENER: "a listener of events",
    PARTS: "a springtide.training.Part, or several",
    "corpus.filter": "the text or None",
}
_ARGUMENTS = {
    "model.source": ("config", "vocab_size", "eos_id", "bos_id"),
    "optim.source": ("named_parameters", "config"),
    LISTENER: ("run",),
    PARTS: ("loop",),
    "corpus.filter": ("text",),
}
"""Field -> arguments that its function is called with. ``objective.source`` is not listed, because an objective may take two
forms of arguments; a trial call before the run starts checks them."""
_VARIABLE = "elastic.env."
"""Prefix of the field name of an environment variable that needs trust (``Config.needs_trust``)."""
_KEY = "~/.springtide/trust.key"
_KEY_BYTES = 32


@functools.cache
def code_fingerprint() -> str:
    """Return a hash over all Python files of springtide, 16 hex digits."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def check_trusted(
    sources: Mapping[str, str], where: str, trust_code: bool, claimed: str = "", named: Collection[str] = ()
) -> None:
    """Check that the user trusts the code and the environment variables of a config that somebody else may have written.

    Args:
        sources: code and variables of the config, as ``Config.needs_trust`` returns them.
        where: file of the config, for the error.
        trust_code: whether the user trusts all of ``sources``.
        claimed: digest of the sources that the user trusted when the run started; empty if the run has not started.
        named: settings that the user gave on the command line or in Python; they are trusted.

    Raises:
        ConfigError: some of ``sources`` are neither trusted nor given by the user, and their digest is not ``claimed``.
    """
    others = {field: source for field, source in sources.items() if not {field, _section_field(field)} & {*named}}
    if not others or trust_code or (claimed and claimed == (now := code_digest(sources))):
        return
    functions = {field: source for field, source in others.items() if not field.startswith(_VARIABLE)}
    modules = dict.fromkeys(source.partition(":")[0] for source in functions.values())
    runs = [f"module {one} would be imported and run, from {file_of(one)}" for one in modules]
    runs += [
        f"{field.removeprefix(_VARIABLE)} may load a library, run a program or write a file in each worker"
        for field in others.keys() - functions.keys()
    ]
    what = f"is {'code' if functions else 'a variable'} that {where} names: {'; '.join(runs)}"
    if claimed:
        what += f"; it has changed since you trusted it: its digest was {claimed} and is {now or 'none'}"
    remedy = "read it, then pass --trust-code (in Python: trust_code=True) if you trust its author, or name it yourself"
    (first, source), *rest = others.items()
    raise ConfigError(explain(" and ".join([first, *(field for field, _ in rest)]), source, what, remedy))


def _section_field(field: str) -> str:
    """Return the setting that ``field`` belongs to: ``elastic.env.NAME`` is a part of ``elastic.env``."""
    return ".".join(field.split(".")[:2])


def find_code(field: str, source: str) -> Callable[..., object]:
    """Return the function that ``source``, the value of ``field``, names as package.module:function. Modules are looked up in
    all installed packages, then in the current folder. The caller has checked that this code may run (``check_trusted``).

    Raises:
        ConfigError: there is no such function, or the function does not take the arguments of ``field``.
    """
    returns = _RETURNS[field]
    module, _, name = source.partition(":")
    if not module or not name:
        problem = "is not package.module:function"
        raise ConfigError(explain(field, source, problem, f"name a function that returns {returns}"))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file in this folder must not shadow an installed package
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        problem, remedy = f"cannot be imported ({error})", "start in the folder that contains it, or install it"
        raise ConfigError(explain(field, source, problem, remedy)) from None
    except Exception as error:  # importing runs the user's module, which may raise any error
        problem = f"cannot be imported: it raises {type(error).__name__} ({error})"
        raise ConfigError(explain(field, source, problem, "import the module in Python to see where")) from error
    if not callable(function):
        raise ConfigError(explain(field, source, "is not a function", f"name one that returns {returns}"))
    found: Callable[..., object] = function
    _check_arguments(field, source, found)
    return found


def _check_arguments(field: str, source: str, function: Callable[..., object]) -> None:
    """Raise ConfigError if a function cannot be called with the arguments of ``field``. A function whose signature Python
    cannot read is accepted."""
    arguments = _ARGUMENTS.get(field)
    if arguments is None:
        return
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        takes.bind(*arguments)
    except TypeError:
        called = f"{source.partition(':')[2]}({', '.join(arguments)})"
        problem, remedy = f"takes {takes}, and is called as {called}", "change what it takes: docs/how-to/own-code.md"
        raise ConfigError(explain(field, source, problem, remedy)) from None


def code_digest(sources: Mapping[str, str]) -> str:
    """Hash what a run would execute: the code of the functions, and the values of the environment variables.

    Args:
        sources: as ``Config.needs_trust`` returns them.

    Returns:
        32 hex digits; empty if ``sources`` is empty, or a function's file does not exist. Imports nothing.
    """
    digests = [_digest(source) for field, source in sources.items() if not field.startswith(_VARIABLE)]
    variables = {field: value for field, value in sources.items() if field.startswith(_VARIABLE)}
    if variables:
        digests.append(hashlib.sha256(json.dumps(variables, sort_keys=True, allow_nan=False).encode()).hexdigest()[:32])
    if len(digests) == 1 or "" in digests:
        return "" if "" in digests else digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32] if digests else ""


def _digest(source: str) -> str:
    """Hash all Python files of the outermost package of ``source``, or its file if it is a module without a package. Code that
    these files import from elsewhere is not hashed."""
    found, inside = "", False
    for spec in _specs(source.partition(":")[0]):
        if not inside:
            found = spec.origin or ""
        inside = inside or os.path.basename(found) == "__init__.py"
    if not os.path.isfile(found):
        return ""
    root = Path(found).parent
    files = sorted(root.rglob("*.py")) if inside else [Path(found)]
    digest = hashlib.sha256()
    for path in files:
        code = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(code)}\0".encode() + code)
    return digest.hexdigest()[:32]


def seal(text: str) -> str:
    """Return this user's seal of ``text``, 64 hex digits: an HMAC that only this user can compute. Empty if the user's key
    cannot be stored in ``~/.springtide``, or others can read it."""
    key = _key()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else ""


def is_sealed(text: str, found: object) -> bool:
    """Return whether ``found`` is this user's seal (HMAC) of ``text``."""
    mine = seal(text)
    return bool(mine) and isinstance(found, str) and hmac.compare_digest(mine.encode(), found.encode())


def _key() -> bytes:
    """Return the user's secret key for seals (HMACs), which the first call makes. Empty if the key cannot be stored, or if
    other users can read it."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home folder
        path = Path(_KEY).expanduser()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)  # another process may have stored a key first: then both use that key
            beside.unlink()
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077:
                key = file.read(_KEY_BYTES)
                return key if len(key) == _KEY_BYTES else b""
    return b""


def file_of(module: str) -> str:
    """Return the file that importing ``module`` would run, or a text which says that there is no such file. Searches Python's
    path, then the current folder; imports nothing."""
    known = getattr(sys.modules.get(module), "__file__", None)
    if known:
        return str(known)
    specs = list(_specs(module))
    if len(specs) < len(module.split(".")):
        return "a file that does not exist now"
    return specs[-1].origin or ", ".join(specs[-1].submodule_search_locations or ())


def _specs(module: str) -> Iterator[ModuleSpec]:
    """Yield the module spec of each part of a dotted name, the outermost first; end at a part that is not found."""
    path = [*sys.path, os.getcwd()]
    for name in module.split("."):
        # search one part of the name at a time: given a dotted name, importlib.util.find_spec would import the parents
        spec = PathFinder.find_spec(name, path) if name else None
        if spec is None:
            return
        yield spec
        path = list(spec.submodule_search_locations or ())
