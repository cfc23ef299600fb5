"""One SGLang server as an ``Engine``: calls with keys and time limits, every answer checked.

SGLang crashes if a busy server releases memory, or if memory is resumed that was not released, as
after a restart; such calls are never retried. ``/pause_generation`` with mode ``abort`` answers all
requests, also of other clients, with the tokens so far and admits no new ones;
``/flush_cache?timeout=…`` then fails if the scheduler is not idle in time. A paused server answers
no /generate at all and 503 to /ready; control calls work.
"""

import asyncio
import contextlib
import functools
import json
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.rollout import ServerConfig
from bapo_megatron.data.record import EnoughTokensError
from bapo_megatron.engine.base import (
    BucketLayout,
    Capabilities,
    CompletionSink,
    GenerateRequest,
    GroupPlace,
    LoadReport,
    MemoryPart,
    PauseMode,
    Scores,
)
from bapo_megatron.engine.sglang import protocol
from bapo_megatron.engine.sglang.keys import NCCL_HEADER, ApiKeys
from bapo_megatron.engine.sglang.settings import LORA_TARGETS
from bapo_megatron.errors import (
    BrokenConnectionError,
    RefusedError,
    RolloutError,
    ServerError,
    ServerGoneError,
    describe_cause,
)

_CONNECT_TIMEOUT_S = 10.0
# The server closes idle connections after 5 s; one that is being closed must not be reused.
_KEEPALIVE_EXPIRY_S = 3.0
_MAX_REASON = 300
_MAX_IDLE_WAIT_S = 30.0
_TAGS = {MemoryPart.WEIGHTS: ["weights"], MemoryPart.CACHE: ["kv_cache", "cuda_graph"]}
"""SGLang's tags of the memory that is released and resumed together."""
_TARGET = {"selector": "target"}
"""By default SGLang loads the policy's weights into the draft model of speculation, too."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A request that was sent and has not ended."""

    scope: asyncio.Timeout
    reason: str = ""
    """Why it is given up, if it is."""
    num_pauses: int = 0
    """Pauses, each of which may have retracted it."""

    def expire_in(self, timeout_s: float, reason: str) -> None:
        """Give it up ``timeout_s`` from now."""
        if not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(time.monotonic() + timeout_s)


