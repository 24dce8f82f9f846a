"""Read chats from records: turns (messages) of a system, users, tools and the assistant. Training uses the assistant's turns.

messages                        a list of {role, content}, with tool_calls, reasoning_content and other keys that templates read
conversations                   like messages, or a list of {from, value}, as in ShareGPT
prompt, completion              a question and its answer, or the messages of each
instruction, input, output      a question and its answer; an input, if present, follows the instruction after a blank line
prompt, chosen, rejected        a preference pair: two answers to one question, or to the same earlier turns
tools, system                   optional, with any of the above: the tools that the chat may call, and its system turn
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
"""The role whose turns the model is trained to predict."""
_OTHER_ROLES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "function_call"), ANSWERS),
    **dict.fromkeys(("function", "ipython", "observation", "function_response"), "tool"),
}
"""Role names of other formats -> role names used here."""
MESSAGES, CONVERSATIONS, PROMPT, COMPLETION = "messages", "conversations", "prompt", "completion"
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
CHOSEN, REJECTED = "chosen", "rejected"
TOOLS, SYSTEM = "tools", "system"
COLUMNS = (MESSAGES, CONVERSATIONS, PROMPT, COMPLETION, INSTRUCTION, INPUT, OUTPUT, CHOSEN, REJECTED, TOOLS, SYSTEM)
"""Columns of a table that are read for chats."""
EMPTY, UNANSWERED = "chat without messages", "chat without an answer"
"""Reasons to drop a chat that is well-formed but holds nothing to train on."""
EQUAL, ONE_SIDED = "pair of equal answers", "pair without two answers"
"""Reasons to drop a pair of chosen and rejected answers that is well-formed but holds nothing to train on."""
NO_CHAT, NO_ROLE, NO_TEXT = "record that is no chat", "chat with an unknown role", "chat with content that is no text"
OUT_OF_ORDER, UNLIKE = "chat with a system turn that is not the first", "pair whose answers are not to one prompt"
REFUSED = "chat that the template cannot lay out"
"""Reasons to drop a chat or pair that is malformed."""
_FIRST = ("system", "developer")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that may hold the thoughts (reasoning) before an answer. Most data sets use only one of these keys."""
_READ_BY_TEMPLATES = ("tool_calls", *THOUGHTS, "name", "tool_call_id")
"""Keys of a message, in addition to role and content, that are passed to the template unchanged."""
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_NOT_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
_SHOWN = 60
_MOST_DEPTH = 32
"""Maximum nesting of JSON objects and lists in values that are passed to the template."""


class Turn(NamedTuple):
    """One message of a chat."""

    role: str
    content: str
    more: str = ""
    """JSON object with further keys of the message that templates read, such as ``tool_calls``. The first turn of a chat also
    has the ``tools`` of the chat. Empty if there are no such keys."""


class BadChat(Exception):
    """A chat that cannot be turned into tokens. Arguments: the problem, the remedy, and optionally the reason under which the
    chat is counted as dropped."""

    @property
    def problem(self) -> str:
        return str(self.args[0])

    @property
    def remedy(self) -> str:
        return str(self.args[1])

    @property
    def reason(self) -> str:
        return str(self.args[2]) if len(self.args) > 2 else REFUSED


def has_chat(names: Collection[str]) -> bool:
    """Return whether a record with these fields holds a chat."""
    some = {MESSAGES}, {CONVERSATIONS}, {PROMPT, COMPLETION}, {INSTRUCTION, OUTPUT}, {CHOSEN, REJECTED}
    return any(one <= {*names} for one in some)


