"""Read the YAML that people write: configs, cluster files, values of options. JSON is read too, because it is a subset of YAML.

YAML 1.1 reads `010` as 8, `1:30` as 90, `no` as false and `2026-12-01` as a date, and keeps the last of two equal keys. This
module reports such values as errors, with line numbers, wherever the field expects another type. Files that springtide wrote
itself are read by ``read_stored``, without these rules: PyYAML wrote quotes around such values.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel

from springtide.config.quantities import Until
from springtide.errors import ConfigError, explain, printable, redacted

Path = tuple[int | str, ...]
"""Keys and indexes from the top of a file to a value."""

_MOST_DEPTH = 200
"""Deepest nesting of brackets that is accepted; a config has three levels."""
_MOST_PAIRS = 10_000
"""Most entries of one mapping after YAML's merge key ``<<`` is expanded in it."""
_MOST_PROBLEMS = 30
_SHOWN = 500
"""Most characters of an error of PyYAML that are shown."""
_VALUE_SHOWN = 100
_BRACKETS = re.compile(r"[\[\]{}]")
_LISTS = re.compile(rf"^[ \t]*(?:-[ \t]+){{{_MOST_DEPTH + 1}}}", re.MULTILINE)
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_NULL = f"{_TAG}null"
_WORDS = {f"{_TAG}int": "number", f"{_TAG}float": "number", f"{_TAG}bool": "flag", f"{_TAG}timestamp": "date"}
"""Tag of an unquoted value that is not text -> the kind of value that YAML reads."""
_MOST_PARTS = 8
"""Most commas in a number, as in ``1,000``, that are recognised; also most colons of a number in base 60, as in ``1:30``."""
_PART_OF_NUMBER = re.compile(r"\d[\d_]*\.?\d*(?:e[+-]?\d+)?[A-Za-z]*")
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+[A-Za-z]*")


@dataclasses.dataclass(frozen=True)
class Parsed:
    """Data and line numbers of a file."""

    data: Any
    """Content of the file as nested dicts, lists and plain values."""
    lines: Mapping[Path, int]
    """Path -> line of its value, from 1; a value that an alias repeats has the line of the alias."""

    def line(self, path: Path) -> int:
        """Return the line of the value at ``path``; if the value is missing, the line of the innermost table that exists."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_given(text: bytes, name: str, what: str, schema: type[BaseModel]) -> Parsed:
    """Parse a file that a person wrote.

    Args:
        text: YAML or JSON.
        name: name of the file, for errors.
        what: what the file is, such as ``config``, for errors.
        schema: pydantic model of the data, whose annotations decide where a number, a flag or a text is expected.

    Raises:
        ConfigError: each problem with its file and line.

    Examples:
        >>> from springtide.config import Config
        >>> from springtide.config.yaml_text import read_given
        >>> read_given(b"stream: {seed: 010}", "a.yaml", "config", Config)
        Traceback (most recent call last):
        springtide.errors.ConfigError: a.yaml:1: stream.seed = 010: was read as the number 8, in base 8; write it in decimal
    """
    if not text.startswith((b"\xff\xfe", b"\xfe\xff")):  # these bytes begin UTF-16, which PyYAML reads
        try:
            text.decode()
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            problem = f"has a byte that is not UTF-8, 0x{text[error.start]:02x}"
            raise ConfigError(f"{name}:{line}: {problem}; save the file as UTF-8") from None
    try:
        return _parse(_without_tabs(text), schema, (), lambda line: f"{name}:{line}: ")
    except yaml.MarkedYAMLError as error:
        if error.problem_mark is not None and "'\\t'" in (error.problem or ""):
            line = error.problem_mark.line + 1
            raise ConfigError(f"{name}:{line}: a tab at line {line}; YAML wants spaces") from None
        raise ConfigError(explain(what, name, f"is not YAML ({_short(error)})", "fix the file")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2026-02-30
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(explain(what, name, f"is not YAML ({_short(error)})", "fix the file")) from None


def read_value(text: str, field: str, kind: Any) -> Any:
    """Return the list or table that an option of the command line gives to a field.

    Args:
        text: value of the option, in YAML.
        field: dotted name of the field.
        kind: annotation of the field.

    Raises:
        ConfigError: ``text`` is not YAML, or YAML 1.1 reads a value as another type than the field has.

    Examples:
        >>> from springtide.config.yaml_text import read_value
        >>> read_value("[en, no]", "corpus.languages", tuple[str, ...])
        Traceback (most recent call last):
        springtide.errors.ConfigError: corpus.languages.1 = no: was read as false; put quotes around it
    """
    try:
        return _parse(text, kind, tuple(field.split(".")), lambda _: "").data
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"is not YAML ({_short(error)})"
        raise ConfigError(explain(field, text, problem, "quote it, and close each bracket")) from None


def read_stored(text: bytes, name: str) -> Any:
    """Return the plain data of a config that springtide wrote. Raises ConfigError, which names the file, if the text is not
    YAML."""
    try:
        check_depth(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(explain("config", name, f"is not YAML ({_short(error)})", "fix the file")) from None


def check_depth(text: str | bytes) -> None:
    """Raise RecursionError if brackets, or lists that begin in one line (``- - -``), nest deeper than 200. PyYAML's time grows
    with the square of the depth of brackets: it would take minutes to fail. Without the limit for lists, the recursion limit of
    this Python process would decide which files are read."""
    depth, characters = 0, text if isinstance(text, str) else text.decode("latin-1")
    if _LISTS.search(characters):
        raise RecursionError(f"lists nest deeper than {_MOST_DEPTH}")
    for bracket in _BRACKETS.findall(characters):
        depth += 1 if bracket in "[{" else -1
        if depth > _MOST_DEPTH:
            raise RecursionError(f"brackets nest deeper than {_MOST_DEPTH}")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with a limit on the entries that the merge key ``<<`` adds: merges of merges grow exponentially."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace ``<<`` by the entries of the mappings that it names. Raises ConstructorError if there are too many."""
        before = len(node.value)
        super().flatten_mapping(node)
        if len(node.value) > max(before, _MOST_PAIRS):
            problem = f"<< brings {len(node.value)} values, and {_MOST_PAIRS} is the limit"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Parse an integer as PyYAML does, but refuse numbers in base 60 that would take hours."""
        if node.value.count(":") > _MOST_PARTS:
            problem = f"a number in base 60 has more than {_MOST_PARTS} colons"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


def _short(error: Exception) -> str:
    """Return an error's text, shortened, because PyYAML may quote a line that is as long as the file."""
    text = str(error)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _without_tabs(text: bytes) -> bytes:
    """Return ``text``, with spaces for tabs if it is JSON: JSON may be indented by tabs, and YAML may not."""
    if b"\t" in text and text.lstrip()[:1] == b"{":
        check_depth(text)
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return text
        return text.replace(b"\t", b" ")  # strings in JSON cannot contain a raw tab
    return text