class SglangClient:
    """An ``Engine``: one server, with a connection for every request in flight."""

    stepper = None

    def __init__(
        self,
        address: str,
        keys: ApiKeys,
        *,
        request_timeout_s: float,
        model: Path | None = None,
        gpus: tuple[int, ...] = (),
        returns_routes: bool = False,
        settings: ServerConfig | None = None,
        keeps_cache: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Prepare without connecting; ``check`` refuses servers of other models than ``model``.

        With ``returns_routes`` it also refuses servers that cannot return the experts of tokens,
        with ``settings`` those that speculate or quantize otherwise. With ``keeps_cache`` new
        weights leave the KV cache, which requests paused in place need; without, they are refused
        while a request is running. With ``lora`` it gets adapters in place of merged weights.
        """
        self.address = address.rstrip("/")
        self._keys = keys
        self._timeout_s = request_timeout_s
        self._model = model
        self._gpus = gpus
        self._returns_routes = returns_routes
        self._settings = settings
        self.weights = SglangWeightControl(self, not keeps_cache, lora)
        self._in_flight: dict[str, _Flight] = {}
        self._heard_s = 0.0
        self._is_suspended = False

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Created by the first call, because it belongs to the event loop."""
        return aiohttp.ClientSession(
            # No ``trust_env``: a proxy must not come between trainer and server.
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_EXPIRY_S,
                # The system's CAs, which include those of a cluster; takes 20 ms.
                ssl=not self.address.startswith("https:") or ssl.create_default_context(),
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def silence_s(self) -> float:
        """See ``Engine``; over all requests, because a busy server may let some wait."""
        is_expected = not self._in_flight or self._is_suspended
        return 0.0 if is_expected else time.monotonic() - self._heard_s

    async def close(self) -> None:
        """See ``Engine``; the server aborts what it was still generating."""
        await self._session.close()

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        parser = protocol.StreamParser(request, sink.is_known)
        # Never reused: a repeated id would be answered without tokens. Of equal length: the server
        # aborts by prefix, so "r1" would end "r10" too.
        rid = uuid.uuid4().hex
        flight = _Flight(asyncio.timeout(None))
        cause: Exception | None = None
        try:
            async with flight.scope:
                if not self._in_flight:
                    self._heard_s = time.monotonic()
                self._in_flight[rid] = flight
                body = {"rid": rid, **protocol.stream_body(request), **self.weights.request_fields}
                try:
                    await self._receive(body, parser, sink)
                except EnoughTokensError:
                    if not parser.is_finished:  # a closed connection ends it only after 2 s
                        with contextlib.suppress(RolloutError):
                            await self.call("/abort_request", {"rid": rid})
                    raise
        except (TimeoutError, aiohttp.ClientError) as error:
            cause = error
        finally:
            del self._in_flight[rid]
            # A pause does not retract queued requests, so this may undercount, never overcount.
            sink.retracted(max(0, parser.num_retractions - flight.num_pauses))
        if parser.is_finished:
            return
        if flight.scope.expired():
            raise ServerGoneError(
                f"{self.address}: {flight.reason} (request: {request.label})"
            ) from cause
        reason = "the answer is incomplete" if cause is None else describe_cause(cause)
        raise BrokenConnectionError(
            f"{self.address}: the connection broke ({reason}; request: {request.label})"
        ) from cause

    async def _receive(
        self, body: dict[str, Any], parser: protocol.StreamParser, sink: CompletionSink
    ) -> None:
        """Send a request and pass on the streamed pieces until the connection is free."""
        label = parser.request.label
        async with self._send("/generate", body) as reply:
            await self._check_status(reply, f"/generate ({label})")
            while event := await reply.content.readuntil(b"\n\n", max_size=sys.maxsize):
                self._heard_s = time.monotonic()
                with self._checked(label):
                    part = parser.feed(event)
                if part is not None:
                    sink.take(part)

    async def score(
        self, token_ids: Sequence[int], timeout_s: float, *, start: int = 1, top_k: int = 0
    ) -> Scores:

        def parse(answer: dict[str, Any]) -> Scores:
            return protocol.parse_scores(answer, token_ids, start, top_k)

        body = {**protocol.score_body(token_ids, start, top_k), **self.weights.request_fields}
        return await self.ask("/generate", parse, body, timeout_s)

    async def abort(self, timeout_s: float) -> None:
        """See ``Engine``.

        One call for all requests: hundreds of calls would keep the server busy for seconds, and an
        abort by id that comes before its request reaches the scheduler is lost, also if repeated.
        """
        for flight in self._in_flight.values():
            if not flight.reason:
                flight.expire_in(timeout_s, f"not aborted within {timeout_s:g} s")
        await self.call("/abort_request", {"abort_all": True}, timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        self._is_suspended = True
        for flight in self._in_flight.values():
            flight.num_pauses += mode == "retract"
        await self.call("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.call("/continue_generation", {})
        self._is_suspended = False
        self._heard_s = time.monotonic()

    def give_up(self, reason: str) -> None:
        self._is_suspended = False
        for flight in self._in_flight.values():
            flight.expire_in(0.0, reason)

    async def version(self, timeout_s: float | None = None) -> str:
        """See ``Engine``; any text until a trainer sets it. Does not involve the scheduler."""
        parse = itemgetter("weight_version")
        return str(await self.ask("/model_info", parse, timeout_s=timeout_s))

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        content, headers = await self.call("/server_info", timeout_s=timeout_s)
        with self._checked("/server_info"):
            nccl_settings = json.loads(headers.get(NCCL_HEADER, "{}"))
            info = orjson.loads(content)
            return protocol.parse_info(self.address, info, nccl_settings, self._gpus)

    async def check(self) -> None:
        """See ``Engine``; also resume a server that a killed trainer left paused."""
        if self._model is not None:
            served = await self.ask("/model_info", itemgetter("architectures"))
            protocol.check_architecture(self.address, served, self._model)
        info = await self.ask("/server_info", dict)
        if self._returns_routes and not info.get("enable_return_routed_experts"):
            raise RolloutError(
                f"{self.address}: returns no experts of tokens, which algorithm.router_replay: "
                "rollout needs; start it with --enable-return-routed-experts"
            )
        with self._checked("/server_info"):
            protocol.check_adapters(self.address, info, self.weights.lora)
            if self._settings is not None:
                protocol.check_sampling(self.address, info, self._settings)
        await self.resume()

    async def release_memory(self, timeout_s: float) -> None:
        await self._memory_call("/pause_generation", {"mode": "abort"}, timeout_s)
        idle_wait_s = min(_MAX_IDLE_WAIT_S, timeout_s / 2)
        try:
            await self.call(f"/flush_cache?timeout={idle_wait_s:g}", {}, timeout_s)
        except RefusedError as error:
            raise RolloutError(
                f"{self.address}: is still busy {idle_wait_s:g} s after its requests were aborted; "
                "its memory is not released, which would crash it. See the server's log, and "
                "continue with resume=true"
            ) from error
        tags = _TAGS[MemoryPart.CACHE] + _TAGS[MemoryPart.WEIGHTS]
        await self._memory_call("/release_memory_occupation", {"tags": tags}, timeout_s)

    async def take_memory(self, part: MemoryPart, timeout_s: float) -> None:
        """See ``Engine``; with the KV cache the server also continues generation."""
        await self._memory_call("/resume_memory_occupation", {"tags": _TAGS[part]}, timeout_s)
        if part is MemoryPart.CACHE:
            await self._memory_call("/continue_generation", {}, timeout_s)

    async def _memory_call(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """Send a control call; after a refusal the server's memory is in an unknown state."""
        try:
            await self.call(path, body, timeout_s)
        except RefusedError as error:
            raise ServerError(str(error)) from error

    async def report_load(self, timeout_s: float) -> LoadReport:
        """See ``LoadReporter``; the schedulers update it while they sample."""
        return await self.ask("/v1/loads", protocol.parse_load, timeout_s=timeout_s)

    def _send(
        self, path: str, body: dict[str, Any] | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.request(
            "GET" if body is None else "POST",
            self.address + path,
            data=None if body is None else orjson.dumps(body),
            headers=self._keys.headers(path),
            allow_redirects=False,
        )

    async def call(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """POST ``body``, or GET without one, without retries.

        Returns content and headers; ``rollout.request_timeout_s`` is the default limit.

        Raises:
            ServerGoneError: There was no answer in time, or the connection broke.
            ServerError: The server failed.
            RefusedError: It refuses.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s), self._send(path, body) as reply:
                await self._check_status(reply, path)
                return await reply.read(), reply.headers
        except aiohttp.ClientError as error:
            raise BrokenConnectionError(
                f"{self.address}{path}: no connection ({describe_cause(error)}); see the server's "
                "log, or correct rollout.servers"
            ) from error
        except TimeoutError as error:
            raise ServerGoneError(
                f"{self.address}{path}: no answer within {limit_s:g} s; look for what it waits for "
                "in the server's log"
            ) from error

    async def ask[T](
        self,
        path: str,
        parse: Callable[[Any], T],
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Make a ``call``; return its JSON value after ``parse``."""
        content, _ = await self.call(path, body, timeout_s)
        with self._checked(path):
            return parse(orjson.loads(content))

    async def _check_status(self, reply: aiohttp.ClientResponse, place: str) -> None:
        status = reply.status
        if status == HTTPStatus.OK:
            return
        remedy = "see the server's log"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            remedy = f"set {self._keys.variable(reply.url.path)} to the server's key"
        async with asyncio.timeout(self._timeout_s):
            reason = " ".join((await reply.text(errors="replace")).split())[:_MAX_REASON]
        kind = ServerError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else RefusedError
        raise kind(f"{self.address}{place}: HTTP {status}: {reason}; {remedy}")

    @contextlib.contextmanager
    def _checked(self, label: str) -> Iterator[None]:
        """Add server and request to errors of an answer that refuses or is malformed."""
        try:
            yield
        except RefusedError as error:
            raise RefusedError(f"{self.address}: {error} (request: {label})") from error
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
            raise ServerError(
                f"{self.address}: unusable answer ({label}): {reason}; use an SGLang version that "
                "this project supports, or see the server's log"
            ) from error


@dataclass(slots=True)
class SglangWeightControl:
    """A ``WeightControl`` of one server."""

    client: SglangClient
    flush_cache: bool
    lora: LoraConfig | None
    """The server keeps the base, and each version is such an adapter; None: it gets all weights."""
    request_fields: Mapping[str, str] = field(default_factory=dict)
    """Names the adapter of the newest version in requests."""

    async def open_session(self, timeout_s: float) -> None:
        """See ``WeightControl``; a session that an earlier trainer left open is closed first."""
        if self.lora is not None:
            return
        try:
            await self.client.call("/begin_weight_update", _TARGET, timeout_s)
        except ServerGoneError:
            raise
        except RolloutError:
            await self.client.call("/end_weight_update", {}, timeout_s)
            await self.client.call("/begin_weight_update", _TARGET, timeout_s)

    async def close_session(self, timeout_s: float) -> None:
        if self.lora is None:
            await self.client.call("/end_weight_update", {}, timeout_s)

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        body = {
            "master_address": place.master_address,
            "master_port": place.master_port,
            "rank_offset": place.first_rank,
            "world_size": place.world_size,
            "group_name": place.name,
            "backend": place.backend,
        }
        await self.client.call("/init_weights_update_group", body, timeout_s)

    async def leave_group(self, name: str, timeout_s: float) -> None:
        await self.client.call("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def receive(
        self, bucket: BucketLayout, group_name: str, *, version: int | None, timeout_s: float
    ) -> None:
        body = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            **_TARGET,
        }
        await self._update("/update_weights_from_distributed", body, version, timeout_s)

    async def take(self, payloads: Sequence[str], *, version: int | None, timeout_s: float) -> None:
        body: dict[str, Any] = {
            "serialized_named_tensors": list(payloads),
            "load_format": "flattened_bucket",
        }
        if self.lora is None:
            await self._update("/update_weights_from_tensor", body | _TARGET, version, timeout_s)
            return
        assert version is not None, "adapters are one bucket"
        body["config_dict"] = {
            "peft_type": "LORA",
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "target_modules": list(self.lora.targets or LORA_TARGETS),
        }
        await self._replace("/load_lora_adapter_from_tensors", body, version, timeout_s)

    async def load(self, model_dir: Path, *, version: int, timeout_s: float) -> None:
        if self.lora is not None:
            body = {"lora_path": str(model_dir.absolute())}
            await self._replace("/load_lora_adapter", body, version, timeout_s)
            return
        # Otherwise a server that was started with dummy weights would load dummy weights.
        body = {"model_path": str(model_dir.absolute()), "load_format": "auto"}
        await self._update("/update_weights_from_disk", body, version, timeout_s)

    async def flush_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(RefusedError):  # it has requests, whose cache it keeps
            await self.client.call("/flush_cache", {}, timeout_s)

    async def _update(
        self, path: str, body: dict[str, Any], version: int | None, timeout_s: float
    ) -> None:
        body["flush_cache"] = self.flush_cache and version is not None
        body["abort_all_requests"] = False
        if version is not None:
            body["weight_version"] = str(version)
        await self.client.call(path, body, timeout_s)

    async def _replace(
        self, path: str, body: dict[str, Any], version: int, timeout_s: float
    ) -> None:
        """Load an adapter under a name that was never used, and unload all others.

        An earlier trainer may have left some, also one of this version. The server reports the new
        version only once no request uses an older adapter, so no token has a wrong one. It never
        reads the KV cache of another adapter.
        """
        client, name = self.client, f"version_{version}_{uuid.uuid4().hex}"
        named = {"lora_name": name, **body}
        loaded = await client.ask(path, itemgetter("loaded_adapters"), named, timeout_s)
        for other in loaded.keys() - {name}:
            await client.call("/unload_lora_adapter", {"lora_name": other}, timeout_s)
        new = {"new_version": str(version), "abort_all_requests": False}
        await client.call("/update_weight_version", new, timeout_s)
        self.request_fields = {"lora_path": name}
