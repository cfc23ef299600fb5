"""A deterministic server with SGLang's interface, for failures that a real one cannot be given.

The token at position p of a sequence is p + 100, whatever came before; a response ends where its
prompt says: at position ``stop_at`` (end of sequence) or after ``max_new_tokens``. The log-prob of
token t at temperature T is that of the fixed logits ``LOGITS_V`` at index t mod V. Both ways to
stream are those of SGLang 0.5.23, with their traps: events come after 1, 1 + k, 1 + 2k, … tokens
for ``stream_interval`` k, and after the last one. Their JSON has null for NaN.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bapo_megatron.engine.sglang.questions import NCCL_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

V = 32
LOGITS_V = 3 * np.sin(np.arange(V))

_CONTROL_PATHS = (
    "/server_info",
    "/v1/loads",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
)
_POLL_S = 0.01


def token_at(position: int) -> int:
    """The token that the server samples at a position of the whole sequence."""
    return position + 100


def logprob_of(token_id: int, temperature: float, logits_V: np.ndarray = LOGITS_V) -> float:
    """log_softmax(logits / T) of a token."""
    scaled_V = logits_V / temperature
    return float(scaled_V[token_id % V] - np.log(np.exp(scaled_V).sum()))


class _BrokenError(Exception):
    """The connection is to be closed here."""


@dataclass
class FakeSglang:
    """Start it with ``with``; attributes may be changed while it runs."""

    stop_at: int | None = None
    """Position of the end-of-sequence token, if there is one."""
    token_interval_s: float = 0.0
    """Time for one token; requests can be aborted in between."""
    stalls: dict[int, int] = field(default_factory=dict)
    """Requests with so many input tokens wait for their abort after so many new tokens."""
    ignores_temperature: bool = False
    """Report log_softmax(logits), as with SGLANG_RETURN_ORIGINAL_LOGPROB=1."""
    logits_V: np.ndarray = field(default_factory=lambda: LOGITS_V)
    """Logits of every position."""
    connections_to_drop: int = 0
    """So many requests are closed without an answer."""
    breaks_after: dict[int, int] = field(default_factory=dict)
    """Connections of requests with so many input tokens break after so many new tokens, once."""
    broken_at: int | None = None
    """From this position on log-probs are NaN."""
    ignores_aborts: bool = False
    """Go on with requests that are aborted."""
    aborts_at: int | None = None
    """Position at which requests are aborted by nobody."""
    is_hanging: bool = False
    """Answer nothing, as a stopped process."""
    has_stuck_scheduler: bool = False
    """Sample nothing, and answer only what needs no scheduler."""
    is_full: bool = False
    """Sample nothing, because others come first."""
    api_key: str = ""
    """Wanted for every call, if not empty, but for those of ``admin_api_key``."""
    admin_api_key: str = ""
    """Wanted for control calls, if not empty."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Replaces fields of ``meta_info`` in the last event of an answer."""
    ignores_updates: bool = False
    """Accept new weights, but keep the version."""
    nccl_settings: dict[str, str] | None = None
    """What it tells of NCCL; None: it was not started by this project."""
    version: str = "0"
    is_incremental: bool = True
    """Started with ``--incremental-streaming-output``."""
    sglang_version: str = "0.5.23"
    num_ranks: int = 1
    """Its tensor-parallel size."""
    cache_tokens: int = 1 << 20
    model_path: str = ""
    """The model that it was started with."""
    architectures: tuple[str, ...] | None = None
    """As in that model's config.json."""
    certificate: Path | None = None
    """PEM file of its certificate and key; none: plain HTTP."""
    pause_mode: str | None = None
    """As told by ``/pause_generation``; nothing is sampled meanwhile."""
    loads: list[list[dict[str, Any]]] = field(default_factory=list)
    """What it answers, one after the other, when it is asked for its load; then nothing of use."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Every body that /generate got."""
    calls: list[str] = field(default_factory=list)
    """The path of every call."""
    most_concurrent: int = 0

    def __enter__(self) -> Self:
        self._concurrent = 0
        self._lock = threading.Lock()
        self._port = 0
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.crash()

    def start(self) -> None:
        """Listen, at the same port after ``crash``."""
        self.is_hanging = False
        self.pause_mode = None
        self._is_down = False
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._connections: set[socket.socket] = set()
        self._http = _HttpServer(
            ("127.0.0.1", self._port), type("Handler", (_Handler,), {"fake": self})
        )
        self._port = self._http.server_address[1]
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def crash(self) -> None:
        """Break every connection and stop listening, as ``kill -9`` does."""
        if self._is_down:
            return
        self._is_down, self.is_hanging = True, False
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def address(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self._port}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one call."""
        if path == "/model_info":
            return {"weight_version": self.version, "architectures": self.architectures}
        if path == "/v1/loads":
            return {"loads": self.loads.pop(0)} if self.loads else {}
        if path == "/server_info":
            while self.has_stuck_scheduler and not self._is_down:
                time.sleep(_POLL_S)
            return {
                "version": self.sglang_version,
                "model_path": self.model_path,
                "tp_size": self.num_ranks,
                "pp_size": 1,
                "dp_size": 1,
                "incremental_streaming_output": self.is_incremental,
                "max_total_num_tokens": self.cache_tokens,
            }
        if path == "/abort_request":
            assert body == {"abort_all": True}
            with self._lock:
                self._aborted |= self._running
            return {}
        if path == "/pause_generation":
            self.pause_mode = body["mode"]
            return {"status": "ok"}
        if path == "/continue_generation":
            self.pause_mode = None
            return {"status": "ok"}
        assert path == "/update_weights_from_disk", path
        self.version = self.version if self.ignores_updates else body["weight_version"]
        return {"success": True}

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of one request; without ``stream`` only the last one is an answer."""
        with self._lock:
            self.requests.append(body)
            if self.connections_to_drop > 0:
                self.connections_to_drop -= 1
                raise _BrokenError
            self._running.add(body.get("rid", ""))
            self._concurrent += 1
            self.most_concurrent = max(self.most_concurrent, self._concurrent)
        try:
            yield from self._generate(body)
        finally:
            with self._lock:
                self._running.discard(body.get("rid", ""))
                self._concurrent -= 1

    def _generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        interval = body["sampling_params"].get("stream_interval", 1)
        start, num_sent, finish = len(body["input_ids"]), 0, "length"
        ids: list[int] = []
        versions: list[str] = []
        while len(ids) < body["sampling_params"]["max_new_tokens"]:
            self.wait_while_hanging()
            if self._is_down:
                raise _BrokenError
            if body.get("rid", "") in self._aborted and not self.ignores_aborts:
                finish = "abort"
                break
            if (
                len(ids) == self.stalls.get(start)
                or self.pause_mode is not None
                or self.is_full
                or self.has_stuck_scheduler
            ):
                time.sleep(_POLL_S)
                continue
            time.sleep(self.token_interval_s)
            if len(ids) == self.breaks_after.get(start):
                del self.breaks_after[start]
                raise _BrokenError
            if start + len(ids) == self.aborts_at:
                finish = "abort"
                break
            ids.append(token_at(start + len(ids)))
            versions.append(self.version)
            if self.stop_at is not None and start + len(ids) > self.stop_at:
                finish = "stop"
                break
            if len(ids) < body["sampling_params"]["max_new_tokens"] and (
                interval == 1 or len(ids) % interval == 1
            ):
                yield self._event(body, ids, num_sent, {"finish_reason": None})
                num_sent = len(ids)
        last = {
            "finish_reason": {"type": finish},
            "weight_versions": _spans(versions, self.version),
        }
        yield self._event(body, ids, num_sent, {**last, **self.changes})

    def _event(
        self, body: dict[str, Any], ids: list[int], num_sent: int, fields: dict[str, Any]
    ) -> dict[str, Any]:
        start = len(body["input_ids"])
        temperature = 1.0 if self.ignores_temperature else body["sampling_params"]["temperature"]
        first = num_sent if self.is_incremental and body.get("stream") else 0

        def row(token_id: int, position: int = 0) -> list[Any]:
            if self.broken_at is not None and position >= self.broken_at:
                return [None, token_id, None]
            return [logprob_of(token_id, temperature, self.logits_V), token_id, None]

        meta: dict[str, Any] = {
            "weight_version": self.version,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [
                row(token_id, start + first + index) for index, token_id in enumerate(ids[first:])
            ]
        if body.get("top_logprobs_num"):
            best = np.argsort(-self.logits_V)[: body["top_logprobs_num"]]
            meta["output_top_logprobs"] = [[row(int(token_id)) for token_id in best]]
        if body.get("token_ids_logprob"):
            meta["output_token_ids_logprobs"] = [[row(t) for t in body["token_ids_logprob"]]]
        return {"output_ids": ids[first:], "meta_info": {**meta, **fields}}

    def connected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)

    def disconnected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    def wait_while_hanging(self) -> None:
        while self.is_hanging:
            time.sleep(_POLL_S)

    def refuses(self, path: str, header: str | None) -> bool:
        is_control = path in _CONTROL_PATHS
        key = self.admin_api_key if is_control and self.admin_api_key else self.api_key
        return bool(key) and header != f"Bearer {key}"


