"""Chat templates in Jinja's sandbox, with limits on steps and on text. The only file that imports ``jinja2``.

A template comes with a model, from anybody. The sandbox keeps it away from Python's own objects. The limits here stop one that
never ends or writes too much: each turn of a loop, each call and each item that a filter reads is a step, and each character
that is joined to a text counts.
"""

from __future__ import annotations

import functools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from springtide.corpus.chats import BadChat

MOST_STEPS = 2_000_000
"""Most steps of a rendering: a second or two."""
MOST_CHARACTERS = 2**26
"""Most characters that a rendering joins."""
BEGIN, END, APART = "\ufdd0", "\ufdd1", "\ufdd2"
"""Around an answer; inside what is text although it spells a special token. Unicode has them for such use, and no text does."""
_CALL_STEPS = 4
_JSON_STEPS = 20
"""Steps of a piece of JSON: Python's encoder passes it through a function for each level."""
_NAMES = ("__answer_begins__", "__answer_ends__")
"""Variables of the marks."""
_MARKS = re.compile(f"[{BEGIN}{END}{APART}]")
_FILE = "<template>"
_TEXT_METHODS = """
    strip lstrip rstrip removeprefix removesuffix split rsplit splitlines partition rpartition startswith endswith upper lower
    title capitalize find rfind index count isdigit isalpha isspace isupper islower replace join
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"index", "count"}),
    tuple: frozenset({"index", "count"}),
    int: frozenset(),
    float: frozenset(),
    bytes: frozenset(),
    range: frozenset(),
}
"""Type -> its attributes that a template may use: none makes much of little."""
_FILTERS = """
    trim upper lower title capitalize length count list first last default d items dictsort selectattr rejectattr select reject
    map sort reverse unique int float abs round min max sum batch slice
