"""The deployment: HTTP requests -> batches that a thread writes -> answers.

    request --checked--> waits --batches.py--> batch --thread--> parts of texts --event loop--> client

The event loop computes nothing: tokens and texts are made in threads. A client that goes away takes its row out of the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from springtide.checkpoint.format import step_of
from springtide.errors import ConfigError, SpringtideError, redacted
from springtide.generation import Part, Sampling, TextModel, TextRequest
from springtide.on_ray.serve import protocol
from springtide.on_ray.serve.batches import Batches, Waiting
from springtide.on_ray.serve.follow import Follower, Source
from springtide.on_ray.serve.protocol import Answers, Chat, Completion, HttpError
from springtide.store import to_json

_BODY_BYTES, _BYTES_PER_TOKEN = 2**16, 32
"""Most bytes of a body: a fixed part, and what JSON takes for each token that the model reads at once."""
_BODY_S = 30.0
"""Most time that the body of a request may take to come [s]."""
_JSON = "application/json"
_MODELS, _COMPLETIONS, _CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
_METHODS = {_MODELS: "GET", _COMPLETIONS: "POST", _CHAT: "POST"}
_log = logging.getLogger("ray.serve")


class Replica:
    """A model in one process. Ray Serve starts it, calls it for each HTTP request, and ends it."""

    def __init__(self, source: Source, max_batch: int, batch_wait_s: float, max_waiting: int) -> None:
        self._name, self._max_waiting = source.name, max_waiting
        self._num_waiting = 0  # those whose body is still coming, too
        self._num_answered = self._num_abandoned = 0
        self._follower = follower = Follower(source)
        executor = ThreadPoolExecutor(1, "springtide-write")
        self._batches = Batches(lambda: follower.served, executor, max_batch, batch_wait_s)
        self._follower.start()

    def __del__(self) -> None:
        """Look for checkpoints no more."""
        if hasattr(self, "_follower"):
            self._follower.end()

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        try:
            return await self._answered(request)
        except HttpError as error:
            return _refused(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return _refused(_failed(error))

    def state(self) -> protocol.Json:
        """Return what ``/v1/models`` tells of the model."""
        served = self._follower.served
        since_s, step = served.since_s, step_of(served.checkpoint)
        counts = {"waiting": self._num_waiting, "answered": self._num_answered, "abandoned": self._num_abandoned}
        return protocol.models(self._name, served.checkpoint, step, since_s, self._follower.problem, counts)

    async def _answered(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        wanted = _METHODS.get(path)
        if wanted is None:
            raise HttpError(404, f"there is no such path: see {', '.join(_METHODS)}")
        if request.method != wanted:
            raise HttpError(405, f"use {wanted}")
        if wanted == "GET":
            return Response(to_json(self.state()), media_type=_JSON)
        if self._num_waiting >= self._max_waiting:
            raise HttpError(503, f"{self._num_waiting} requests wait already; try again", code="overloaded")
        self._num_waiting += 1
        try:
            asked, text = await self._asked(request, path)
        finally:
            self._num_waiting -= 1
        return await self._text(asked, text)

    async def _asked(self, request: Request, path: str) -> tuple[Completion | Chat, TextRequest]:
        """Return what a body asks for, and what the model is to write. Raises HttpError if it is not to be done."""
        model = self._follower.served.model
        data = await _body(request, _BODY_BYTES + _BYTES_PER_TOKEN * model.max_length)
        asked = protocol.parse(data, Chat) if path == _CHAT else protocol.parse(data, Completion)
        if asked.model not in (None, self._name):
            raise HttpError(404, f"there is no such model here; its name is {self._name}", "model", "model_not_found")
        return asked, await asyncio.to_thread(_text_request, model, asked)

    async def _text(self, asked: Completion | Chat, text: TextRequest) -> Response:
        """Return the text that a request asks for, or with ``stream`` a response that brings it as it comes."""
        waiting, answers = Waiting(text), Answers(isinstance(asked, Chat), self._name, len(text.prompt))
        if asked.stream:
            events = self._events(waiting, answers, asked.has_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        last = Part("", 0)
        async with contextlib.aclosing(self._parts(waiting)) as parts:
            async for part in parts:
                last = part
        return Response(answers.whole(last.text, last, waiting.checkpoint), media_type=_JSON)

    async def _events(self, waiting: Waiting, answers: Answers, has_usage: bool) -> AsyncIterator[bytes]:
        try:
            async with contextlib.aclosing(self._parts(waiting)) as parts:
                async for part in parts:
                    yield answers.events(part, waiting.checkpoint, has_usage)
        except Exception as error:  # the status is sent already
            yield protocol.event(_failed(error).body)
        yield protocol.DONE

    async def _parts(self, waiting: Waiting) -> AsyncGenerator[Part, None]:
        """Yield the parts of a text. Whoever stops reading them takes the row out of its batch."""
        self._num_waiting += 1
        try:
            async with contextlib.aclosing(self._batches.parts(waiting)) as parts:
                async for part in parts:
                    yield part
            self._num_answered += 1
        except (asyncio.CancelledError, GeneratorExit):
            self._num_abandoned += 1
            raise
        finally:
            self._num_waiting -= 1


async def _body(request: Request, limit: int) -> bytes:
    """Return the body. Raises HttpError 413 as soon as it has more than ``limit`` bytes, 408 if it does not come in time."""
    data = bytearray()
    if (length := request.headers.get("content-length", "0")).isdecimal() and int(length[:20]) > limit:
        raise HttpError(413, f"the body has more than {limit:,} bytes, which no prompt of this model needs")
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise HttpError(413, f"the body has more than {limit:,} bytes, which no prompt of this model needs")
    except TimeoutError:
        raise HttpError(408, f"the body has not come within {_BODY_S:g} s") from None
    return bytes(data)


def _text_request(model: TextModel, asked: Completion | Chat) -> TextRequest:
    """Return what the model is to write. Raises HttpError 400 if it cannot."""
    is_chat = isinstance(asked, Chat)
    name = "messages" if is_chat else "prompt"
    try:
        ids = model.chat_ids(asked.plain_messages) if isinstance(asked, Chat) else model.prompt_ids(asked.text)
        ends = model.ends(is_chat)
        sampling = Sampling(
            1.0 if asked.temperature is None else asked.temperature, asked.top_k or 0, asked.top_p or 1.0, asked.seeded
        )
    except ConfigError as error:
        raise HttpError(400, redacted(str(error))[:2000], name) from None
    room = model.max_length - len(ids)
    tokens = asked.tokens(room)
    if tokens > max(room, 0):
        told = f"{name} has {len(ids)} tokens, and {tokens} are asked for: the model reads at most {model.max_length} at once"
        raise HttpError(400, told, "max_tokens" if asked.max_tokens else name, "context_length_exceeded")
    return TextRequest(tuple(ids), tokens, sampling, ends, asked.stops, bool(asked.stream))


def _refused(error: HttpError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return Response(to_json(error.body), error.status, headers, _JSON)


def _failed(error: Exception) -> HttpError:
    _log.error("a request has failed", exc_info=error)
    told = redacted(str(error)) if isinstance(error, SpringtideError) else "the server has failed; its log says why"
    return HttpError(500, told)
