"""Asynchronous client of one SGLang server: typed answers, every answer checked."""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import httpx

from bapo_megatron.errors import BrokenConnectionError, RolloutError, ServerError, ServerGoneError
from bapo_megatron.engine.base import (
    CompletionSink,
    GenerateRequest,
    SamplingSettings,
)
from bapo_megatron.engine.sglang.transport import SeparateConnections
from bapo_megatron.engine.sglang.dialect import OLDEST_VERSION, ServerInfo, is_supported
from bapo_megatron.engine.sglang.http import KEEPALIVE_EXPIRY_S, SglangHttp, describe_cause
from bapo_megatron.engine.sglang.stream import EventReader, RefusedError, StreamParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.engine.base import Completion

API_KEY_VARIABLE = "BAPO_MEGATRON_API_KEY"
"""Environment variable with the key of ``/generate`` for servers in ``rollout.servers``."""
ADMIN_API_KEY_VARIABLE = "BAPO_MEGATRON_ADMIN_API_KEY"
"""Environment variable with the key of control calls for servers in ``rollout.servers``."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys of a server; empty where it wants none."""

    api_key: str = field(default="", repr=False)
    """For generation and the weights version."""
    admin_api_key: str = field(default="", repr=False)
    """For control calls: abort, weight updates, how the server was started."""

    @classmethod
    def from_environment(cls) -> Self:
        """The keys of servers that somebody else started."""
        return cls(os.environ.get(API_KEY_VARIABLE, ""), os.environ.get(ADMIN_API_KEY_VARIABLE, ""))

    @staticmethod
    def variable(*, admin: bool) -> str:
        """The environment variable with the key of one call."""
        return ADMIN_API_KEY_VARIABLE if admin else API_KEY_VARIABLE

    def headers(self, *, admin: bool) -> dict[str, str]:
        """The HTTP headers of one call; a server without an admin key takes the other one."""
        key = (self.admin_api_key or self.api_key) if admin else self.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(slots=True, eq=False)
class _Flight:
    """A request that was sent and has not ended."""

    label: str
    parser: StreamParser
    sink: CompletionSink
    scope: asyncio.Timeout
    reason: str = ""
    """Why it is given up, if it is or will be."""

    def expire_in(self, timeout_s: float, reason: str) -> None:
        """Give it up after ``timeout_s`` from now."""
        if not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(_now_s() + timeout_s)


