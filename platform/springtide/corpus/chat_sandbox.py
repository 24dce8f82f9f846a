"""Compile and render chat templates in a child process, which has limits of CPU time and memory.

    chat_template   Sandbox.render        -> batches of renderings
    this process    _Renderer.replies     -> one request at a time             one child for all templates and threads
    its child       template_child.py     -> Jinja's sandbox, a reply for each rendering

If the child has ended, the next request starts a new one. Replies are checked, because a template that escapes Jinja's sandbox
could send any bytes.

A round trip takes as long as one rendering (about 0.1 ms), so short chats share requests. A request carries the text of its
template, so a new child needs nothing else. A child caches the last template that it compiled.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from springtide.corpus.chats import BadChat

CPU_S, _REQUEST_BYTES_PER_CPU_S = 2.0, 16 * 2**20
"""Limit of CPU time for a rendering [s]: 2 s, plus one second for each 16 MiB of the request."""
MEMORY_BYTES, _MEMORY_BYTES_PER_REQUEST_BYTE = 256 * 2**20, 16
"""Limit of memory for a rendering, in addition to the memory of Python and Jinja [bytes]. Each byte of the request raises the
limit by 16 bytes, because a character may take four bytes, and Jinja makes a few copies."""
BEGIN, END, APART = "\ufdd0", "\ufdd1", "\ufdd2"
"""Mark characters. BEGIN and END enclose an answer. APART is inserted between the characters of a message text that spells a
special token, so that the text is not read as the token. Unicode reserves these characters for internal use."""
_MARKS = re.compile(f"[{BEGIN}{END}{APART}]")
_REPLY_BYTES, _REPLY_BYTES_PER_REQUEST_BYTE = 2**20, 4
"""Maximum size of the JSON reply with one rendering [bytes]: 1 MiB, plus 4 bytes for each byte of the request."""
_BATCH_CHARACTERS, _MESSAGE_CHARACTERS = 2**16, 64
"""Two numbers of characters. A batch of renderings is sent as one request when its messages reach the first number. A message
counts as the length of its text plus the second number."""
_SILENCE_S = 300.0
"""Time without a reply after which the child is killed [s]. It protects against a suspended child or machine. A template that
loops forever ends much earlier, by its limit of CPU time."""
_END_S = 5.0
"""Time to wait for the end of a child that has closed its pipes, before it is killed [s]."""
_HEADER, _LENGTH_BYTES = struct.Struct("!QdQQ"), 8
"""Header of a request, and length of the size field that precedes a reply."""
_PROGRAM = Path(__file__).with_name("template_child.py")
_ENVIRONMENT = ("LD_LIBRARY_PATH",)
"""Environment variables that a child inherits, because Python may need them to start. Variables with credentials are not among
them."""


class Rendering(NamedTuple):
    """Input of a template for one rendering."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    """Tools that the chat may call."""
    prompt: bool = False
    """Whether the rendering ends with the header of the assistant's next answer (``add_generation_prompt``)."""
    marks: bool = False
    """Whether to put BEGIN and END around the content of each ``{% generation %}``."""


class Sandbox:
    """A compiled template, rendered in the child process.

    Raises:
        SyntaxError: the template has the error ``msg`` in the line ``lineno``.
        BadChat: the template cannot be compiled within the limits of time and memory.
    """

    def __init__(self, text: str) -> None:
        if _MARKS.search(text):
            raise _syntax_error("it contains U+FDD0, U+FDD1 or U+FDD2, which springtide uses as marks", 1)
        self._text = text
        [compiled] = _RENDERER.replies(text, [])
        if "syntax" in compiled:
            raise _syntax_error(compiled["syntax"], compiled["line"])
        _check(compiled)
        self.has_marks: bool = compiled["has_marks"]
        """Whether the template marks its answers with ``{% generation %}``."""

    def render(self, renderings: Iterable[Rendering], variables: Mapping[str, Any]) -> Iterator[str]:
        """Yield the text of each rendering, in order. Reads a whole batch of ``renderings`` before it yields their texts.

        Args:
            variables: variables of the template, in addition to those of a rendering.

        Raises:
            BadChat: the template raises an error for the next chat, or exceeds a limit of time or memory.
        """
        for batch in _batches(renderings):
            given = [
                {
                    **variables,
                    "messages": one.messages,
                    "tools": one.tools,
                    "documents": None,
                    "add_generation_prompt": one.prompt,
                    "marks": (BEGIN, END) if one.marks else ("", ""),
                }
                for one in batch
            ]
            compiled, *replies = _RENDERER.replies(self._text, given)
            _check(compiled)
            for reply in replies:
                _check(reply)
                yield reply["text"]