def turns_of(record: Any, field: str) -> tuple[Turn, ...] | str:
    """Return the turns (messages) of a record. If it holds nothing to train on, return the reason to drop it.

    Args:
        record: a JSON object, or a row of a table.
        field: the field that holds the messages, from ``corpus.field``. Its default ``text`` stands for ``messages`` or
            ``conversations``.

    Raises:
        BadChat: the record holds no chat, or a chat with wrong roles or contents.

    Examples:
        >>> turns_of({"prompt": "2 + 2?", "completion": "4"}, "text")
        (Turn(role='user', content='2 + 2?', more=''), Turn(role='assistant', content='4', more=''))
    """
    if not isinstance(record, Mapping):
        problem = f"is a {type(record).__name__}, not an object with fields"
        raise BadChat(problem, "give each chat as an object", NO_CHAT)
    fields = (MESSAGES, CONVERSATIONS) if field == "text" else (field,)
    found = next((name for name in fields if record.get(name) is not None), None)
    if found is not None:
        messages = record[found]
        if not isinstance(messages, list):
            problem = f"{found} is a {type(messages).__name__}, not a list"
            raise BadChat(problem, "give a list of {role, content}", NO_CHAT)
        turns = tuple(_turn(number, message) for number, message in enumerate(messages))
    elif {PROMPT, COMPLETION} <= record.keys():
        turns = (*_said(record, PROMPT, "user"), *_said(record, COMPLETION, ANSWERS))
    elif {INSTRUCTION, OUTPUT} <= record.keys():
        added = _text(record, INPUT) if record.get(INPUT) is not None else ""
        asked = _text(record, INSTRUCTION) + (f"\n\n{added}" if added else "")
        turns = (Turn("user", asked), Turn(ANSWERS, _text(record, OUTPUT)))
    elif any(name in record for name in fields):
        return EMPTY
    else:
        wanted = f"{fields[0]}, {PROMPT} and {COMPLETION}, or {INSTRUCTION} and {OUTPUT}"
        shown = ", ".join(map(str, [*record][:8]))[:200] or "nothing"
        problem, remedy = f"holds no chat: it has {shown}, not {wanted}", "name the field of the messages, corpus.field"
        raise BadChat(problem, remedy, NO_CHAT)
    turns = _with_tools(record, turns)
    _check_order(turns)
    if not turns:
        return EMPTY
    return turns if any(map(_is_answer, turns)) else UNANSWERED


Chats = tuple[tuple[Turn, ...], tuple[Turn, ...]]
"""Two chats: the chosen and the rejected chat of a preference pair. For an ordinary chat, the second is empty, ()."""


def chats_of(record: Any, field: str) -> Chats | str:
    """Return the chat or preference pair of a record, or the reason to drop it if it has nothing to train on. ``field``: name
    of the field that holds the messages. Raises BadChat if the record is malformed."""
    if isinstance(record, Mapping) and any(record.get(name) is not None for name in (CHOSEN, REJECTED)):
        return pair_of(record)
    turns = turns_of(record, field)
    return turns if isinstance(turns, str) else (turns, ())


def pair_of(record: Mapping[str, Any]) -> Chats | str:
    """Return the chosen and the rejected chat of a preference pair. If its answers are equal or one is missing, return the
    reason to drop it.

    Args:
        record: an object with ``chosen`` and ``rejected``. Each is the text of an answer, a list with the messages of the
            answer, or a list with the messages of a whole chat. ``prompt`` is the text of the question, or the list of messages
            before the answers. It may be missing if ``chosen`` and ``rejected`` are whole chats.

    Raises:
        BadChat: a role or content is wrong, or the two answers have different prompts.

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
            problem, remedy = (
                f"{name} does not begin with its prompt",
                "leave the prompt out, or give the answers alone",
            )
            raise BadChat(problem, remedy, UNLIKE)
        turns = _with_tools(record, turns)
        _check_order(turns)
        if not turns or not _is_answer(turns[-1]):
            return ONE_SIDED
        chats.append(turns)
    chosen, rejected = chats
    if chosen[:-1] != rejected[:-1] or len(chosen) == 1:
        problem = "chosen and rejected have other turns before their last answers"
        raise BadChat(problem, "give two answers to one prompt", UNLIKE)
    return EQUAL if chosen == rejected else (chosen, rejected)


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the object keys whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def with_texts(turn: Turn, change: Callable[[str], str]) -> Turn:
    """Apply ``change`` to the content of a turn and to every string in ``more``, and return the new turn."""
    more = _dumped(_changed(json.loads(turn.more), change)) if turn.more else ""
    return Turn(turn.role, change(turn.content), more)


def message_of(turn: Turn, change: Callable[[str], str] = str) -> dict[str, Any]:
    """Return the message dict that chat templates read for a turn, with ``change`` applied to every string. The first message
    of a chat also has the ``tools`` of the chat."""
    more = _changed(json.loads(turn.more), change) if turn.more else {}
    return {"role": turn.role, "content": change(turn.content), **more}


def _is_answer(turn: Turn) -> bool:
    return turn.role == ANSWERS and bool(turn.content.strip() or '"tool_calls"' in turn.more)


def _with_tools(record: Mapping[str, Any], turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Add the record's ``system`` text as the first turn, if ``turns`` do not begin with a system turn. Add its ``tools`` to
    the first turn. Return the new turns."""
    if turns and record.get(SYSTEM) and turns[0].role not in _FIRST:
        turns = (Turn("system", _text(record, SYSTEM)), *turns)
    tools = record.get(TOOLS)
    if isinstance(tools, str) and tools.strip():  # tables store tools as JSON text: their keys differ between rows
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise BadChat(f"{TOOLS} is a text that is not JSON", "give a list of tools", NO_TEXT) from None
    if not tools or not turns:
        return turns
    if not isinstance(tools, list):
        raise BadChat(f"{TOOLS} is a {type(tools).__name__}, not a list", "give a list of tools", NO_TEXT)
    more = json.loads(turns[0].more or "{}") | {TOOLS: _changed(tools, _as_text)}
    return (turns[0]._replace(more=_dumped(more)), *turns[1:])