class _HttpServer(ThreadingHTTPServer):
    """Takes many connections at a time; the standard library's five would reset the others."""

    daemon_threads = True
    request_queue_size = 1024


class _Handler(BaseHTTPRequestHandler):
    """One connection; ``fake`` is set by a subclass for each server."""

    protocol_version = "HTTP/1.1"
    fake: FakeSglang

    def setup(self) -> None:
        super().setup()
        self.fake.connected(self.connection)

    def finish(self) -> None:
        self.fake.disconnected(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.fake.wait_while_hanging()
        self.fake.calls.append(self.path)
        body = json.loads(content or b"{}")
        try:
            if self.fake.refuses(self.path, self.headers["Authorization"]):
                self._send_whole(401, {"error": "Unauthorized"})
            elif self.path != "/generate":
                answer = self.fake.answer(self.path, body)
                told = self.fake.nccl_settings if self.path == "/server_info" else None
                self._send_whole(200, answer, {} if told is None else {NCCL_HEADER: told})
            elif body.get("stream"):
                self._send_stream(self.fake.generate(body))
            else:
                *_, last = self.fake.generate(body)
                self._send_whole(200, last)
        except (_BrokenError, OSError):
            self.close_connection = True

    def _send_whole(
        self, status: int, answer: dict[str, Any], headers: dict[str, Any] | None = None
    ) -> None:
        encoded = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, json.dumps(value))
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def _send_stream(self, events: Iterator[dict[str, Any]]) -> None:
        first = next(events)  # before the status: a connection may break without any answer
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in itertools.chain([first], events):
            text = json.dumps(event).replace("-Infinity", "null").replace("NaN", "null")
            self._send_chunk(f"data: {text}\n\n".encode())
        self._send_chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _spans(versions: list[str], current: str) -> list[dict[str, Any]]:
    """Versions of the tokens as SGLang tells them."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return spans or [{"version": current, "start": 0, "end": 0}]
