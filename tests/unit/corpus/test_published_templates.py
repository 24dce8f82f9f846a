"""Templates of published models, unchanged: texts as transformers renders them, answers as TRL marks them."""

# ruff: noqa: RUF001 - tokens of DeepSeek have wide bars

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from published import ENDS, SPECIAL, VOCABULARY, trl_template

from springtide.corpus import BadChat, ChatTemplate, open_tokenizer
from springtide.corpus.chats import Turn, turns_of

pytestmark = pytest.mark.processes

DAY = datetime.date(2024, 7, 26)
NO_SYSTEM = ("gemma",)
UNMARKED = ("llama3_1", "llama3_2")
"""Templates that TRL has without marks."""
KEEPS_THOUGHTS = ("deepseek_r1_distill", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")
CHATS = {
    "one answer": (Turn("user", "2 + 2?"), Turn("assistant", "It is 4.")),
    "two answers": (
        Turn("user", "Hi"),
        Turn("assistant", "Hello"),
        Turn("user", "Why?"),
        Turn("assistant", "So.\n\nIt is"),
    ),
    "system": (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yes")),
    "thoughts": (
        *(Turn("user", "Hi"), Turn("assistant", "<think>\nHm.\n</think>\n\nHello")),
        *(Turn("user", "Why?"), Turn("assistant", "<think>\nOh.\n</think>\n\nSo it is")),
    ),
}
CASES = [(family, chat) for family in ENDS for chat in CHATS if not (chat == "system" and family in NO_SYSTEM)]


def rendered(
    text: str, turns: Sequence[Turn | dict[str, Any]], prompt: bool = False, tools: list[Any] | None = None
) -> tuple[str, list[str]]:
    """Return a chat as transformers renders it, and the parts that are marked as answers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = re.sub(r"strftime_now\(.(%[^)]*).\)", lambda found: repr(DAY.strftime(found[1])), text)  # C9: here it stays
    [whole], spans = render_jinja_template(
        [[{"role": turn.role, "content": turn.content} if isinstance(turn, Turn) else turn for turn in turns]],
        tools=tools,
        chat_template=text,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask="endgeneration" in text and not prompt,
        bos_token="",
        eos_token="<|endoftext|>",
    )
    return whole, [whole[begin:end] for begin, end in (spans[0] if spans else ())]


@functools.cache
def template_of(family: str) -> ChatTemplate:
    """A family's template as published; it is compiled, and tried out in a process, once."""
    return ChatTemplate(family, trl_template(family), VOCABULARY, None)


@pytest.mark.parametrize(("family", "chat"), CASES)
def test_a_published_template_gives_the_text_of_transformers(family: str, chat: str) -> None:
    """The pieces join to what transformers renders; a template that leaves the end of the last answer to the next turn gets it.
    An answer begins where the prompt of its turn ends, or before the thoughts that a prompt opens."""
    text, turns = trl_template(family), CHATS[chat]
    pieces = template_of(family).pieces(turns)
    whole, _ = rendered(text, turns)
    joined = "".join(piece for piece, _ in pieces)
    assert joined == whole + ("<|user|>" if family == "glm4moe" else "")
    numbers = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    begins = [sum(len(piece) for piece, _ in pieces[:at]) for at, (_, is_answer) in enumerate(pieces) if is_answer]
    for number, begin in zip(numbers, begins, strict=False):
        prompt, _ = rendered(text, turns[:number], prompt=True)
        assert whole[:begin] in (
            prompt,
            prompt.removesuffix("<think>\n"),
            prompt.removesuffix("<think>\n\n</think>\n\n"),
        )
        assert turns[number].content.rpartition("\n")[2] in whole[begin:]


@pytest.mark.parametrize(("family", "chat"), [case for case in CASES if case[0] not in UNMARKED])
def test_answers_of_a_published_template_are_those_that_trl_marks(family: str, chat: str) -> None:
    """TRL marks what is predicted here; besides, line breaks after it, and what the prompt of the turn gives anyhow."""
    turns = CHATS[chat]
    pieces = template_of(family).pieces(turns)
    whole, marked = rendered(trl_template(f"{family}_training"), turns)
    if whole != "".join(piece for piece, _ in pieces):
        # its template for training gives another text than the model's: with the thoughts of earlier turns
        assert family in KEEPS_THOUGHTS
        assert chat in ("two answers", "thoughts")
        return
    predicted = "".join("\0" + piece if is_answer else "\1" for piece, is_answer in pieces)
    answers = [part.replace("\0", "") for part in predicted.split("\1") if part]
    theirs = "".join(marked)
    assert len(theirs) >= sum(map(len, answers))
    at = 0
    for answer in answers:
        found = theirs.find(answer, at)
        header = theirs[at:found].lstrip("\n")
        assert found >= 0
        assert header in ("", "<think>\n", "<｜Assistant｜>", "<|start|>assistant", "<think>\n\n</think>\n\n")
        at = found + len(answer)
    assert theirs[at:].strip("\n") == ""


@pytest.mark.parametrize("family", ENDS)
def test_a_published_template_says_what_ends_an_answer(family: str) -> None:
    template = template_of(family)
    assert tuple(VOCABULARY.tokenizer.id_to_token(index) for index in template.ends) == ENDS[family]


def test_the_date_in_a_template_is_always_the_same() -> None:
    [laid] = ChatTemplate("llama3_2", trl_template("llama3_2"), VOCABULARY, None).lay_out([CHATS["one answer"]])
    assert "Today Date: 26 Jul 2024" in VOCABULARY.decode(laid.ids.tolist())


CALL_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
    "qwen3": '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
    "llama3_1": '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
    "glm4moe": "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "gptoss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
}
"""Family -> what the model writes to call a tool."""


@pytest.mark.parametrize("family", CALLS)
def test_a_call_of_a_tool_is_an_answer(family: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    record = {
        "messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    }
    turns = turns_of({**record, "tools": [tool]}, "text")
    assert not isinstance(turns, str)
    pieces = ChatTemplate(family, trl_template(family), VOCABULARY, None).pieces(turns)
    assert next(piece for piece, is_answer in pieces if is_answer).rstrip("\n") == CALLS[family]
    whole, _ = rendered(trl_template(family), record["messages"], tools=[tool])
    assert "".join(piece for piece, _ in pieces) == whole
    assert '"name": "add"' in whole.partition("2 + 3?")[0] or "type add" in whole


def test_a_content_that_is_null_is_no_empty_one() -> None:
    """DeepSeek's template asks for that, and takes arguments as text."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    record = {
        "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    }
    turns, text = turns_of(record, "text"), trl_template("deepseek_r1_distill")
    assert not isinstance(turns, str)
    pieces = ChatTemplate(
        "r1", text, open_tokenizer("bytes", (), 0, special_tokens=(*SPECIAL, *CALL_TOKENS)), None
    ).pieces(turns)
    assert "".join(piece for piece, _ in pieces) == rendered(text, record["messages"])[0]
    assert "add" in next(piece for piece, is_answer in pieces if is_answer)


@pytest.mark.parametrize(("family", "works"), [("llama3", True), ("qwen3", False)])
def test_a_chat_that_begins_with_an_answer_trains_or_says_why_not(family: str, works: bool) -> None:
    greeted = (Turn("assistant", "Hello"), Turn("user", "Hi"), Turn("assistant", "Yes"))
    template = ChatTemplate(family, trl_template(family), VOCABULARY, None)
    if works:
        assert [text for text, is_answer in template.pieces(greeted) if is_answer] == [
            "Hello<|eot_id|>",
            "Yes<|eot_id|>",
        ]
        return
    with pytest.raises(BadChat) as told:
        template.pieces(greeted)
    assert "needs a turn before it" in told.value.problem
