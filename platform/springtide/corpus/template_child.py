"""Program of the child process that renders chat templates. ``chat_sandbox`` starts it. Only this file imports ``jinja2``.

    stdin     HEADER, then a request   {"template": text, "renderings": [{"messages": [...], "marks": [begin, end], ...}]}
    stdout    length, then a reply     {"has_marks": bool} or {"syntax": message, "line": number}
              length, then a reply     {"text": text} for each rendering, up to the first that fails:
                                       {"failure": sentence} or {"memory": true}

Requests and replies are JSON. The process ends at the end of stdin.

A template comes with a model, which anybody may have made, so it may be hostile. Jinja's sandbox blocks access to Python's
objects, but not endless computation. A template has too many operations to limit one by one, so the kernel limits the process:

1. CPU time of a rendering: a timer sends a signal that ends the process. A signal handler in Python would be too late: it waits
   for the end of the running C call, and ``5|round(-300000000)`` is one very long C call.
2. Address space: an allocation beyond the limit raises MemoryError.
3. Files and processes: the process cannot open or write files or start processes, even if a template escapes the sandbox.

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
    sys.path += sys.argv[2:]  # add the folders of jinja2 and markupsafe: python -I -S leaves out site-packages

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_HEADER, _LENGTH_BYTES = struct.Struct("!QdQQ"), 8
"""Header of a request: the size of the request [bytes], then limits for each rendering: CPU time [s], additional memory
[bytes], size of the reply [bytes]. Must equal ``_HEADER`` in ``chat_sandbox``. ``_LENGTH_BYTES``: size of the number before a
reply."""
_ORPHAN_CHECK_S = 5.0
"""Interval at which an idle process checks that its parent process lives [s]. The end of stdin is not enough: after the parent
has ended, a fork of the parent may keep the pipe open."""
TODAY = datetime.date(2024, 7, 26)
"""Date that templates get as today's date. It is fixed so that a dataset does not depend on the day it is made. It is the date
that Llama 3.2's template uses if it gets none."""
_NAMES = ("__answer_begins__", "__answer_ends__")
"""Names of the template variables that hold the marks before and after an answer."""
_FILE = "<template>"
_LAZY = "{{ '\\N{DIGIT ONE}' | striptags | wordwrap | pprint }}{{ missing.name }}"
"""Template that is rendered at the start, before files are forbidden. It makes Jinja import the modules that it imports lazily:
a codec, and modules for filters and errors."""


class _Generation(Extension):
    """Jinja extension for the block ``{% generation %}``, which encloses an answer of the model, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the syntax nodes inside the block, with a mark before the first and after the last node."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in _NAMES)
        return [begin, *body, end]


class _Namespace(Namespace):
    """Jinja's namespace object, but names that begin with an underscore are an error. Source: transformers'
    ``TemplateNamespace``."""

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
    """Filter ``tojson``: return a value as JSON, without the HTML escapes of Jinja's own filter, as in transformers."""
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


@functools.lru_cache(maxsize=1)  # one only: constants of more templates would count towards the memory limit
def _compiled(text: str) -> tuple[Template, bool]:
    """Compile a template. Return it, and whether it marks its answers with ``{% generation %}``."""
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
            # write each reply as soon as it is ready: if a rendering ends this process, the parent sees which one did
            _write(out, reply)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _isolated() -> int:
    """Forbid this process to open or write files and to start processes. Return the file descriptor for replies."""
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)  # from here on, errors no longer reach the terminal or log of the parent
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_NOFILE, (out + 1, out + 1))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (0, 0))
    # SIGPROF enforces the limit of CPU time: unblock it, because a child inherits an ignored or blocked signal
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    return out


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _next_header(parent: int) -> bytes:
    """Wait for the header of the next request and return it. Return b"" if stdin or the parent process has ended."""
    while not select.select([0], [], [], _ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent:
            return b""
    return _read(_HEADER.size)


def _read(size: int) -> bytes:
    """Return the next ``size`` bytes of stdin, or fewer if stdin ends."""
    data = bytearray()
    while len(data) < size and (part := os.read(0, min(size - len(data), 2**20))):
        data += part
    return bytes(data)


def _write(out: int, reply: bytes) -> None:
    left = memoryview(len(reply).to_bytes(_LENGTH_BYTES, "big") + reply)
    while left:
        left = left[os.write(out, left) :]


def _replies(body: bytes, reply_bytes: int) -> Iterator[bytes]:
    """Yield the reply to a request's template, then a reply for each of its renderings. Stop after the first failure."""
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
    except Exception as error:  # an error of Python's compiler, for example too many nested blocks
        return {"syntax": f"{type(error).__name__}: {str(error)[:300]}", "line": 1}


def _rendered(template: Template, rendering: dict[str, Any]) -> dict[str, str]:
    around = dict(zip(_NAMES, rendering.pop("marks"), strict=True))
    try:
        return {"text": template.render(rendering, **around)}
    except MemoryError:
        raise
    except Exception as error:  # an expression of the template may raise any error
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
        where = f"line {lines[-1]} of the template" if lines else "the template"
        what = "calls itself too often" if isinstance(error, RecursionError) else str(error)[:300]
        kind = "" if isinstance(error, (TemplateError, RecursionError)) else f" {type(error).__name__}:"
        return {"failure": f"{where}:{kind} {what or 'an error'}"}


def _encoded(reply: dict[str, Any]) -> bytes:
    # surrogatepass: a template may write half of a surrogate pair, which strict UTF-8 cannot encode
    return json.dumps(reply, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main(int(sys.argv[1]))
