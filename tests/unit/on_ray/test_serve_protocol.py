"""Bodies of clients: what is asked is understood, and anything else is refused with a status and the name of what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from springtide.generation import Part
from springtide.on_ray.serve.protocol import Answers, Chat, Completion, HttpError, parse

USER = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> Completion:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), Completion)


def chat(**fields: Any) -> Chat:
    return parse(json.dumps({"messages": USER, **fields}).encode(), Chat)


def test_what_clients_send_is_understood() -> None:
    asked = completion(
        model="m", max_tokens=9, temperature=0, top_p=0.5, seed=-1, stop="\n", stream=True, n=1, user="u"
    )
    assert (asked.text, asked.tokens(100), asked.stops, asked.seeded) == ("x", 9, ("\n",), 2**63 - 1)
    assert completion(prompt=["y"]).text == "y"
    assert (completion().tokens(100), completion().tokens(3)) == (16, 3)
    assert completion().seeded != completion().seeded
    assert completion(frequency_penalty=0, presence_penalty=0.0, logit_bias={}, logprobs=None).stops == ()
    assert (chat().tokens(100), chat(max_completion_tokens=5).tokens(100), chat(max_tokens=6).tokens(9)) == (100, 5, 6)
    assert chat(stream_options={"include_usage": True}).has_usage
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).plain_messages == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "is a list, not an object"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": "9"}', "max_tokens"),
        (b'{"prompt": "x", "top_p": 0}', "top_p"),
        (b'{"prompt": "x", "n": 2}', "n:"),
        (b'{"prompt": "x", "logprobs": 3}', "logprobs"),
        (b'{"prompt": "x", "frequency_penalty": 0.5}', "frequency_penalty"),
        (b'{"prompt": "x", "max_tokes": 3}', "max_tokes: is not known"),
        (b'{"prompt": "x", "\\ud800": 3}', "unicode"),
        (b'{"prompt": "x", "\\u001b[31m\\u00e9": 3}', "is not known"),
        (b'{"max_tokens": 3}', "prompt: is missing"),
        (b'{"prompt": 3}', "prompt"),
    ],
)
def test_a_body_that_is_wrong_is_refused(body: bytes, told: str) -> None:
    with pytest.raises(HttpError, match=told) as found:
        parse(body, Completion)
    assert found.value.status == 400
    assert found.value.body["error"]["type"] == "invalid_request_error"
    json.dumps(found.value.body).encode()


@pytest.mark.parametrize(
    "read",
    [
        lambda: completion(prompt="\ud800").text,
        lambda: completion(prompt=["a", "b"]).text,
        lambda: completion(stop=["a"] * 5).stops,
        lambda: completion(stop="").stops,
        lambda: completion(stop="a" * 257).stops,
        lambda: chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]).plain_messages,
        lambda: chat(messages=[]),
        lambda: chat(tools=[{}]),
    ],
)
def test_what_is_not_done_here_is_refused(read: Any) -> None:
    with pytest.raises(HttpError) as found:
        read()
    assert found.value.status == 400


def frames(*events: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in b"".join(events).decode().split("\n\n") if line]


def test_answers_have_the_form_that_clients_read() -> None:
    whole = json.loads(Answers(False, "m", 3).whole("abc", Part("abc", 2, "end"), "step-1"))
    assert (whole["object"], whole["model"], whole["system_fingerprint"]) == ("text_completion", "m", "step-1")
    assert whole["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    [choice] = json.loads(Answers(True, "m", 3).whole("abc", Part("abc", 2, "length"), "step-1"))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc"}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_is_the_text_in_parts_and_then_its_end(is_chat: bool) -> None:
    answers = Answers(is_chat, "m", 3)
    found = frames(*(answers.events(part, "c", True) for part in (Part("ab", 1), Part("c", 2), Part("", 2, "stop"))))
    *chunks, usage = found
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert len({chunk["id"] for chunk in found}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "stop"]
    if is_chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abc"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    else:
        assert "".join(choice["text"] for choice in choices) == "abc"
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
