"""OpenAI's JSON: a body -> what is asked, or an error with its status; parts of a text -> answers.

Nothing here is a model's or Ray's. What a body asks for and is not done here is refused, not ignored, for a client would take
the answer for another one.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from springtide.generation import Part
from springtide.store import to_json

Json = dict[str, object]
"""An object of JSON."""
DONE = b"data: [DONE]\n\n"
"""The last line of a stream."""
_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that does not say it, as OpenAI has it."""
_MOST_STOPS, _MOST_STOP_LENGTH = 4, 256
_SHOWN = 120
_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class HttpError(Exception):
    """A request that is refused, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> Json:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class _Asked(BaseModel):
    """What both kinds of request may have. Names are OpenAI's, and ``top_k``."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # one value each is what is done here
    n: Literal[1] | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    # what changes no answer
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        found = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(found) > _MOST_STOPS or any(not 0 < len(one) <= _MOST_STOP_LENGTH for one in found):
            limit = f"at most {_MOST_STOPS} strings of 1 to {_MOST_STOP_LENGTH} characters"
            raise HttpError(400, f"stop: give {limit}", "stop")
        return found

    @property
    def seeded(self) -> int:
        """The seed of the draws, a new one where none is asked for."""
        return secrets.randbits(63) if self.seed is None else self.seed % 2**63

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Completion(_Asked):
    """A body of ``/v1/completions``."""

    prompt: str | list[str]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def text(self) -> str:
        """The prompt."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[0] if len(self.prompt) == 1 else None
        if text is None:
            raise HttpError(400, "prompt: give one text; send several requests for several texts", "prompt")
        return _checked(text)

    def tokens(self, room: int) -> int:
        """Return the most tokens to write, where ``room`` fit after the prompt."""
        return min(_COMPLETION_TOKENS, max(room, 1)) if self.max_tokens is None else self.max_tokens


class Chat(_Asked):
    """A body of ``/v1/chat/completions``."""

    messages: list[Json] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Literal[False] | None = None
    tools: list[object] | None = Field(None, max_length=0)

    @property
    def plain_messages(self) -> list[Json]:
        """The messages, with parts of text joined."""
        return [{**one, "content": _joined(one.get("content"))} for one in self.messages]

    def tokens(self, room: int) -> int:
        """Return the most tokens to write, where ``room`` fit after the prompt."""
        asked = self.max_completion_tokens or self.max_tokens
        return max(room, 1) if asked is None else asked


def _joined(content: object) -> object:
    """Return the text of a content that is a list of parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise HttpError(400, "messages: a content may have parts of type text only", "messages")
    return "".join(map(str, texts))


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HttpError(400, "prompt: holds half a surrogate pair, which is no text", "prompt") from None
    return text


Body = TypeVar("Body", Completion, Chat)


def parse(data: bytes, kind: type[Body]) -> Body:
    """Return what a body asks for. Raises HttpError 400 if it is no JSON, or not of this kind."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse)
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON ({error!s:.{_SHOWN}})") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body is a {type(value).__name__}, not an object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _told(error) from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def _told(error: ValidationError) -> HttpError:
    [first, *_] = error.errors(include_url=False, include_context=False, include_input=False)
    name = str(first["loc"][0]) if first["loc"] else ""
    shown = name.encode("ascii", "backslashreplace").decode()[:_SHOWN]
    if first["type"] == "extra_forbidden":
        return HttpError(400, f"{shown}: is not known, or not done here; leave it out", shown)
    if first["type"] == "missing":
        return HttpError(400, f"{shown}: is missing", shown)
    return HttpError(400, f"{shown}: {first['msg']}", shown)


class Answers:
    """The JSON of the answers to one request."""

    def __init__(self, is_chat: bool, model: str, prompt_tokens: int) -> None:
        self._is_chat, self._model, self._prompt_tokens = is_chat, model, prompt_tokens
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._began = False

    def whole(self, text: str, last: Part, checkpoint: str) -> bytes:
        """Return the answer without a stream."""
        choice: Json = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        found = self._frame(checkpoint, [self._choice(choice, last.ended)], "")
        return to_json(found | self._usage(last.num_tokens)).encode()

    def events(self, part: Part, checkpoint: str, has_usage: bool) -> bytes:
        """Return the lines of a stream for one more part."""
        frames = []
        if self._is_chat and not self._began:
            frames.append([self._choice({"delta": {"role": "assistant", "content": ""}}, "")])
        self._began = True
        if part.text or (part.ended and not self._is_chat):
            added: Json = {"delta": {"content": part.text}} if self._is_chat else {"text": part.text}
            frames.append([self._choice(added, "" if self._is_chat else part.ended)])
        if part.ended and self._is_chat:
            frames.append([self._choice({"delta": {}}, part.ended)])
        found = [self._frame(checkpoint, choices, ".chunk") for choices in frames]
        if part.ended and has_usage:
            found.append(self._frame(checkpoint, [], ".chunk") | self._usage(part.num_tokens))
        return b"".join(map(event, found))

    def _frame(self, checkpoint: str, choices: list[Json], chunk: str) -> Json:
        return {
            "id": self._id,
            "object": f"chat.completion{chunk}" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": checkpoint,
            "choices": choices,
        }

    @staticmethod
    def _choice(content: Json, ended: str) -> Json:
        return {"index": 0, **content, "logprobs": None, "finish_reason": _REASONS.get(ended)}

    def _usage(self, tokens: int) -> Json:
        total = self._prompt_tokens + tokens
        return {"usage": {"prompt_tokens": self._prompt_tokens, "completion_tokens": tokens, "total_tokens": total}}


def event(value: Json) -> bytes:
    """Return a line of a stream."""
    return f"data: {to_json(value)}\n\n".encode()


def models(name: str, checkpoint: str, step: int | None, since_s: float, problem: str, counts: dict[str, int]) -> Json:
    """Return the answer of ``/v1/models``: one model, which checkpoint serves, why a newer one does not, and how many requests
    of this replica there are of each kind."""
    about = {"checkpoint": checkpoint, "step": step, "problem": problem or None, **counts}
    one = {"id": name, "object": "model", "created": int(since_s), "owned_by": "springtide", "springtide": about}
    return {"object": "list", "data": [one]}
