"""Convert a chat to tokens, and mark the predicted ones: the assistant's answers, each with its end-of-turn token.

    turns       user: Hi   assistant: Hello
    pieces      [<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n]  [Hello<|im_end|>]  [\\n]
    predicted    no                                                         yes                no

Each piece is tokenised separately. So the ids before an answer equal the ids of the prompt that the model gets when it is used.
A special token in the template becomes one id. A special token that is spelled in a message stays plain text, because anybody
may have written the chat.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from springtide.config.data import CHAT_TOKENS, MODEL_TEMPLATE
from springtide.corpus.chat_sandbox import APART, BEGIN, END, Rendering, Sandbox
from springtide.corpus.chats import ANSWERS, THOUGHTS, TOOLS, BadChat, Turn, message_of
from springtide.corpus.infilling import check_pieces
from springtide.corpus.tokenizer import Tokenizer
from springtide.errors import ConfigError, explain
from springtide.storage.local_files import check_confined

_FIELD = "corpus.chat_template"
_OF_MODEL = "chat_template.jinja"
_LAYOUT = """\
{%- for message in messages -%}
{{ HEAD }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + 'END' }}{% endgeneration %}
{%- else -%}
{{ message.content + 'END' }}
{%- endif -%}
{{ 'AFTER' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{% set message = {'role': 'assistant'} %}{{ HEAD }}{%- endif -%}
"""
_PLAIN = """\
{%- for message in messages -%}
{{ message.role | capitalize + ':\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + (eos_token if loop.last else '\\n\\n') }}{% endgeneration %}
{%- else -%}
{{ message.content + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:\\n' }}{%- endif -%}
"""


def _layout(head: str, end: str, after: str = "") -> str:
    return _LAYOUT.replace("HEAD", head).replace("END", end).replace("AFTER", after)


BUILT_IN = {
    "chatml": _layout("'<|im_start|>' + message.role + '\\n'", "<|im_end|>", "\\n"),
    "llama3": _layout("'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n'", "<|eot_id|>"),
    "plain": _PLAIN,
}
"""Name -> template. Sources: Qwen's ChatML; Llama 3's model card, without its begin-of-text token, which
``corpus.begin_of_text`` adds. ``plain`` needs no special tokens: lines such as ``User:`` begin its turns. Such a line in a
message looks like the beginning of a turn."""
TEMPLATE_BYTES = 2**20
"""Maximum size of a template [bytes]."""
_PROBE = (Turn("user", "Question"), Turn(ANSWERS, "Answer"))
_TURNS = (*_PROBE, Turn("user", "Next question"), Turn(ANSWERS, "Next answer"))
_THOUGHT_ENDS = "</think>"
"""Text that ends the thoughts (reasoning) before an answer. Many templates remove the part of a message up to here."""
_OPENED_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")
"""Matches ``<think>`` at the end of a prompt, which makes the model think, or ``<think></think>``, which stops it thinking."""
_SPECIAL = re.compile(r"<\|[^\s<>|]{1,64}\|>")
"""Matches text that looks like a special token, such as ``<|im_end|>``."""
_MARK_REMEDY = "put {% generation %} and {% endgeneration %} around the answer in the template"


def read_template(name: str, tokenizer: str = "") -> str:
    """Return the text of the chat template ``name``, the value of ``corpus.chat_template``: a built-in template or a file.
    ``model`` stands for the template file in the folder of ``tokenizer``, the value of ``corpus.tokenizer``. Raises ConfigError
    if the template is missing or does not compile."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    tokenizer = os.path.expanduser(tokenizer)
    path = Path(tokenizer).parent / _OF_MODEL if name == MODEL_TEMPLATE else Path(os.path.expanduser(name))
    if name == MODEL_TEMPLATE and not (Path(tokenizer).is_file() and path.is_file()):
        problem = f"is the {_OF_MODEL} beside the tokenizer, and corpus.tokenizer = {tokenizer!r} has none there"
        raise ConfigError(explain(_FIELD, name, problem, f"use {', '.join(BUILT_IN)} or a Jinja file"))
    if name == MODEL_TEMPLATE:
        check_confined(str(path), str(path.parent))
    if not path.is_file():
        problem = f"is neither {MODEL_TEMPLATE} nor one of {', '.join(BUILT_IN)} nor a file"
        raise ConfigError(explain(_FIELD, name, problem, "set it to one of them, or to a Jinja file"))
    with path.open("rb") as file:
        data = file.read(TEMPLATE_BYTES + 1)
    if len(data) > TEMPLATE_BYTES:
        raise ConfigError(explain(_FIELD, name, f"has more than {TEMPLATE_BYTES:,} bytes", "name a template"))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(explain(_FIELD, name, f"is not UTF-8 ({error})", "save it as UTF-8")) from None
    _compiled(text, name)
    return text


class ChatTokens(NamedTuple):
    """A chat as tokens."""

    ids: np.ndarray
    """uint32 (tokens,), ending with the end-of-document id. It is appended if the template does not write it."""
    is_predicted: np.ndarray
    """bool (tokens,): True where the token is predicted, so that the model is trained on it."""


class ChatTemplate:
    """A compiled chat template with the tokenizer of the dataset."""

    def __init__(
        self, name: str, text: str, vocabulary: Tokenizer, begin_of_text: int | None, may_hold_ends: bool = True
    ) -> None:
        """Compile a template, and test it on a question and an answer.

        Args:
            name: the value of ``corpus.chat_template``, for errors.
            text: source of the template, in Jinja.
            vocabulary: the tokenizer of the dataset.
            begin_of_text: the id that the dataset puts before each document. If a rendered chat begins with this id, the id is
                removed from the chat, so that it does not occur twice.
            may_hold_ends: whether the end-of-document id may occur in the middle of a chat. True if the dataset never cuts
                documents.

        Raises:
            ConfigError: the tokenizer lacks a special token of the template, or the template cannot render a question and an
                answer.
        """
        self._may_hold_ends = may_hold_ends
        self.thoughts_left = 0
        """Number of answers so far whose thoughts (reasoning) the template left out of the rendered chat."""
        self._name, self._vocabulary, self.begin_of_text = name, vocabulary, begin_of_text
        self._template = _compiled(text, name)
        added = vocabulary.tokenizer.get_added_tokens_decoder().items()
        self._special = {one.content: index for index, one in added if one.special and len(one.content) > 1}
        end = vocabulary.tokenizer.id_to_token(vocabulary.end_of_text) or ""
        self._special |= {end: vocabulary.end_of_text} if end else {}
        spelled = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._cut = re.compile(f"({spelled})")
        self._risky = re.compile(rf"(?s)({spelled}|<\|)")
        check_pieces(vocabulary, _FIELD, name)
        self._variables = {
            "eos_token": end,
            "bos_token": "" if begin_of_text is None else vocabulary.tokenizer.id_to_token(begin_of_text),
        }
        if missing := [token for token in CHAT_TOKENS.get(name, ()) if token not in self._special]:
            raise ConfigError(explain(_FIELD, name, *self._lacks(missing)))
        self._turn_end = self._unwritten_end = ""
        """Two special tokens. ``_turn_end`` ends an answer in the middle of a chat; empty if the template has no such token.
        ``_unwritten_end`` is appended to the last answer of a chat; empty if the template writes the token itself."""
        if not self._template.has_marks:
            self._learn_ends()
        try:
            next(self.lay_out([_PROBE]))
        except BadChat as error:
            problem = f"cannot lay out a question and an answer: {error.problem}"
            raise ConfigError(explain(_FIELD, name, problem, error.remedy)) from None

    def _lacks(self, tokens: Sequence[str]) -> tuple[str, str]:
        problem = f"uses {', '.join(tokens)}, which the tokenizer does not have as special tokens"
        return problem, "add them to corpus.special_tokens if it is made here, else name the tokenizer of this template"

    def lay_out(self, chats: Sequence[tuple[Turn, ...]]) -> Iterator[ChatTokens]:
        """Yield the tokens of each chat, in order.

        Raises:
            BadChat: the template raises an error, renders answers differently when they are marked, uses a special token that
                the tokenizer lacks, or renders no token of an answer.
        """
        planned: list[list[tuple[int | str, bool]]] = []
        try:
            for turns, pieces in zip(chats, self._pieces(chats), strict=True):
                self.thoughts_left += _thoughts_left(turns, pieces)
                planned.append([part for piece in pieces for part in self._parts(*piece)])
        except BadChat:  # first yield the chats before the bad chat: the caller counts them to find the bad chat
            yield from self._encoded(planned)
            raise
        yield from self._encoded(planned)

    def _encoded(self, planned: list[list[tuple[int | str, bool]]]) -> Iterator[ChatTokens]:
        encoded = self._vocabulary.encode(part for parts in planned for part, _ in parts if isinstance(part, str))
        end = self._vocabulary.end_of_text
        for parts in planned:
            found = [np.array([part], np.uint32) if isinstance(part, int) else next(encoded)[:-1] for part, _ in parts]
            flags = np.repeat([flag for _, flag in parts], [len(ids) for ids in found])
            ids = np.concatenate(found)
            if len(ids) and ids[0] == self.begin_of_text:
                ids, flags = ids[1:], flags[1:]
            if not len(ids) or ids[-1] != end:
                # in a template without special tokens, only the end-of-document id can end the last answer: train on it
                is_last = (
                    not self._template.has_marks and bool(flags[-1:].any()) and ids[-1] not in self._special.values()
                )
                ids, flags = np.append(ids, np.uint32(end)), np.append(flags, is_last)
            self._check_ends(ids)
            if not flags.any():
                raise BadChat("the template renders no token of an answer", _MARK_REMEDY)
            yield ChatTokens(ids, flags)

    def _check_ends(self, ids: np.ndarray) -> None:
        """Raise BadChat if a chat holds the end-of-document id in its middle, so that it could be read as two documents."""
        inside = np.flatnonzero(ids[:-1] == self._vocabulary.end_of_text)
        written = self._variables["eos_token"]
        if len(inside) and not self._may_hold_ends:
            problem = f"holds {written}, which ends a document, before the end of the chat"
            raise BadChat(problem, "set corpus.end_of_text to another special token, or prepare chats separately")
        if ids[0] == self.begin_of_text or (ids[inside + 1] == self.begin_of_text).any():
            problem = f"holds {written} and then the token that begins a document, as between two documents"
            raise BadChat(problem, "set corpus.end_of_text to another special token")

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Return the ids of the prompt that the assistant answers, without begin-of-text, even if the template writes it.

        Raises:
            BadChat: the template raises an error for the chat, or uses a special token that the tokenizer lacks.
        """
        [text] = self._template.render([self._rendering(turns)._replace(prompt=True)], self._variables)
        parts = [part for part, _ in self._parts(text, False)]
        encoded = self._vocabulary.encode(part for part in parts if isinstance(part, str))
        found = [[part] if isinstance(part, int) else next(encoded)[:-1].tolist() for part in parts]
        ids = [index for part in found for index in part]
        return ids[1:] if ids[:1] == [self.begin_of_text] else ids

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the special tokens that end an answer, in order. Most templates have one. Phi 3 has two: end of turn, end of
        text."""
        answer = next(text for text, is_answer in self.pieces(_PROBE) if is_answer)
        found = [*self._cut.findall(answer.rpartition(_PROBE[-1].content)[2]), *filter(None, [self._unwritten_end])]
        return tuple(dict.fromkeys(self._special[token] for token in found))

    def _learn_ends(self) -> None:
        """Find, by rendering a test chat, the special token that ends an answer in the middle of a chat. Store it as
        ``_turn_end``. Also store it as ``_unwritten_end`` if the template does not write it after the last answer.
        ``_turn_end`` and ``_unwritten_end`` stay empty if there is no such token, or if the template raises an error for the
        test chat."""
        try:
            whole, last = self._template.render(map(self._rendering, (_TURNS, _TURNS[:2])), self._variables)
        except BadChat:
            return
        _, _, after = whole.partition(_TURNS[1].content)
        if found := self._cut.search(after.partition(_TURNS[2].content)[0]):
            self._turn_end = found[0]
            if not self._cut.search(last.partition(_TURNS[1].content)[2]):
                self._unwritten_end = found[0]

    def pieces(self, turns: Sequence[Turn]) -> list[tuple[str, bool]]:
        """Return the rendered chat as a list of (piece of its text, whether the piece is an answer), in order. If a message
        spells a special token, the mark APART stands between the characters of this text.

        Raises:
            BadChat: the template cannot render the chat, as in ``lay_out``.
        """
        [found] = self._pieces([turns])
        return found

    def _pieces(self, chats: Sequence[Sequence[Turn]]) -> Iterator[list[tuple[str, bool]]]:
        """Yield for each chat a list of (text, whether the text is an answer). One request to the sandbox process renders
        several chats; ``asked`` holds the chats whose pieces are not yet yielded."""
        asked: collections.deque[Rendering] = collections.deque()

        def renderings() -> Iterator[Rendering]:
            for turns in chats:
                asked.append(self._rendering(turns))
                yield asked[-1]
                yield from self._of_answers(asked[-1])

        texts = self._template.render(renderings(), self._variables)
        for whole in texts:
            cut = (
                self._marked(next(texts)) if self._template.has_marks else self._grown(asked[0].messages, whole, texts)
            )
            found = list(cut)
            if "".join(text for text, _ in found) != whole:
                raise BadChat(
                    "the template renders a different text when answers are marked",
                    "do not let it read or change the output of {% generation %}",
                )
            rendering = asked.popleft()
            messages = rendering.messages
            found = [piece for piece in found if piece[0]]
            _check_calls(rendering, whole, "".join(text for text, is_answer in found if is_answer))
            if self._unwritten_end and found[-1][1] and not messages[-1].get("tool_calls"):
                found.append((self._unwritten_end, True))
            yield found

    def _rendering(self, turns: Sequence[Turn]) -> Rendering:
        """Return the input of the template for a chat. If a message spells a special token, insert the mark APART between the
        characters of this text, so that it stays plain text."""

        def apart(found: re.Match[str]) -> str:
            return APART + APART.join(found[0]) + APART

        messages = [message_of(turn, lambda text: self._risky.sub(apart, text)) for turn in turns]
        tools = messages[0].pop(TOOLS, None) if messages else None
        return Rendering(messages, tools)

    def _of_answers(self, whole: Rendering) -> Iterator[Rendering]:
        """Yield more renderings of the chat ``whole``, which show where its answers are. A template with ``{% generation %}``
        needs one more rendering, with marks around the answers. Any other template needs two per answer: the chat before the
        answer, and the chat up to the end of the answer."""
        if self._template.has_marks:
            yield whole._replace(marks=True)
            return
        for number in _answers(whole.messages):
            yield whole._replace(messages=whole.messages[:number], prompt=True)
            yield whole._replace(messages=whole.messages[: number + 1])

    def _marked(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield (piece, whether it is an answer) of ``text``, a rendering with the marks BEGIN and END around each answer."""
        before, *answers = text.split(BEGIN)
        yield before, False
        for answer in answers:
            inside, *after = answer.split(END)
            if len(after) != 1 or END in before:
                raise BadChat("{% generation %} stands inside another, or is cut", _MARK_REMEDY)
            yield inside, True
            yield after[0], False

    def _grown(
        self, messages: Sequence[Mapping[str, Any]], whole: str, texts: Iterator[str]
    ) -> Iterator[tuple[str, bool]]:
        """Yield (piece, whether it is an answer) of the rendering ``whole``, for a template without ``{% generation %}`` marks.

        An answer is the text that the template adds to the chat before it, up to the special token that ends the turn.
        ``texts`` has two renderings for each answer: the chat before the answer, and the chat up to the end of the answer.

        Some templates render an earlier answer differently from the last answer of a chat. Qwen 3 leaves out the thoughts of an
        earlier answer. Phi 3 writes the end of text only after the last answer. So an earlier answer ends at the first
        ``_turn_end`` after its content.
        """
        done = 0
        for number in _answers(messages):
            prompt, upto = next(texts) if number else _before_all(texts), next(texts)
            begin = self._begin(whole, prompt)
            if begin is None or begin < done:
                raise BadChat(
                    f"what follows message {number} changes what the template renders before it", _MARK_REMEDY
                )
            said = (messages[number]["content"] or "").rpartition(_THOUGHT_ENDS)[2].strip()
            place = whole.find(said, begin)
            if place < 0 or (whole.startswith(upto) and place + len(said) > len(upto)):
                raise BadChat(f"the answer of message {number} does not follow its prompt", _MARK_REMEDY)
            if whole.startswith(upto):
                end = self._end(whole, len(upto), begin)
            else:
                end = whole.find(self._turn_end, place + len(said)) + len(self._turn_end) if self._turn_end else 0
                if end <= place:
                    raise BadChat(f"no special token ends the answer of message {number}", _MARK_REMEDY)
            yield whole[done:begin], False
            yield whole[begin:end], True
            done = end
        yield whole[done:], False

    def _begin(self, whole: str, prompt: str) -> int | None:
        """Return the index in the rendered chat ``whole`` at which the answer to ``prompt`` begins, or None if ``whole`` does
        not begin with the prompt. If ``whole`` shows the answer without its thoughts, ``<think>`` at the end of the prompt is
        ignored."""
        for known in (prompt, _OPENED_THOUGHT.sub("", prompt)):
            if whole.startswith(known):
                return len(known)
        return None

    def _end(self, whole: str, end: int, begin: int) -> int:
        """Return the index in the rendered chat ``whole`` at which an answer ends. ``begin`` and ``end`` are the bounds of the
        answer's turn. If the turn ends with a special token, the answer ends after this token. Otherwise the answer includes
        the special token that begins the next turn, as in the templates of GLM."""
        trimmed = whole[:end].rstrip()
        if len(trimmed) > begin and any(trimmed.endswith(token) for token in self._special):
            return len(trimmed)
        following = self._cut.match(whole, end)
        return following.end() if following else end

    def _parts(self, text: str, is_answer: bool) -> Iterator[tuple[int | str, bool]]:
        """Split a piece of a chat at its special tokens. Yield pairs: a token's id or the text between tokens, and
        ``is_answer``."""
        for part in self._cut.split(text):
            if part in self._special:
                yield self._special[part], is_answer
            elif part:
                if unknown := _SPECIAL.findall(part):
                    raise BadChat(*self._lacks(sorted({*unknown})[:8]))
                yield part.replace(APART, ""), is_answer


def _before_all(texts: Iterator[str]) -> str:
    """Return the prompt of an answer that is the first message of its chat. It is the next of ``texts``, the renderings: a chat
    without messages, as the template renders it. Raises BadChat if the template cannot do this. Most templates cannot."""
    try:
        return next(texts)
    except BadChat as error:
        problem = f"begins with an answer, and the template needs a turn before it ({error.problem})"
        raise BadChat(problem, "begin the chat with a user's turn, or leave its first message out") from None


def _thoughts_left(turns: Sequence[Turn], pieces: Sequence[tuple[str, bool]]) -> int:
    """Count the answers of a chat whose thoughts (reasoning) the template left out. Many templates show only the thoughts of
    the last answer."""
    tables = [json.loads(turn.more) for turn in turns if turn.role == ANSWERS and turn.more]
    thoughts = [text for one in tables for key in THOUGHTS if isinstance(text := one.get(key), str) and text.strip()]
    if not thoughts:
        return 0
    whole = "".join(text for text, _ in pieces).replace(APART, "")
    return sum(text.strip() not in whole for text in thoughts)


def _check_calls(rendering: Rendering, whole: str, answers: str) -> None:
    """Raise BadChat if a template left out the tools of a chat, or the tool calls of its answers: the model would be trained on
    empty answers. ``whole``: the rendered chat; ``answers``: the rendered answers."""
    for names, text, what in (
        (_names(rendering.tools or ()), whole, "the tool"),
        (_names(call for one in rendering.messages for call in one.get("tool_calls") or ()), answers, "the call of"),
    ):
        if missing := [name for name in names if name not in text]:
            problem = f"the template leaves out {what} {missing[0]}"
            raise BadChat(problem, "use a template that renders tools, or write the calls into the contents")


def _names(functions: Iterable[Any]) -> list[str]:
    """Return the names of tool functions, each given as {"name": ...} or {"function": {"name": ...}}."""
    tables = [one.get("function", one) if isinstance(one, Mapping) else {} for one in functions]
    return [one["name"] for one in tables if isinstance(one, Mapping) and isinstance(one.get("name"), str)]


def _answers(messages: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the index of each message that is an answer of the assistant."""
    return (number for number, message in enumerate(messages) if message["role"] == ANSWERS)


def _compiled(text: str, name: str) -> Sandbox:
    try:
        return Sandbox(text)
    except SyntaxError as error:
        raise ConfigError(explain(_FIELD, name, f"line {error.lineno}: {error.msg}", "mend the template")) from None
    except BadChat as error:
        raise ConfigError(explain(_FIELD, name, error.problem, error.remedy)) from None
