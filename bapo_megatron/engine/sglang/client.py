"""One SGLang server as an ``Engine``: typed answers, every answer checked.

How SGLang releases memory and takes it back:

* A server that is not idle crashes in release, on an assertion. ``/pause_generation`` in its mode
  ``abort`` answers requests, also those of other clients, with what there is, and lets no new one
  in; it does not wait until the scheduler is idle. ``/flush_cache?timeout=…`` does, and fails if
  the scheduler is not idle by then.
* A second resume of the same memory crashes it, and so does one of memory that was never released,
  such as that of a server which restarted meanwhile. Therefore no such call is repeated.
* The content of released weights is lost; therefore nothing may be generated before new ones.
* While paused it answers no /generate at all, and 503 to /ready; control calls work.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bapo_megatron.engine.base import (
    BucketLayout,
    Capabilities,
    CompletionSink,
    GenerateRequest,
    GroupPlace,
    LoadReport,
    MemoryPart,
    PauseMode,
    WeightControl,
)
from bapo_megatron.engine.sglang.convention import (
    check_model,
    check_temperature_convention,
    stream_body,
)
from bapo_megatron.engine.sglang.http import SglangHttp
from bapo_megatron.engine.sglang.info import ServerInfo
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.kind import VERSION
from bapo_megatron.engine.sglang.stream import EventReader, StreamParser
from bapo_megatron.errors import (
    BrokenConnectionError,
    RefusedError,
    RolloutError,
    ServerError,
    ServerGoneError,
    describe_cause,
)

_MAX_IDLE_WAIT_S = 30.0
_TAGS = {MemoryPart.WEIGHTS: ["weights"], MemoryPart.CACHE: ["kv_cache", "cuda_graph"]}
"""SGLang's names of the memory that is released and taken together."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A request that was sent and has not ended."""

    scope: asyncio.Timeout
    reason: str = ""
    """Why it is given up, if it is or will be."""
    num_pauses: int = 0
    """How often it may have been retracted to pause it."""
    num_retractions: int = 0
    """How often it was retracted because the cache was full."""

    def count_retractions(self, num_all: int) -> int:
        """Take the server's count, which includes pauses; return how many retractions are new.

        A pause does not retract what is waiting, so too few may be counted, never too many.
        """
        num_new = max(0, num_all - self.num_pauses - self.num_retractions)
        self.num_retractions += num_new
        return num_new

    def expire_in(self, timeout_s: float, reason: str) -> None:
        """Give it up after ``timeout_s`` from now."""
        if not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(_now_s() + timeout_s)


