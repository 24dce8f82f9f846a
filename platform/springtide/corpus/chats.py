"""Chats of JSON lines and Parquet: turns of a system, users, tools and the assistant, whose answers are trained on.

messages                        a list of {role, content}
prompt, completion              a question and its answer
instruction, input, output      the same; an input, if there is one, follows the instruction after a blank line
prompt, chosen, rejected        a pair: a question, or the turns before, and two answers
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
"""The role whose turns are trained on."""
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
CHOSEN, REJECTED = "chosen", "rejected"
COLUMNS = (MESSAGES, PROMPT, COMPLETION, INSTRUCTION, INPUT, OUTPUT, CHOSEN, REJECTED)
"""Columns of Parquet that are read."""
EMPTY, UNANSWERED = "chat without messages", "chat without an answer"
"""Why a chat is dropped."""
EQUAL, ONE_SIDED = "pair of equal answers", "pair without two answers"
"""Why a pair is dropped."""
_FIRST = ("system", "developer")
_NOT_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
_SHOWN = 60


class Turn(NamedTuple):
    """What one says in a chat."""

    role: str
    content: str


class BadChat(Exception):
    """A chat that cannot be laid out. Arguments: what is wrong, and the remedy."""

    @property
    def problem(self) -> str:
        return str(self.args[0])

    @property
    def remedy(self) -> str:
        return str(self.args[1])


def has_chat(names: Collection[str]) -> bool:
    """Return whether a record with these fields holds a chat."""
    some = {PROMPT, COMPLETION}, {INSTRUCTION, OUTPUT}, {CHOSEN, REJECTED}
    return MESSAGES in names or any(one <= {*names} for one in some)


def turns_of(record: Any, field: str) -> tuple[Turn, ...] | str:
    """Return the turns of a record, or why it is dropped: nothing of it could be trained on.

    Args:
        record: a JSON object, or a row of Parquet.
        field: the field that holds the messages; ``text``, the setting's default, stands for ``messages``.

    Raises:
        BadChat: it holds no chat, or one whose roles or contents are wrong.

    Examples:
        >>> turns_of({"prompt": "2 + 2?", "completion": "4"}, "text")
        (Turn(role='user', content='2 + 2?'), Turn(role='assistant', content='4'))
    """
    if not isinstance(record, Mapping):
        raise BadChat(f"is a {type(record).__name__}, not an object with fields", "give each chat as an object")
    field = MESSAGES if field == "text" else field
    if record.get(field) is not None:
        messages = record[field]
        if not isinstance(messages, list):
            raise BadChat(f"{field} is a {type(messages).__name__}, not a list", "give a list of {role, content}")
        turns = tuple(_turn(number, message) for number, message in enumerate(messages))
    elif {PROMPT, COMPLETION} <= record.keys():
        turns = (Turn("user", _text(record, PROMPT)), Turn(ANSWERS, _text(record, COMPLETION)))
    elif {INSTRUCTION, OUTPUT} <= record.keys():
        added = _text(record, INPUT) if record.get(INPUT) is not None else ""
        asked = _text(record, INSTRUCTION) + (f"\n\n{added}" if added else "")
        turns = (Turn("user", asked), Turn(ANSWERS, _text(record, OUTPUT)))
    else:
        wanted = f"{field}, {PROMPT} and {COMPLETION}, or {INSTRUCTION} and {OUTPUT}"
        shown = ", ".join(map(str, [*record][:8]))[:200] or "nothing"
        raise BadChat(f"holds no chat: it has {shown}, not {wanted}", "name the field of the messages, corpus.field")
    _check_order(turns)
    if not turns:
        return EMPTY
    return turns if any(turn.role == ANSWERS and turn.content.strip() for turn in turns) else UNANSWERED


Chats = tuple[tuple[Turn, ...], tuple[Turn, ...]]
"""A chat, and the rejected one if they are a pair."""


def chats_of(record: Any, field: str) -> Chats | str:
    """Return the chat or the pair of a record, or why it is dropped. ``field``: as for ``turns_of``. Raises BadChat."""
    if isinstance(record, Mapping) and any(record.get(name) is not None for name in (CHOSEN, REJECTED)):
        return pair_of(record)
    turns = turns_of(record, field)
    return turns if isinstance(turns, str) else (turns, ())


def pair_of(record: Mapping[str, Any]) -> Chats | str:
    """Return the chats of a pair, the chosen one first, or why it is dropped: nothing could be learned from it.

    Args:
        record: with ``chosen`` and ``rejected``: the text of an answer, its messages, or those of the whole chat; and
            ``prompt``: the text of a question, or the messages before the answers, which whole chats need not have.

    Raises:
        BadChat: a role or content is wrong, or the answers are not to one prompt.

    Examples:
        >>> chosen, rejected = pair_of({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
        >>> chosen[0] == rejected[0], chosen[1].content, rejected[1].content
        (True, '4', '5')
    """
    before = _said(record, PROMPT, "user") if record.get(PROMPT) is not None else ()
    chats = []
    for name in (CHOSEN, REJECTED):
        turns = _said(record, name, ANSWERS)
        if turns and turns[0].role == ANSWERS:
            turns = (*before, *turns)
        elif turns[: len(before)] != before:
            raise BadChat(f"{name} does not begin with its prompt", "leave the prompt out, or give the answers alone")
        _check_order(turns)
        if not turns or turns[-1].role != ANSWERS or not turns[-1].content.strip():
            return ONE_SIDED
        chats.append(turns)
    chosen, rejected = chats
    if chosen[:-1] != rejected[:-1] or len(chosen) == 1:
        problem = "chosen and rejected have other turns before their last answers"
        raise BadChat(problem, "give two answers to one prompt")
    return EQUAL if chosen == rejected else (chosen, rejected)


def _said(record: Mapping[str, Any], name: str, role: str) -> tuple[Turn, ...]:
    """Return the turns of a field: those of a list of messages, or one turn of ``role``."""
    value = record.get(name)
    if isinstance(value, list):
        return tuple(_turn(number, message, f"{name}: ") for number, message in enumerate(value))
    return (Turn(role, _text(record, name)),)


def _turn(number: int, message: Any, of: str = "") -> Turn:
    where = f"{of}message {number}"
    if not isinstance(message, Mapping):
        raise BadChat(f"{where} is a {type(message).__name__}, not a table", "give {role, content}")
    role = message.get("role")
    if role not in ROLES:
        raise BadChat(f"{where}: role = {str(role)[:_SHOWN]!r} is not one of {', '.join(ROLES)}", "rename the role")
    if message.get("tool_calls"):
        raise BadChat(f"{where}: tool_calls are not supported", "write the calls into its content")
    return Turn(role, _text(message, "content", f"{where}: "))


def _text(record: Mapping[str, Any], name: str, where: str = "") -> str:
    value = record.get(name)
    if value is None:
        raise BadChat(f"{where}{name} is missing", "add it, or leave the chat out")
    if not isinstance(value, str):
        raise BadChat(f"{where}{name} is a {type(value).__name__}, not a text", "give text only")
    return _NOT_TEXT.sub("\ufffd", value)  # JSON can encode half a surrogate pair; the rest are no characters


def _check_order(turns: tuple[Turn, ...]) -> None:
    for number, turn in enumerate(turns):
        if turn.role in _FIRST and number:
            what = (
                f"a second {turn.role} turn" if turns[0].role in _FIRST else f"a {turn.role} turn that is not the first"
            )
            raise BadChat(f"message {number} is {what}", "join them at the beginning of the chat")
