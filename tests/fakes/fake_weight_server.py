"""A server as far as new weights are concerned: SGLang's session rules, and failures on request."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from bapo_megatron.engine.sglang.keys import ApiKeys

LOGPROB = -1.5
"""Log-prob of every input token but the first."""


@dataclass
class FakeWeightServer:
    """Start it with ``with``; attributes may be changed while it runs."""

    sglang_version: str = "0.5.23"
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    version: str = "0"
    keys: ApiKeys = field(default_factory=ApiKeys)
    in_session: bool = False
    is_busy: bool = False
    """Requests are running: their cache cannot be flushed."""
    ignores_labels: bool = False
    """Take weights, but keep the version."""
    logprob: float | None = LOGPROB
    refusals: dict[str, str] = field(default_factory=dict)
    """Paths that are answered with HTTP 400 and this message."""
    hanging: set[str] = field(default_factory=set)
    """Paths that are not answered while the server runs."""
    delay_s: float = 0.0
    """Time that weights take."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of every POST that was let in, in order."""

    def __enter__(self) -> Self:
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def paths(self) -> list[str]:
        """Paths of the calls so far."""
        return [path for path, _ in self.calls]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and content."""
        if path == "/server_info":
            return 200, {
                "version": self.sglang_version,
                "model_path": "",
                "tp_size": self.tensor_ranks,
                "pp_size": self.pipeline_ranks,
                "dp_size": 1,
                "max_total_num_tokens": 1 << 20,
                "incremental_streaming_output": True,
            }
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        self.calls.append((path, body))
        if path in self.hanging:
            self._closing.wait()
        if path.startswith("/update_weights"):
            time.sleep(self.delay_s)
        if path in self.refusals:
            return 400, {"success": False, "message": self.refusals[path]}
        error = self._act(path, body)
        if error:
            return 400, {"success": False, "message": error}
        if path == "/generate":
            rows = [[None if n == 0 else self.logprob, t, None] for n, t in _count(body)]
            return 200, {"meta_info": {"input_token_logprobs": rows}}
        return 200, {"success": True, "message": "Success"}

    def _act(self, path: str, body: dict[str, Any]) -> str:
        """Change the state as SGLang does; returns why it refuses."""
        if path in ("/begin_weight_update", "/end_weight_update"):
            begins = path == "/begin_weight_update"
            if begins == self.in_session:
                return "a session is already open" if begins else "no session is open"
            self.in_session = begins
        elif path in ("/update_weights_from_distributed", "/update_weights_from_tensor"):
            if not self.in_session:
                return "must run between begin_weight_update() and end_weight_update()"
        elif path == "/flush_cache" and self.is_busy:
            return "requests are running"
        if body.get("flush_cache") and self.is_busy:
            return "weights were updated, but the cache was not flushed"
        if "weight_version" in body and not self.ignores_labels:
            self.version = body["weight_version"]
        return ""

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                is_admin = self.path not in ("/generate", "/model_info")
                key = fake.keys.admin_api_key if is_admin else fake.keys.api_key
                if key and self.headers["Authorization"] != f"Bearer {key}":
                    status, answer = 401, {"error": "Unauthorized"}
                else:
                    status, answer = fake.answer(self.path, json.loads(content or b"{}"))
                encoded = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _count(body: dict[str, Any]) -> list[tuple[int, int]]:
    return list(enumerate(body["input_ids"]))