class SglangClient:
    """An ``Engine``: one server (``SglangServer``, or another's) as its event loop uses it."""

    stepper = None

    def __init__(
        self,
        address: str,
        keys: ApiKeys,
        *,
        request_timeout_s: float,
        model: Path | None = None,
        gpus: tuple[int, ...] = (),
    ) -> None:
        """Connect to nothing; ``request_timeout_s`` limits calls that have no other limit.

        ``check`` refuses a server of another model than that in the directory ``model``.
        """
        self._model = model
        self._gpus = gpus
        self._http = SglangHttp(address, keys, request_timeout_s)
        self.address = self._http.address
        self._in_flight: dict[str, _Flight] = {}
        self._heard_s = 0.0
        self._is_suspended = False
        self._info: ServerInfo | None = None

    @property
    def num_in_flight(self) -> int:
        """See ``Engine``."""
        return len(self._in_flight)

    @property
    def silence_s(self) -> float:
        """See ``Engine``; a busy server may let single requests wait, so all of them count."""
        is_expected = not self._in_flight or self._is_suspended
        return 0.0 if is_expected else _now_s() - self._heard_s

    async def close(self) -> None:
        """See ``Engine``; the server aborts what it was still generating."""
        await self._http.close()

    async def stream(self, request: GenerateRequest, sink: CompletionSink) -> None:
        """See ``Engine``."""
        info = self._info or await self._ask_info()
        parser = StreamParser(request, sink.is_known, info.is_incremental)
        # New for each request: a repeated one would be answered without tokens. Equally long: the
        # server aborts by prefix, so "r1" would end "r10" too.
        rid = uuid.uuid4().hex
        flight = _Flight(asyncio.timeout(None))
        cause: Exception | None = None
        try:
            async with flight.scope:
                if not self._in_flight:
                    self._heard_s = _now_s()
                self._in_flight[rid] = flight
                await self._receive({"rid": rid, **stream_body(request)}, parser, flight, sink)
        except (TimeoutError, aiohttp.ClientError) as error:
            cause = error
        finally:
            del self._in_flight[rid]
        if parser.is_finished:
            return
        if flight.scope.expired():
            raise ServerGoneError(
                f"{self.address}: {flight.reason} (request: {request.label})"
            ) from cause
        reason = "its answer has no end" if cause is None else describe_cause(cause)
        raise BrokenConnectionError(
            f"{self.address}: the connection broke ({reason}; request: {request.label})"
        ) from cause

    async def _receive(
        self, body: dict[str, Any], parser: StreamParser, flight: _Flight, sink: CompletionSink
    ) -> None:
        """Send a request and hand out what the server streams, until the connection is free."""
        label, reader = parser.request.label, EventReader()
        async with self._http.stream(body, label) as chunks:
            async for chunk in chunks:
                self._heard_s = _now_s()
                with self._http.checked(label):
                    events = list(reader.feed(chunk))
                for event in events:
                    if parser.is_finished:
                        break
                    try:
                        with self._http.checked(label):
                            part = parser.feed(event)
                    except RefusedError as error:
                        raise RolloutError(f"{self.address}: {error} (request: {label})") from error
                    if num_retractions := flight.count_retractions(parser.num_retractions):
                        sink.retracted(num_retractions)
                    if part is not None:
                        sink.take(part)
                if parser.is_finished:
                    break

    async def score(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """See ``Engine``.

        Log-probs of input tokens are log_softmax(logits) at any temperature, and never come from
        cached keys and values.
        """
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self._http.call("/generate", body, admin=False, timeout_s=timeout_s)
        with self._http.checked("probe of its log-probs"):
            rows = reply.json()["meta_info"]["input_token_logprobs"]
            # SGLang reports 0 for the last id of the vocabulary; its log-prob is right.
            if len(rows) != len(token_ids) or any(
                row[1] not in (token_id, 0) for row, token_id in zip(rows, token_ids, strict=True)
            ):
                raise ValueError(
                    f"log-probs of {len(rows)} input tokens do not belong to the "
                    f"{len(token_ids)} that were sent"
                )
            return [math.nan if row[0] is None else float(row[0]) for row in rows[1:]]

    async def abort(self, timeout_s: float) -> None:
        """See ``Engine``.

        One call for all requests, including those of other clients: a server belongs to one run.
        Hundreds of calls, one for each request, would keep it busy for seconds, and one that comes
        before its request reaches the scheduler is lost together with its repetitions.
        """
        for flight in self._in_flight.values():
            if not flight.reason:
                flight.expire_in(timeout_s, f"not aborted within {timeout_s:g} s")
        await self._http.control("/abort_request", {"abort_all": True}, timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """See ``Engine``."""
        self._is_suspended = True
        for flight in self._in_flight.values():
            flight.num_pauses += mode == "retract"
        await self._http.call_again("/pause_generation", {"mode": mode}, admin=True)

    async def resume(self) -> None:
        """See ``Engine``."""
        await self._http.call_again("/continue_generation", {}, admin=True)
        self._is_suspended = False
        self._heard_s = _now_s()

    def give_up(self, reason: str) -> None:
        """See ``Engine``; also forget how the server was started."""
        self._info = None
        self._is_suspended = False
        for flight in self._in_flight.values():
            flight.expire_in(0.0, reason)

    async def version(self, timeout_s: float | None = None) -> str:
        """See ``Engine``; any text until a trainer sets it. The scheduler is not asked."""
        path = "/model_info"
        reply = await self._http.call(path, admin=False, timeout_s=timeout_s)
        with self._http.checked(path):
            return str(reply.json()["weight_version"])

    async def capabilities(self, timeout_s: float | None = None) -> Capabilities:
        """See ``Engine``."""
        return replace((await self._ask_info(timeout_s)).capabilities, gpus=self._gpus)

    async def check(self, temperature: float, probe_prompts: Sequence[Sequence[int]] = ()) -> None:
        """See ``Engine``; resume a server that a killed trainer left paused."""
        info = self._info or await self._ask_info()
        if self._model is not None:
            await check_model(self._http, info.model_path, self._model)
        await self.resume()
        await check_temperature_convention(self._http, temperature, probe_prompts)

    async def weights(self, timeout_s: float, *, flush_cache: bool = True) -> WeightControl:
        """See ``Engine``.

        With ``flush_cache`` the last call for new weights fails if a request is running, even one
        that is paused in place; the server has the weights then, and reports the old version.
        """
        return SglangWeightControl(self._http, await self._ask_info(timeout_s), flush_cache)

    async def release_memory(self, timeout_s: float) -> None:
        """See ``Engine``."""
        await self._memory_call("/pause_generation", {"mode": "abort"}, timeout_s)
        idle_wait_s = min(_MAX_IDLE_WAIT_S, timeout_s / 2)
        try:
            await self._http.control(f"/flush_cache?timeout={idle_wait_s:g}", {}, timeout_s)
        except RefusedError as error:
            raise RolloutError(
                f"{self.address}: is still busy {idle_wait_s:g} s after its requests were aborted; "
                "its memory is not released, which would crash it. See the server's log, and "
                "continue with resume=true"
            ) from error
        tags = _TAGS[MemoryPart.CACHE] + _TAGS[MemoryPart.WEIGHTS]
        await self._memory_call("/release_memory_occupation", {"tags": tags}, timeout_s)

    async def take_memory(self, part: MemoryPart, timeout_s: float) -> None:
        """See ``Engine``; with its cache the server continues."""
        await self._memory_call("/resume_memory_occupation", {"tags": _TAGS[part]}, timeout_s)
        if part is MemoryPart.CACHE:
            await self._memory_call("/continue_generation", {}, timeout_s)

    async def _memory_call(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """Send a control call, whose refusal leaves unknown which memory the server has."""
        try:
            await self._http.control(path, body, timeout_s)
        except RefusedError as error:
            raise ServerError(str(error)) from error

    async def report_load(self, timeout_s: float) -> LoadReport:
        """See ``LoadReporter``; as the schedulers last told it, which they do as they sample."""
        path = "/v1/loads"
        reply = await self._http.call(path, admin=True, timeout_s=timeout_s)
        with self._http.checked(path):
            ranks = reply.json()["loads"]
            return LoadReport(
                running=sum(int(rank["num_running_reqs"]) for rank in ranks),
                waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                cache_used_share=max(float(rank["token_usage"]) for rank in ranks),
            )

    async def _ask_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Ask how the server was started; its scheduler answers, which detects hangs.

        Raises:
            RolloutError: Its SGLang is too old.
        """
        path = "/server_info"
        reply = await self._http.call(path, admin=True, timeout_s=timeout_s)
        with self._http.checked(path):
            info = ServerInfo.parse(reply.json(), reply.headers)
        if not info.is_supported:
            raise RolloutError(
                f"{self.address}: runs SGLang {info.version}, needs at least {VERSION}; update it"
            )
        self._info = info
        return info


class SglangWeightControl:
    """A ``WeightControl``: the control calls that give one server new weights.

    Unlike other control calls, they are never repeated after a lost connection: the server may be
    waiting in the collective of the first one.
    """

    def __init__(self, http: SglangHttp, info: ServerInfo, flush_cache: bool) -> None:
        self._http = http
        self._flush_cache = flush_cache
        self.tensor_ranks = info.tensor_ranks

    async def open_session(self, timeout_s: float) -> None:
        """See ``WeightControl``; a session that an earlier trainer left open is closed first."""
        try:
            await self._http.control("/begin_weight_update", {}, timeout_s)
        except ServerGoneError:
            raise
        except RolloutError:
            await self._http.control("/end_weight_update", {}, timeout_s)
            await self._http.control("/begin_weight_update", {}, timeout_s)

    async def close_session(self, timeout_s: float) -> None:
        """See ``WeightControl``."""
        await self._http.control("/end_weight_update", {}, timeout_s)

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """See ``WeightControl``."""
        body = {
            "master_address": place.master_address,
            "master_port": place.master_port,
            "rank_offset": place.first_rank,
            "world_size": place.world_size,
            "group_name": place.name,
            "backend": place.backend,
        }
        await self._http.control("/init_weights_update_group", body, timeout_s)

    async def leave_group(self, name: str, timeout_s: float) -> None:
        """See ``WeightControl``."""
        await self._http.control("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def receive(
        self, bucket: BucketLayout, group_name: str, *, version: int | None, timeout_s: float
    ) -> None:
        """See ``WeightControl``."""
        body = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
        }
        await self._update("/update_weights_from_distributed", body, version, timeout_s)

    async def take(self, payloads: Sequence[str], *, version: int | None, timeout_s: float) -> None:
        """See ``WeightControl``."""
        body = {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket"}
        await self._update("/update_weights_from_tensor", body, version, timeout_s)

    async def load(self, model_dir: Path, *, version: int, timeout_s: float) -> None:
        """See ``WeightControl``."""
        # Otherwise a server that was started with dummy weights would load such.
        body = {"model_path": str(model_dir.absolute()), "load_format": "auto"}
        await self._update("/update_weights_from_disk", body, version, timeout_s)

    async def flush_idle(self, timeout_s: float) -> None:
        """See ``WeightControl``."""
        with contextlib.suppress(RefusedError):  # it has requests, and keeps what belongs to them
            await self._http.control("/flush_cache", {}, timeout_s)

    async def _update(
        self, path: str, body: dict[str, Any], version: int | None, timeout_s: float
    ) -> None:
        body["flush_cache"] = self._flush_cache and version is not None
        body["abort_all_requests"] = False
        if version is not None:
            body["weight_version"] = str(version)
        await self._http.control(path, body, timeout_s)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
