"""The recording proxy: an HTTP server that answers the calls of all agents.

A key names an episode. Each of its calls becomes one ``Call`` of the record, whose tokens the
episode's owner samples; a repeated request (a client's retry) waits for the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from bapo_megatron.agent import messages
from bapo_megatron.agent.messages import MessagesRequest
from bapo_megatron.agent.protocol import (
    MODEL_FIELDS,
    Answer,
    ChatRequest,
    RefusalError,
    Responses,
    ResponsesRequest,
    SamplingRules,
)
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.record import Call, Conversation, Record
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.processes import PrivateDirectory
from bapo_megatron.types import FinishReason

_BACKLOG = 4096
"""Connections that may wait to be accepted: all episodes begin at once."""
_MAX_BODY_BYTES = 32 << 20
_BYTES_PER_TOKEN = 64
"""Longer bodies than so many for each token of the limits are not even tokenised."""
_PAUSE_S = 10.0
"""A stream gets a comment whenever its turn takes this long, so that clients keep waiting."""
_SEND_S = 60.0
"""A client that does not read its answer for this long is gone; the call stays recorded."""
_EXIT_S = 1.0
"""Time for answers on their way when the server closes."""
_INSISTS_S = 10.0
"""An agent that is refused for a limit, and again so much later, does not end by itself."""
_RETRIES = "x-stainless-retry-count"
_TRAIN = "X-Bapo-Train"
_LIMIT = "episode_limit"
"""The code of refusals that an episode's ``finish_reason`` tells."""
_CONTEXT = "This model's maximum context length is"
"""What clients look for in refusals, to try no such request again."""
_LOG = logging.getLogger(__name__)
_MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one episode may take."""

    max_calls: int
    max_tokens: int
    """Tokens over all branches, but for the prompts of roots."""
    max_prompt_tokens: int
    """Tokens of a root's prompt."""