def _syntax_error(message: str, line: int) -> SyntaxError:
    return SyntaxError(message, ("<template>", line, None, None))


def _check(reply: Mapping[str, Any]) -> None:
    if "failure" in reply:
        raise BadChat(" ".join(reply["failure"].split()), reply.get("remedy", "mend the template or the chat"))


def _batches(renderings: Iterable[Rendering]) -> Iterator[list[Rendering]]:
    batch: list[Rendering] = []
    held = 0
    for one in renderings:
        batch.append(one)
        held += sum(_MESSAGE_CHARACTERS + _characters(message) for message in one.messages)
        if held >= _BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _characters(value: Any) -> int:
    """Estimate the number of characters of text in a JSON value."""
    if isinstance(value, (Mapping, list)):
        return sum(map(_characters, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, str) else 8


class _Limits(NamedTuple):
    """Limits of each rendering of a request."""

    cpu_s: float
    memory_bytes: int
    reply_bytes: int

    @classmethod
    def for_request(cls, size: int) -> _Limits:
        """Return the limits for a request of this many bytes."""
        return cls(
            CPU_S + size / _REQUEST_BYTES_PER_CPU_S,
            MEMORY_BYTES + _MEMORY_BYTES_PER_REQUEST_BYTE * size,
            _REPLY_BYTES + _REPLY_BYTES_PER_REQUEST_BYTE * size,
        )


class _Renderer:
    """Starts and owns the child process that renders templates. Starts it at the first request, and again after it has
    ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def after_fork(self) -> None:
        """Drop, in a forked process, the renderer child of the parent process. Make a new lock, because a thread of the parent
        may hold the old lock."""
        if self._child is not None:
            self._child.leave()
        self._lock, self._child = threading.Lock(), None

    def close(self) -> None:
        """Kill the child process, even if a thread waits for a reply of the child."""
        if self._child is not None:
            self._child.end()

    def replies(self, template: str, renderings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the reply to the template, then the reply to each rendering, up to the first failure.

        Returns:
            {"has_marks": bool} or {"syntax": message, "line": number}, then a {"text": text} per rendering. Instead of any of
            these, a failure is {"failure": problem}, with a "remedy" if a limit was exceeded.
        """
        request = {"template": template, "renderings": renderings}
        data = json.dumps(request, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
        limits = _Limits.for_request(len(data))
        with self._lock:
            is_fresh = self._child is None
            found, status = self._exchange(data, 1 + len(renderings), limits)
            # the child ended, but not by its limit of CPU time: for example, the kernel killed it when memory was short
            is_lost = status not in (None, -signal.SIGPROF)
            # earlier renderings may have fragmented the memory of an old child: retry once in a new child
            is_short = status is None and "memory" in found[-1] and not is_fresh
            if is_lost or is_short:
                found, status = self._exchange(data, 1 + len(renderings), limits)
        if status == -signal.SIGPROF:
            found.append(_beyond(f"takes more than {limits.cpu_s:.3g} s of CPU time", "let it loop less often"))
        elif status is not None:
            found.append(_beyond(f"ended its process twice, with status {status}", "simplify it"))
        elif "memory" in found[-1]:
            found[-1] = _beyond(f"needs more than {limits.memory_bytes >> 20} MiB of memory", "let it build less")
        return found

    def _exchange(self, data: bytes, num_replies: int, limits: _Limits) -> tuple[list[dict[str, Any]], int | None]:
        """Send a request; return the replies received, and the exit status of the child if it ended, else None."""
        child = self._child = self._child or _Child()
        found: list[dict[str, Any]] = []
        is_fit = False
        try:
            child.send(data, limits)
            while len(found) < num_replies:
                found.append(_checked(child.receive(limits.reply_bytes), is_first=not found))
                if not found[-1].keys() & {"has_marks", "text"}:
                    break
            is_fit = "memory" not in found[-1]  # a child that ran out of memory has a fragmented heap: end it
        except EOFError:
            return found, child.end(_END_S)
        except TimeoutError:
            found.append(_beyond(f"got no reply within {_SILENCE_S:g} s", "try again, and simplify it if that fails"))
        except (ValueError, RecursionError):
            found.append(_beyond("made its process reply what is no reply", "do not use it"))
        finally:
            if not is_fit:
                child.end()  # after KeyboardInterrupt too: else the next request would read replies to this request
                self._child = None
        return found, None


def _beyond(problem: str, remedy: str) -> dict[str, Any]:
    return {"failure": f"the template {problem}", "remedy": remedy}


def _checked(reply: Any, is_first: bool) -> dict[str, Any]:
    """Return ``reply`` as a dict. Raises ValueError if it does not have the form of a reply."""
    match reply:
        case {"has_marks": bool()} | {"syntax": str(), "line": int()} if is_first:
            pass
        case {"text": str()} if not is_first:
            pass
        case {"failure": str()} | {"memory": True}:
            pass
        case _:
            raise ValueError("not a reply")
    return dict(reply)


class _Child:
    """A process that runs ``template_child.py``."""

    def __init__(self) -> None:
        # -I, -S: ignore Python settings of the user and the environment, and hooks in site-packages
        command = [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), *folders_of("jinja2", "markupsafe")]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env=child_environment(),
            start_new_session=True,  # Ctrl-C in the terminal must not end the child
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = self._process.stdin, self._process.stdout
        self._requests, self._replies = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._requests, False)
        self._unread = bytearray()

    def send(self, data: bytes, limits: _Limits) -> None:
        """Send a request.

        Raises:
            EOFError: the child has ended.
            TimeoutError: the child reads nothing for ``_SILENCE_S``.
        """
        for part in (_HEADER.pack(len(data), *limits), data):
            left = memoryview(part)
            while left:
                _wait(self._requests, select.POLLOUT)
                try:
                    left = left[os.write(self._requests, left) :]
                except BrokenPipeError:
                    raise EOFError from None

    def receive(self, most: int) -> Any:
        """Return the next reply, of at most ``most`` bytes.

        Raises:
            EOFError: the child has ended.
            TimeoutError: the child sends nothing for ``_SILENCE_S``.
            ValueError, RecursionError: the reply is longer, or not JSON.
        """
        if (size := int.from_bytes(self._read(_LENGTH_BYTES), "big")) > most:
            raise ValueError("too long")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            _wait(self._replies, select.POLLIN)
            if not (data := os.read(self._replies, 2**16)):
                raise EOFError
            self._unread += data
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    def end(self, patience_s: float = 0.0) -> int:
        """Kill the child if it does not end by itself within ``patience_s``; return its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        self._close()
        return self._process.wait()

    def leave(self) -> None:
        """Close this process's copies of the pipes after a fork, and do not wait for the child: it belongs to the parent."""
        self._close()
        self._process.returncode = 0  # without an exit status, Popen warns that the child still runs

    def _close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def child_environment() -> dict[str, str]:
    """Return the environment of a process that handles untrusted input: only the variables that Python may need to start."""
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def folders_of(*packages: str) -> list[str]:
    """Return the folders that hold ``packages``, found without importing them here. A child needs them, because ``python -I``
    ignores packages that were installed with ``pip install --user``."""
    found = [importlib.util.find_spec(name) for name in packages]
    return [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin]


def _wait(file: int, event: int) -> None:
    ready = select.poll()
    ready.register(file, event)
    if not ready.poll(_SILENCE_S * 1000):
        raise TimeoutError


_RENDERER = _Renderer()
os.register_at_fork(after_in_child=lambda: _RENDERER.after_fork())
atexit.register(_RENDERER.close)