def _parse(text: bytes | str, kind: Any, path: Path, where: Callable[[int], str]) -> Parsed:
    """Return the data and lines of YAML whose value should be of ``kind``, an annotation. ``where``: function from a line
    number to the beginning of an error message. Raises ConfigError for problems that ``_Reader`` finds, and the errors of
    PyYAML and ``check_depth``."""
    check_depth(text)
    loader = _Loader(text)
    try:
        reader, node = _Reader(where), loader.get_single_node()
        if node is None:
            return Parsed(None, {})
        reader.check(node, path, kind)
        if reader.problems:
            more = [f"and {reader.more} more"] * (reader.more > 0)
            raise ConfigError("\n".join(reader.problems + more))
        return Parsed(loader.construct_document(node), reader.lines)
    finally:
        loader.dispose()


class _Reader:
    """Walks the nodes of a file, records their lines, and finds values that YAML reads as another type than the field has."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self._where = where
        self._seen: set[int] = set()  # check each node once: aliases of aliases would visit it exponentially often
        self.lines: dict[Path, int] = {}
        self.problems: list[str] = []
        self.more = 0
        """Number of problems that were found after ``problems`` was full."""

    def check(self, node: yaml.Node, path: Path, kind: Any) -> None:
        """Check ``node`` at ``path``, which should be of ``kind``: an annotation, or None if the type is not known."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self.check(value, (*path, index), _below(kind, index))
        elif isinstance(node, yaml.MappingNode):
            self._check_pairs(node, path, kind)
        elif isinstance(node, yaml.ScalarNode) and node.style is None and node.tag in _WORDS:
            self._check_scalar(node, path, kind)

    def _check_pairs(self, node: yaml.MappingNode, path: Path, kind: Any) -> None:
        first: dict[str, int] = {}
        parts = 0
        for at, (key, value) in enumerate(node.value):
            if parts:  # the rest of a number with commas, which is already reported
                parts -= 1
                continue
            if not isinstance(key, yaml.ScalarNode):  # a list or table as key: PyYAML refuses it later
                continue
            here, line = (*path, key.value), key.start_mark.line + 1
            if key.value in first:
                self._refuse(here, line, f": is given twice, in lines {first[key.value]} and {line}; keep one of them")
                continue
            first[key.value] = line
            if key.tag == _MERGE:
                for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    self.check(one, (*path, "<<"), kind)
                continue
            if key.style is None and key.tag in _WORDS:
                self._refuse(here, line, f": the name was read as {_reading(key)}; put quotes around it")
            number = _number_with_commas(node.value, at) if node.flow_style else ""
            if parts := number.count(","):
                right = number.replace(",", "" if _THOUSANDS.fullmatch(number) else ".")
                self._refuse(here, line, f" = {number}: a comma separates entries here; write {right}")
            else:
                self.check(value, here, _below(kind, key.value))
            self.lines[here] = line

    def _check_scalar(self, node: yaml.ScalarNode, path: Path, kind: Any) -> None:
        accepted, read = _accepted(kind), _WORDS[node.tag]
        is_odd = read == "number" and _base(node.value) != 10
        if not accepted or (read in accepted and not is_odd) or (read == "number" and accepted == {"flag"}):
            return
        remedies = ["write it in decimal" if is_odd else "give a number"] if "number" in accepted else []
        remedies += ["put quotes around it"] if "text" in accepted else []
        remedies = remedies or [{"flag": "give true or false", "date": "give a time"}[one] for one in sorted(accepted)]
        value = f" = {node.value[:_VALUE_SHOWN]}: was read as {_reading(node)}; {', or '.join(remedies)}"
        self._refuse(path, node.start_mark.line + 1, value)

    def _refuse(self, path: Path, line: int, what: str) -> None:
        if len(self.problems) < _MOST_PROBLEMS:  # a limit: redacting all problems of a hostile file takes minutes
            field = ".".join(map(str, path))[:_SHOWN]
            self.problems.append(printable(redacted(f"{self._where(line)}{field}{what}")))
        else:
            self.more += 1


