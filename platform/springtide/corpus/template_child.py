"""The program of the process that renders chat templates; ``chat_sandbox`` starts it. The only file that imports ``jinja2``.

    stdin     HEADER, then a request   {"template": text, "renderings": [{"messages": [...], "marks": [begin, end], ...}]}
    stdout    length, then a reply     {"has_marks": bool} or {"syntax": message, "line": number}
              length, then a reply     {"text": text} for each rendering, up to the first that fails:
                                       {"failure": sentence} or {"memory": true}

Requests and replies are JSON. The process ends at the end of stdin.

A template comes with a model, which anybody may have made. Jinja's sandbox blocks access to Python's objects, but not endless
computation. Operations are too many to limit one by one, so the kernel limits the process:

1. CPU time of a rendering: the timer's signal has its default action, which ends the process. A handler in Python would wait
   for the end of the running C call, and ``5|round(-300000000)`` is a single call.
2. Address space: an allocation beyond the limit raises MemoryError.
3. No new file, no byte to a file, no process: for a template that escapes the sandbox.

The program is started by path and does not import springtide, which makes it start in 60 ms instead of a second.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[2:]  # the folders of jinja2 and markupsafe: python -I -S does not add site-packages

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_HEADER, _LENGTH_BYTES = struct.Struct("!QdQQ"), 8
"""Header of a request: its bytes, and limits for each rendering: CPU seconds, added bytes of memory, bytes of the reply. Must
equal the header in ``chat_sandbox``."""
_ORPHAN_CHECK_S = 5.0
"""Interval at which an idle process checks that its parent lives. Stdin ends with the parent, unless a fork of the parent keeps
the pipe open."""
TODAY = datetime.date(2024, 7, 26)
"""Date that templates get as today. Llama 3.2's template falls back to the same date."""
_NAMES = ("__answer_begins__", "__answer_ends__")
"""Variables that hold the marks around an answer."""
_FILE = "<template>"
_LAZY = "{{ '\\N{DIGIT ONE}' | striptags | wordwrap | pprint }}{{ missing.name }}"
"""Template rendered at the start, so that Jinja imports what it imports lazily: a codec, modules for filters and for errors."""


class _Generation(Extension):
    """Jinja extension for ``{% generation %}``: a block with the model's answer, as in transformers' templates."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes of the block's body, with a mark before and after them."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in _NAMES)
        return [begin, *body, end]


class _Namespace(Namespace):
    """Jinja's namespace, which refuses names that begin with an underscore. Source: transformers' ``TemplateNamespace``."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as transformers' templates expect it, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=False
    )


def _raise(message: str) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    """Return the fixed date ``TODAY`` in the given format, so that a dataset does not depend on the day it is made."""
    return TODAY.strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's sandbox as transformers configures it, without ``lipsum`` and ``random``, which give random results."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, "namespace": _Namespace, "dict": _dict}
    made.filters["tojson"] = _json
    del made.globals["lipsum"], made.filters["random"]
    return made


_ENVIRONMENT = _environment()


@functools.lru_cache(maxsize=1)  # one: constants of other cached templates would count towards the memory limit
def _compiled(text: str) -> tuple[Template, bool]:
    """Return the compiled template, and whether ``{% generation %}`` marks its answers."""
    tree = _ENVIRONMENT.parse(text)
    has_marks = any(node.name == _NAMES[0] for node in tree.find_all(nodes.Name))
    return _ENVIRONMENT.from_string(tree), has_marks


def main(parent: int) -> None:
    """Answer requests until stdin ends, or until the process with the id ``parent`` has ended."""
    _rendered(_compiled(_LAZY)[0], {"marks": ("", "")})
    used_bytes = _address_space_bytes()
    out = _isolated()
    while header := _next_header(parent):
        size, cpu_s, memory_bytes, reply_bytes = _HEADER.unpack(header)
        body = _read(size)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used_bytes + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        for reply in _replies(body, reply_bytes):
            # write each reply at once: the parent needs to know which rendering ended the process
            _write(out, reply)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _isolated() -> int:
    """Drop the rights that a rendering does not need; return the file descriptor for replies."""
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)  # up to here, errors go to the terminal or log of the parent
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_NOFILE, (out + 1, out + 1))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    # undo an ignored or blocked SIGPROF, which a child inherits from its parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    return out


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _next_header(parent: int) -> bytes:
    """Wait for the header of the next request and return it; empty if stdin or the parent process has ended."""
    while not select.select([0], [], [], _ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent:
            return b""
    return _read(_HEADER.size)


def _read(size: int) -> bytes:
    """Return ``size`` bytes of stdin, or fewer at its end."""
    data = bytearray()
    while len(data) < size and (part := os.read(0, min(size - len(data), 2**20))):
        data += part
    return bytes(data)


def _write(out: int, reply: bytes) -> None:
    left = memoryview(len(reply).to_bytes(_LENGTH_BYTES, "big") + reply)
    while left:
        left = left[os.write(out, left) :]


def _replies(body: bytes, reply_bytes: int) -> Iterator[bytes]:
    """Yield the replies to a request, up to the first failure."""
    try:
        request = json.loads(body)
        compiled = _compiled_or_problem(request["template"])
        if isinstance(compiled, dict):
            yield _encoded(compiled)
            return
        template, has_marks = compiled
        yield _encoded({"has_marks": has_marks})
        for rendering in request["renderings"]:
            found = _rendered(template, rendering)
            reply = _encoded(found)
            if len(reply) > reply_bytes:
                found = {"failure": f"the template writes more than {reply_bytes >> 20} MiB"}
                reply = _encoded(found)
            yield reply
            if "failure" in found:
                return
    except MemoryError:
        yield b'{"memory": true}'


def _compiled_or_problem(text: str) -> tuple[Template, bool] | dict[str, Any]:
    try:
        return _compiled(text)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return {"syntax": error.message or "", "line": error.lineno}
    except RecursionError:
        return {"syntax": "it is nested too deeply", "line": 1}
    except Exception as error:  # errors of Python's compiler, for instance too many nested blocks
        return {"syntax": f"{type(error).__name__}: {str(error)[:300]}", "line": 1}


def _rendered(template: Template, rendering: dict[str, Any]) -> dict[str, str]:
    around = dict(zip(_NAMES, rendering.pop("marks"), strict=True))
    try:
        return {"text": template.render(rendering, **around)}
    except MemoryError:
        raise
    except Exception as error:  # whatever the template's own expressions raise
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
        where = f"line {lines[-1]} of the template" if lines else "the template"
        what = "calls itself too often" if isinstance(error, RecursionError) else str(error)[:300]
        kind = "" if isinstance(error, (TemplateError, RecursionError)) else f" {type(error).__name__}:"
        return {"failure": f"{where}:{kind} {what or 'an error'}"}


def _encoded(reply: dict[str, Any]) -> bytes:
    # a template may write half of a surrogate pair, which strict UTF-8 cannot encode
    return json.dumps(reply, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main(int(sys.argv[1]))