def _said(record: Mapping[str, Any], name: str, role: str) -> tuple[Turn, ...]:
    """Return the turns in the field ``name`` of a record. A list becomes one turn per message. A text becomes a
    single turn of the role ``role``."""
    value = record.get(name)
    if isinstance(value, list):
        return tuple(_turn(number, message, f"{name}: ") for number, message in enumerate(value))
    return (Turn(role, _text(record, name)),)


def _turn(number: int, message: Any, of: str = "") -> Turn:
    where = f"{of}message {number}"
    if not isinstance(message, Mapping):
        raise BadChat(f"{where} is a {type(message).__name__}, not a table", "give {role, content}", NO_CHAT)
    given = next((message[key] for key in _ROLE_KEYS if message.get(key) is not None), None)
    plain = given.lower() if isinstance(given, str) else ""
    role = _OTHER_ROLES.get(plain, plain)
    if role not in ROLES:
        problem = f"{where}: role = {str(given)[:_SHOWN]!r} is not one of {', '.join(ROLES)}"
        raise BadChat(problem, "rename the role", NO_ROLE)
    more = {key: message[key] for key in _READ_BY_TEMPLATES if message.get(key) not in (None, "", [])}
    content = next((message[key] for key in _CONTENT_KEYS if message.get(key) is not None), None)
    call = message.get("function_call")
    if plain == "function_call":
        call, content = content, ""
    if call is not None and role == ANSWERS and "tool_calls" not in more:
        more["tool_calls"] = [{"type": "function", "function": _call(call, where)}]
    if content is None and not more and not any(key in message for key in _CONTENT_KEYS):
        raise BadChat(f"{where}: content is missing", "add it, or leave the chat out", NO_TEXT)
    text = _joined("" if content is None else content, where)
    if content is None and "tool_calls" in more and "content" in message:
        more["content"] = None  # keep null: templates treat it differently from an empty string
    return Turn(role, text, _dumped(_changed(more, _as_text)) if more else "")


def _call(call: Any, where: str) -> Any:
    """Return a function call as a dict. ShareGPT stores a call as JSON text."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            call = None
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        problem = f"{where}: function_call is no object with a name and arguments"
        raise BadChat(problem, "give {name, arguments}", NO_TEXT)
    return call


def _joined(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or a list of strings and {"type": "text"} parts, which are joined."""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part for part in parts
    ]
    plain = [text for text in texts if isinstance(text, str)]
    if len(plain) < len(parts):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts}
        problem = f"{where}: content has {', '.join(sorted(kinds))[:_SHOWN]}, not a text"
        raise BadChat(problem, "give text only, or parts of type text", NO_TEXT)
    return _as_text("".join(plain))


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        raise BadChat(f"{name} is missing", "add it, or leave the chat out", NO_TEXT)
    if not isinstance(value, str):
        raise BadChat(f"{name} is a {type(value).__name__}, not a text", "give text only", NO_TEXT)
    return _as_text(value)


def _as_text(text: str) -> str:
    """Replace by U+FFFD what JSON can encode but a text must not hold: Unicode noncharacters and halves of surrogate pairs."""
    return _NOT_TEXT.sub("\ufffd", text)


def _changed(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Apply ``change`` to every string of a JSON value except keys, and return the result. Raises BadChat if the value is
    nested more than ``_MOST_DEPTH`` levels deep."""
    if depth > _MOST_DEPTH:
        raise BadChat(f"is nested more than {_MOST_DEPTH} times", "leave the chat out", NO_TEXT)
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_as_text(str(key)): _changed(one, change, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_changed(one, change, depth + 1) for one in value]
    return value


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # the value is NaN, or has a Parquet type that JSON lacks, such as a date
        raise BadChat("holds what JSON cannot, such as a date or NaN", "give it as text", NO_TEXT) from None


def _check_order(turns: tuple[Turn, ...]) -> None:
    for number, turn in enumerate(turns):
        if turn.role in _FIRST and number:
            what = (
                f"a second {turn.role} turn" if turns[0].role in _FIRST else f"a {turn.role} turn that is not the first"
            )
            raise BadChat(f"message {number} is {what}", "join them at the beginning of the chat", OUT_OF_ORDER)