def _base(text: str) -> int:
    """Return the base in which YAML 1.1 reads a number: 8 for spellings like ``010``, 60 for ``1:30``, else 10."""
    digits = text.lstrip("+-")
    if ":" in digits:
        return 60
    is_octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "xb" and not re.search("[.eE]", digits)
    return 8 if is_octal else 10


def _reading(node: yaml.ScalarNode) -> str:
    """Return in words how YAML reads an unquoted value, such as ``the number 8, in base 8``."""
    read = _WORDS[node.tag]
    if read == "date":
        return "a date"
    if len(node.value) > _VALUE_SHOWN:  # Python refuses to print very long integers
        return "a number"
    try:
        value: Any = yaml.SafeLoader("").construct_object(node)
    except ValueError:  # PyYAML's pattern for numbers matches 0x_, which is no number
        return "a number"
    if read == "flag":
        return "true" if value else "false"
    base = _base(node.value)
    return f"the number {value}{f', in base {base}' if base != 10 else ''}"


def _number_with_commas(pairs: list[tuple[yaml.Node, yaml.Node]], at: int) -> str:
    """Return the number at pair ``at``, joined with the parts that YAML cut off at its commas. Empty if the value of pair
    ``at`` is not a whole number.

    ``{peak_lr: 3,5e-4}`` is two pairs in YAML: peak_lr is 3, and 5e-4 has no value. The result is ``3,5e-4``.
    """
    _, last = pairs[at]
    if not isinstance(last, yaml.ScalarNode) or last.style is not None or not re.fullmatch(r"[-+]?\d+", last.value):
        return ""
    found = [last.value]
    for key, value in pairs[at + 1 : at + 1 + _MOST_PARTS]:
        is_part = isinstance(key, yaml.ScalarNode) and key.style is None and _PART_OF_NUMBER.fullmatch(key.value)
        has_value = value.tag != _NULL or value.value != ""
        if not is_part or has_value or key.start_mark.index != last.end_mark.index + 1:
            break
        found.append(key.value)
        last = key
    return ",".join(found)


def _alternatives(kind: Any) -> list[Any]:
    """Return the types that an annotation allows, without the metadata of ``Annotated``."""
    if typing.get_origin(kind) is Annotated:
        return _alternatives(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(kind) for one in _alternatives(part)]
    return [kind]


def _below(kind: Any, key: int | str) -> Any:
    """Return the annotation of the value at ``key`` of a table or a list; None if it is not known."""
    for one in _alternatives(kind):
        origin, arguments = typing.get_origin(one), typing.get_args(one)
        if isinstance(one, type) and issubclass(one, BaseModel) and key in one.model_fields:
            return one.model_fields[str(key)].annotation
        if origin is dict and isinstance(key, str):
            return arguments[1]
        if origin is tuple and isinstance(key, int):
            return arguments[0] if arguments[-1] is Ellipsis else arguments[min(key, len(arguments) - 1)]
    return None


def _accepted(kind: Any) -> set[str]:
    """Return the kinds of scalar that an annotation allows: text, number, flag, date. The set is empty for tables, lists and
    unknown types."""
    found: set[str] = set()
    for one in _alternatives(kind):
        if typing.get_origin(one) is Literal:
            found.add("text")
        elif one is bool:
            found.add("flag")
        elif one is Until:
            found |= {"date", "number", "text"}
        elif isinstance(one, type) and issubclass(one, int | float):
            found.add("number")
        elif isinstance(one, type) and issubclass(one, str):
            found.add("text")
    return found