@dataclass(eq=False)
class Session:
    """One episode behind the proxy."""

    record: Record
    renderer: ChatRenderer
    rules: SamplingRules
    limits: SessionLimits
    sample: Callable[[Call], Awaitable[None]]
    """Samples a call until it is finished."""
    is_serial: bool = False
    """One call at a time: where tokens depend on what else is sampled, so that episodes repeat."""
    ended_by: FinishReason | None = None
    """The limit that the episode has met: LENGTH (tokens) or TURNS (calls)."""
    last_refusal: str = ""
    """What the agent was last told in place of a turn."""
    num_refusals: int = 0
    """Requests without a turn, but for those beyond the episode's limits."""
    responses: Responses = field(default_factory=Responses)
    end: asyncio.Future[None] = field(init=False)
    """Fails with what ``sample`` raises; done once the agent goes on to make calls that its limit
    refuses."""
    _turns: dict[str, asyncio.Task[Answer]] = field(default_factory=dict)
    """The latest turn for each body, unless it was refused."""
    _tasks: set[asyncio.Task[Answer]] = field(default_factory=set)
    """Turns that have not ended."""
    _is_closed: bool = False
    _ended: asyncio.Condition = field(default_factory=asyncio.Condition)
    _order: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_waiting: int = 0
    _own_s: float = 0.0
    _since_s: float = math.inf
    _refused_s: float = math.inf
    """When the agent was first refused a call after its limit."""

    def __post_init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()

    @property
    def own_s(self) -> float:
        """Seconds in which the agent was not waiting for a turn."""
        is_waiting = self._num_waiting or self._since_s == math.inf
        return self._own_s + (0.0 if is_waiting else time.monotonic() - self._since_s)

    def begin(self) -> None:
        """Start the agent's clock."""
        self._since_s = time.monotonic()

    def turn(
        self, conversation: Conversation, limit: int | None, digest: str, *, is_retry: bool
    ) -> asyncio.Task[Answer]:
        """Return the task of a request's turn, which goes on if its client leaves."""
        if self._is_closed:
            raise RefusalError("the episode has ended", 401, "invalid_api_key")
        if not is_retry or digest not in self._turns:
            task = asyncio.create_task(self._timed_turn(conversation, limit))
            self._turns[digest] = task
            self._tasks.add(task)
            task.add_done_callback(partial(self._forget, digest))
        return self._turns[digest]

    def _forget(self, digest: str, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        if (task.cancelled() or task.exception()) and self._turns.get(digest) is task:
            del self._turns[digest]  # with the conversation that its error holds

    def note_refusal(self, refusal: RefusalError) -> None:
        """Keep and count what the agent was told in place of a turn."""
        if self._is_closed:
            return
        self.last_refusal = f"HTTP {refusal.status}: {refusal}"
        self.num_refusals += refusal.code != _LIMIT
        if self.ended_by is not None:
            self._refused_s = min(self._refused_s, time.monotonic())
            if time.monotonic() >= self._refused_s + _INSISTS_S and not self.end.done():
                self.end.set_result(None)

    async def restart(self) -> None:
        """End every turn; the agent runs again, and the record answers what it asked before."""
        await self._end_turns()
        self._turns.clear()
        self._own_s, self._since_s = self.own_s, math.inf  # it may wait for a worker of its own
        self.ended_by, self._refused_s = None, math.inf
        self.last_refusal, self.num_refusals = "", 0
        self.record.restart()

    async def close(self) -> None:
        """End every turn, and refuse further ones."""
        self._is_closed = True
        await self._end_turns()
        self.end.cancel()

    async def _end_turns(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _timed_turn(self, conversation: Conversation, limit: int | None) -> Answer:
        self._own_s, self._num_waiting = self.own_s, self._num_waiting + 1
        try:
            async with self._order if self.is_serial else contextlib.nullcontext():
                return await self._take_turn(conversation, limit)
        except ValueError as error:
            raise RefusalError(f"messages: {error}") from error
        finally:
            self._num_waiting -= 1
            self._since_s = time.monotonic()

    async def _take_turn(self, conversation: Conversation, limit: int | None) -> Answer:
        call = self.record.begin(conversation, self.renderer)
        try:
            if not call.is_finished:
                if not call.max_tokens:
                    await self._reserve(call, limit)
                await self._sample(call)
        finally:
            async with self._ended:
                self._ended.notify_all()
        is_cut = call.finish_reason is FinishReason.LENGTH
        if is_cut and self.record.num_tokens >= self.limits.max_tokens:
            self.ended_by = FinishReason.LENGTH
        answer = Answer.of(call, conversation, self.renderer)
        self.record.note_turn(call, conversation, answer.message)
        if answer.stop:  # some clients put it back
            content = answer.message["content"] + answer.stop
            self.record.note_turn(call, conversation, {**answer.message, "content": content})
        return answer

    async def _sample(self, call: Call) -> None:
        try:
            await self.sample(call)
        except Exception as error:
            if not self.end.done():
                self.end.set_exception(error)
            raise RefusalError("the run has failed", 500, "server_error") from error

    async def _reserve(self, call: Call, limit: int | None) -> None:
        """Set the limit of a new turn, once the others leave it any tokens; refuse it if none."""
        limits, record = self.limits, self.record
        try:
            if len(record.calls) > limits.max_calls:
                self.ended_by = FinishReason.TURNS
                raise RefusalError(
                    f"the episode has had its {limits.max_calls} calls "
                    "(rollout.agent_limits.max_calls); end it",
                    code=_LIMIT,
                )
            if call.parent is None and len(call.written) > limits.max_prompt_tokens:
                raise RefusalError(
                    f"messages: {_CONTEXT} {limits.max_prompt_tokens} tokens where a conversation "
                    f"begins (data.max_prompt_tokens), got {len(call.written)}; shorten them",
                    code="context_length_exceeded",
                )
            async with self._ended:
                while (left := self._num_left(call)) <= 0 and _unfinished(record.calls, call):
                    await self._ended.wait()
            if left <= 0:
                self.ended_by = FinishReason.LENGTH
                raise RefusalError(
                    f"the episode has no tokens left: {_CONTEXT} {limits.max_tokens} tokens over "
                    "all calls (rollout.max_response_tokens); end it",
                    code=_LIMIT,
                )
        except BaseException:
            record.withdraw(call)
            raise
        call.max_tokens = min(left, limit or left)

    def _num_left(self, call: Call) -> int:
        """Tokens that neither were used nor are promised to other calls, earlier ones too."""
        others = _unfinished(self.record.all_calls(), call)
        promised = sum(other.max_tokens - other.num_tokens for other in others)
        return self.limits.max_tokens - self.record.num_tokens - promised


_SESSION = web.RequestKey("session", Session)


def _unfinished(calls: Iterable[Call], new: Call) -> list[Call]:
    """Return the calls that are being sampled beside a new one."""
    return [call for call in calls if call is not new and not call.is_finished and call.max_tokens]


class Proxy:
    """Serves the protocols of OpenAI and Anthropic to agents."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._has_refused = False
        self._directory = PrivateDirectory()
        self.socket_path = self._directory.path / "openai.sock"
        self.base_url = ""
        """``http://127.0.0.1:PORT/v1``; empty without a port."""
        self._runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=_EXIT_S)

    async def open(self, *, has_port: bool) -> None:
        """Listen on a Unix socket, and with ``has_port`` on a free port of the loopback too."""
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket_path), backlog=_BACKLOG).start()
        # Sandboxes run as other users; the key is what lets them in.
        self._directory.path.chmod(0o711)
        self.socket_path.chmod(0o666)
        if has_port:
            site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=_BACKLOG)
            await site.start()
            [(_, port)] = self._runner.addresses[1:]
            self.base_url = f"http://127.0.0.1:{port}/v1"

    async def close(self) -> None:
        """Stop listening. Safe to call twice."""
        await self._runner.cleanup()
        self._directory.close()

    @contextlib.contextmanager
    def admitted(self, session: Session) -> Iterator[str]:
        """Answer the calls of an episode within the block; return its key."""
        key = f"sk-{secrets.token_hex(16)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._answer])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post(_MESSAGES, self._messages)
        app.router.add_post(f"{_MESSAGES}/count_tokens", self._count_tokens)
        return app

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key", key if scheme.lower() == "bearer" else "")
        session = self._sessions.get(key.strip())
        if session is not None:
            request[_SESSION] = session
        try:
            return await handler(request)
        except RefusalError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            rule = f"must have at most {_MAX_BODY_BYTES >> 20} MB"
            refusal = RefusalError(
                f"the body {rule}; shorten the messages", 413, "request_too_large"
            )
        except web.HTTPException as error:
            place = f"{request.method} {shown_value(request.path)}: {error.reason}"
            remedy = "use /v1/chat/completions, /v1/responses, /v1/messages or /v1/models"
            refusal = RefusalError(f"{place}; {remedy}", error.status, "not_found")
        return web.json_response(self._refused(request, refusal), status=refusal.status)

    def _refused(self, request: web.Request, refusal: RefusalError) -> dict[str, Any]:
        """Note a refusal; return the body that tells it."""
        if (session := request.get(_SESSION)) is not None:
            session.note_refusal(refusal)
            if session.num_refusals and not self._has_refused:
                self._has_refused = True
                told = "rollout.agent: a call got %s; further ones are in rollout/agent_refusals"
                _LOG.warning(told, session.last_refusal)
        is_messages = request.path.startswith(_MESSAGES)
        return messages.error(refusal) if is_messages else refusal.content

    def _session(self, request: web.Request) -> Session:
        if _SESSION not in request:
            raise RefusalError(
                "Authorization or x-api-key: must be the key of an episode in progress; use "
                "OPENAI_API_KEY, and end with the episode",
                401,
                "invalid_api_key",
            )
        return request[_SESSION]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        models = {"object": "list", "data": [MODEL_FIELDS]}
        return web.json_response(MODEL_FIELDS if "name" in request.match_info else models)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, ChatRequest, Answer.chat, Answer.chat_chunks)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        noted = self._session(request).responses.noted
        return await self._serve(
            request,
            ResponsesRequest,
            lambda answer, asked: noted(asked, answer).response(),
            lambda answer, asked: noted(asked, answer).response_events(),
        )

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(
            request,
            MessagesRequest,
            lambda answer, _: messages.message(answer),
            lambda answer, _: messages.message_events(answer),
        )

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Count the tokens of a conversation as if none of it were recorded: an estimate."""
        asked = (await self._read(request, MessagesRequest)).conversation()
        try:
            tokens = request[_SESSION].renderer.conversation(asked.messages, asked.tools)
        except ValueError as error:
            raise RefusalError(f"messages: {error}") from error
        return web.json_response({"input_tokens": len(tokens)})

    async def _serve[AskedT: (ChatRequest, ResponsesRequest, MessagesRequest)](
        self,
        request: web.Request,
        kind: type[AskedT],
        body_of: Callable[[Answer, AskedT], dict[str, Any]],
        events_of: Callable[[Answer, AskedT], Iterable[dict[str, Any]]],
    ) -> web.StreamResponse:
        """Answer a request with a turn, streamed or not."""
        asked = await self._read(request, kind)
        if (train := request.headers.get(_TRAIN, "true")) not in ("true", "false"):
            raise RefusalError(f"{_TRAIN}: must be true or false, got {shown_value(train)}")
        conversation = replace(asked.conversation(), is_trained=train == "true")
        content = f"{request.path} {train}".encode() + await request.read()
        digest = hashlib.blake2b(content).hexdigest()
        is_retry = request.headers.get(_RETRIES, "0") != "0"
        turn = request[_SESSION].turn(conversation, asked.limit, digest, is_retry=is_retry)
        if asked.stream:
            return await self._stream(request, turn, lambda answer: events_of(answer, asked))
        return web.json_response(body_of(await asyncio.shield(turn), asked))

    async def _read[AskedT: (ChatRequest, ResponsesRequest, MessagesRequest)](
        self, request: web.Request, kind: type[AskedT]
    ) -> AskedT:
        session, content = self._session(request), await request.read()
        asked, limits = kind.read(content), session.limits
        max_tokens = limits.max_prompt_tokens + limits.max_tokens
        max_bytes = _BYTES_PER_TOKEN * max_tokens + (1 << 20)
        if len(content) > max_bytes:
            rule = f"must have at most {max_bytes} bytes, got {len(content)}"
            told = f"the body {rule}: {_CONTEXT} {max_tokens} tokens; shorten the messages"
            raise RefusalError(told, 413, "request_too_large")
        session.rules.check(asked.sampling)
        if asked.tools and session.renderer.tool_format == "none":
            raise RefusalError(
                "tools: must be left out with rollout.tool_format=none; set it to the model's "
                "format"
            )
        if isinstance(asked, ResponsesRequest):
            session.responses.resolve(asked)
        return asked

    async def _stream(
        self,
        request: web.Request,
        turn: asyncio.Task[Answer],
        events_of: Callable[[Answer], Iterable[dict[str, Any]]],
    ) -> web.StreamResponse:
        """Send a turn as server-sent events, once it is complete; comments until then."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

        async def send(content: bytes) -> None:
            if not response.prepared:
                await response.prepare(request)
            async with asyncio.timeout(_SEND_S):
                await response.write(content)

        try:
            while not (await asyncio.wait([turn], timeout=_PAUSE_S))[0]:
                await send(b": the turn is being sampled\n\n")
            try:
                events = list(events_of(turn.result()))
            except RefusalError as error:
                if not response.prepared:
                    raise
                events = [self._refused(request, error)]
            for event in events:
                kind = f"event: {event['type']}\n" if "type" in event else ""
                await send(f"{kind}data: {json.dumps(event)}\n\n".encode())
            if request.path != _MESSAGES:
                await send(b"data: [DONE]\n\n")
            await response.write_eof()
        except (ConnectionError, TimeoutError):  # nobody reads it; the call stays recorded
            if request.transport is not None:
                request.transport.abort()
        return response