"""


class Sandbox:
    """A template that is compiled.

    Raises:
        SyntaxError: at the line ``lineno``: ``msg`` says what is wrong.
    """

    def __init__(self, text: str) -> None:
        if _MARKS.search(text):
            raise SyntaxError("it holds U+FDD0, U+FDD1 or U+FDD2, which no text does", (_FILE, 1, None, None))
        self._environment = _Environment()
        try:
            tree = self._environment.parse(text)
            self.has_marks = any(node.name == _NAMES[0] for node in tree.find_all(nodes.Name))
            """Whether ``{% generation %}`` says what the answers are."""
            self._template = self._environment.from_string(text)
        except TemplateSyntaxError as error:
            raise SyntaxError(error.message or "", (_FILE, error.lineno, None, None)) from None
        except RecursionError:
            raise SyntaxError("it is nested too deeply", (_FILE, 1, None, None)) from None

    def render(self, messages: Sequence[Mapping[str, str]], marks: bool, **variables: Any) -> str:
        """Return the text of a chat; ``marks``: with BEGIN and END around what stands in ``{% generation %}``.

        Raises:
            BadChat: the template refuses the chat, fails, or goes beyond the limits; with its line.
        """
        self._environment.refill()
        around = dict(zip(_NAMES, (BEGIN, END) if marks else ("", ""), strict=True))
        try:
            return self._template.render(messages=messages, **variables, **around)
        except Exception as error:  # whatever the template's own expressions raise
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
            where = f"line {lines[-1]} of the template" if lines else "the template"
            what = "calls itself too often" if isinstance(error, RecursionError) else str(error)[:300]
            kind = "" if isinstance(error, (TemplateError, RecursionError)) else f" {type(error).__name__}:"
            raise BadChat(f"{where}:{kind} {what or 'an error'}", "mend the template or the chat") from None


class _Bounds(NodeTransformer):
    """Put the limits into a template: what it repeats and joins goes through functions that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        """Count the turns of a loop."""
        if node.recursive:
            raise TemplateSyntaxError("recursive loops are not supported", node.lineno)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "bounded", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Count the characters that ``~`` joins."""
        self.generic_visit(node)
        texts = [nodes.Filter(one, "string", [], [], None, None, lineno=node.lineno) for one in node.nodes]
        return functools.reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), texts)  # type: ignore[arg-type, return-value]


class _Generation(Extension):
    """``{% generation %}``: what it holds is the model's answer, as in transformers' templates."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body of a block between the two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in _NAMES)
        return [begin, *body, end]


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._spelled,
            extensions=[_Generation, loopcontrols],
        )
        self.refill()
        self.concat = self._concat  # type: ignore[method-assign]
        plain = {name: self._counted(self.filters[name]) for name in _FILTERS.split()}
        own = {"bounded": self._bounded, "string": self._spelled, "tojson": self._json}
        self.filters = {**plain, **own, "replace": self._replace, "join": self._join}
        self.globals = {"range": self._range, "namespace": Namespace, "raise_exception": _raise}

    def refill(self) -> None:
        """Begin a rendering."""
        self._steps, self._characters = MOST_STEPS, MOST_CHARACTERS

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _Bounds().visit(source)
        return super()._generate(source, *args, **kwargs)

    def _step(self, number: int = 1) -> None:
        self._steps -= number
        if self._steps < 0:
            raise SecurityError(f"takes more than {MOST_STEPS:,} steps")

    def _spend(self, characters: int) -> None:
        self._characters -= characters
        if self._characters < 0:
            raise SecurityError(f"writes more than {MOST_CHARACTERS:,} characters")

    def _concat(self, texts: Iterable[str]) -> str:
        found = []
        for text in texts:
            self._spend(len(text))
            found.append(text)
        return "".join(found)

    def _bounded(self, values: Any) -> list[Any]:
        found = []
        for value in values:
            self._step()
            found.append(value)
        return found

    def _range(self, *bounds: int) -> range:
        found = range(*bounds)
        self._step(len(found) if len(bounds) < 3 or found else 0)
        return found

    def _spelled(self, value: Any) -> str:
        """Return what an expression prints. Lists and tables are for ``tojson``: they may hold themselves many times."""
        if isinstance(value, Undefined):
            return str(value)
        if not isinstance(value, (str, int, float, type(None))):
            raise SecurityError(f"prints a {type(value).__name__}; use tojson")
        return str(value)

    def _json(self, value: Any, indent: int | None = None, **_: Any) -> str:
        def pieces() -> Iterator[str]:
            for piece in json.JSONEncoder(ensure_ascii=False, indent=indent and min(indent, 8)).iterencode(value):
                self._step(_JSON_STEPS)
                yield piece

        return self._concat(pieces())

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        text, old, new = self._spelled(text), str(old), str(new)
        times = text.count(old) if count < 0 else min(count, text.count(old))
        self._spend(len(text) + times * len(new))
        return text.replace(old, new, count)

    def _join(self, values: Any, by: str = "", attribute: str | None = None) -> str:
        texts = [
            self._spelled(one if attribute is None else self.getitem(one, attribute)) for one in self._bounded(values)
        ]
        self._spend(len(by) * len(texts))
        return by.join(self._spent(texts))

    def _spent(self, texts: Sequence[str]) -> Iterator[str]:
        for text in texts:
            self._spend(len(text))
            yield text

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._step(1 + sum(_size(value) for value in args[:3]))
            return function(*args, **kwargs)

        return counted

    def wrap_str_format(self, value: Any) -> None:
        """Give no special meaning to ``str.format``: it is not among the methods."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute; of types that grow text, only those in ``_METHODS``."""
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja declares it
        """Call a function or a method for a template, and count it."""
        text = getattr(__obj, "__self__", None)
        __self._step(_CALL_STEPS + _size(text))
        if isinstance(text, str) and __obj.__name__ in ("replace", "join"):
            return __self._replace(text, *args) if __obj.__name__ == "replace" else __self._join(args[0], text)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator; refuse one that makes much of little."""
        is_numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "+" and not is_numbers:
            self._spend(sum(len(one) for one in (left, right) if hasattr(one, "__len__")))
        elif operator != "+" and not (is_numbers and max(abs(left), abs(right)) < 2**31 and operator != "**"):
            raise SecurityError(f"{operator} is for numbers below 2**31" if operator != "**" else "** is not supported")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """Return the steps that reading a value takes."""
    if isinstance(value, str):
        return len(value) >> 10
    return len(value) if isinstance(value, (list, tuple, dict, range)) else 0


def _raise(message: str) -> None:
    raise TemplateError(str(message))