class SglangClient(SglangHttp):
    """One server; belongs to the event loop that uses it."""

    def __init__(self, address: str, keys: ApiKeys, *, request_timeout_s: float) -> None:
        """Prepare the connections; nothing is sent.

        Args:
            address: ``http://host:port``.
            keys: Keys of the server.
            request_timeout_s: Longest time without an answer to a call beside generation.
        """
        super().__init__(address, keys, request_timeout_s)
        self._in_flight: dict[str, _Flight] = {}
        self._heard_s = 0.0
        self._is_suspended = False
        self._info: ServerInfo | None = None
        # Of its own, so that other calls never queue behind generation.
        self._generate_http = self._make_http(None, SeparateConnections(KEEPALIVE_EXPIRY_S))

    @property
    def num_in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._in_flight)

    @property
    def silence_s(self) -> float:
        """For how long no request in flight has got anything; 0 without any, and while paused.

        Of all requests, since a server with much to do may let single ones wait for their turn.
        """
        is_expected = not self._in_flight or self._is_suspended
        return 0.0 if is_expected else _now_s() - self._heard_s

    async def close(self) -> None:
        """Close every connection; the server aborts what it was still generating for them."""
        await self._generate_http.aclose()
        await super().close()

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        """Sample once, in pieces; returns when ``sink`` has the last one.

        It may take any time: whether the server still works is seen to by who calls ``give_up``.

        Raises:
            ServerError: The server is lost, was given up, or answers inconsistently.
            RolloutError: It refuses the request, as any server would.
        """
        info = await self.info()
        parser = StreamParser(
            max_new_tokens=request.sampling.max_new_tokens,
            has_logprobs=request.return_logprobs,
            is_incremental=info.is_incremental,
            version=request.version,
            is_known=sink.is_known,
        )
        # New for each request: a repeated one would be answered without tokens. Equally long: the
        # server aborts by prefix, "r1" would take "r10" along.
        rid = uuid.uuid4().hex
        flight = _Flight(request.label, parser, sink, asyncio.timeout(None))
        failure: Exception | None = None
        try:
            async with flight.scope:
                if not self._in_flight:
                    self._heard_s = _now_s()
                self._in_flight[rid] = flight
                await self._receive({"rid": rid, **request.to_json_dict()}, flight)
        except TimeoutError as error:
            if not flight.scope.expired():
                raise
            failure = error
        except httpx.TransportError as error:
            failure = error
        finally:
            del self._in_flight[rid]
        if not parser.is_finished:
            raise self._lost(flight, failure) from failure

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        label: str,
        return_logprobs: bool = True,
    ) -> Completion:
        """Sample one completion, whichever weights version the server holds.

        Raises:
            RolloutError: As ``stream``.
        """
        sink = CompletionSink()
        request = GenerateRequest(
            input_ids=input_ids, sampling=sampling, label=label, return_logprobs=return_logprobs
        )
        await self.stream(request, sink)
        return sink.completion()

    async def next_token_logprobs(
        self,
        input_ids: Sequence[int],
        temperature: float,
        *,
        token_ids: Sequence[int] = (),
        num_top: int = 0,
    ) -> dict[int, float]:
        """Log-probs of some tokens at the position after ``input_ids``, as the server reports them.

        Args:
            input_ids: Context.
            temperature: Sampling temperature of the request.
            token_ids: Tokens that are wanted in any case.
            num_top: The most likely tokens that are wanted besides.

        Returns:
            Log-prob by token id; the token that was sampled is among them.

        Raises:
            RolloutError: The server refuses, does not answer, or answers inconsistently.
        """
        answer = await self._send(
            "POST",
            "/generate",
            {
                "input_ids": list(input_ids),
                "sampling_params": SamplingSettings(temperature, 1).to_json_dict(),
                "return_logprob": True,
                "top_logprobs_num": num_top,
                "token_ids_logprob": list(token_ids) or None,
            },
            admin=False,
        )
        with self.checked("probe of the temperature convention"):
            meta = answer["meta_info"]
            rows = [meta["output_token_logprobs"][0]]
            rows += meta["output_top_logprobs"][0] if num_top else []
            rows += meta["output_token_ids_logprobs"][0] if token_ids else []
            found = {int(token_id): float(logprob) for logprob, token_id, *_ in rows}
            if missing := set(token_ids) - set(found):
                raise ValueError(f"no log-probs of tokens {sorted(missing)}")
            return found

    async def abort(self, timeout_s: float) -> None:
        """Have the server end every request; their streams then end with what there is.

        One call for all, also those of other clients: a server belongs to one run, whose weights
        it gets. Hundreds of calls, one for each request, keep it busy for seconds, and one that
        comes before its request reaches the scheduler is swallowed together with its repetitions.
        The server forgets requests that it has not seen yet: repeat until ``num_in_flight`` is 0.

        Args:
            timeout_s: Requests that have not ended by then count as lost.

        Raises:
            RolloutError: As ``call_once``.
        """
        for flight in self._in_flight.values():
            if not flight.reason:
                flight.expire_in(timeout_s, f"not aborted within {timeout_s:g} s")
        await self.call_once(
            "POST", "/abort_request", {"abort_all": True}, admin=True, timeout_s=timeout_s
        )

    async def pause(self, mode: str) -> None:
        """Have the server sample nothing until ``resume``; requests may be silent meanwhile.

        Args:
            mode: ``retract`` or ``in_place``.
        """
        self._is_suspended = True
        await self._send("POST", "/pause_generation", {"mode": mode}, admin=True)

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self._send("POST", "/continue_generation", {}, admin=True)
        self._is_suspended = False
        self._heard_s = _now_s()

    def give_up(self, reason: str) -> None:
        """End every request in flight at once, with what was received, and forget ``info``.

        Args:
            reason: What their ``ServerError`` says.
        """
        self._info = None
        self._is_suspended = False
        for flight in self._in_flight.values():
            flight.expire_in(0.0, reason)

    async def version(self, timeout_s: float | None = None) -> str:
        """The weights version that the server reports; free text until a trainer set it.

        The cheapest call that tells whether a server lives; its scheduler is not asked.

        Raises:
            RolloutError: As ``call_once``.
        """
        path = "/model_info"
        answer = await self.call_once("GET", path, None, admin=False, timeout_s=timeout_s)
        with self.checked(path):
            return str(answer["weight_version"])

    async def info(self) -> ServerInfo:
        """``ask_info``, asked for once, and again after ``give_up``."""
        if self._info is None:
            self._info = await self.ask_info()
        return self._info

    async def ask_info(self, timeout_s: float | None = None) -> ServerInfo:
        """How the server was started. Its scheduler answers, so one that hangs is found out.

        Raises:
            RolloutError: As ``call_once``; its SGLang is too old.
        """
        path = "/server_info"
        answer = await self.call_once("GET", path, None, admin=True, timeout_s=timeout_s)
        with self.checked(path):
            info = ServerInfo.parse(answer)
        if not is_supported(info.version):
            raise RolloutError(
                f"{self.address}: runs SGLang {info.version}, needs at least {OLDEST_VERSION}; "
                "update it"
            )
        return info

    async def _receive(self, body: dict[str, Any], flight: _Flight) -> None:
        """Send a request and hand out what the server streams, until the connection is free."""
        async with self._generate_http.stream(
            "POST", "/generate", json=body, headers=self._keys.headers(admin=False)
        ) as reply:
            if reply.status_code != httpx.codes.OK:
                await reply.aread()
                self._check_status(reply, f"/generate ({flight.label})", admin=False)
            reader = EventReader()
            async for chunk in reply.aiter_raw():
                self._heard_s = _now_s()
                with self.checked(flight.label):
                    events = list(reader.feed(chunk))
                for event in events:
                    self._take(event, flight)

    def _take(self, event: dict[str, Any], flight: _Flight) -> None:
        parser, sink = flight.parser, flight.sink
        if parser.is_finished:
            return
        had_tokens = parser.cached_tokens is not None
        try:
            with self.checked(flight.label):
                part = parser.feed(event)
        except RefusedError as error:
            raise RolloutError(f"{self.address}: {error} (request: {flight.label})") from error
        if parser.cached_tokens is not None and not had_tokens:
            sink.first_tokens(parser.cached_tokens)
        if part is not None:
            sink.take(part)

    def _lost(self, flight: _Flight, failure: Exception | None) -> ServerError:
        """What to raise for a request that did not end."""
        if isinstance(failure, TimeoutError):
            return ServerGoneError(f"{self.address}: {flight.reason} (request: {flight.label})")
        reason = "its answer has no end" if failure is None else describe_cause(failure)
        return BrokenConnectionError(
            f"{self.address}: the connection broke ({reason}; request: {flight.label})"
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
