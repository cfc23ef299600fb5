"""A deterministic server with SGLang's interface, for failures that a real one cannot be given.

The token at position p of a sequence is p + 100, whatever came before; a response ends where its
prompt says: at position ``stop_at`` (end of sequence) or after ``max_new_tokens``. The log-prob of
token t at temperature T is that of the fixed logits ``LOGITS_V`` at index t mod V.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np

V = 32
LOGITS_V = 3 * np.sin(np.arange(V))


def token_at(position: int) -> int:
    """The token that the server samples at a position of the whole sequence."""
    return position + 100


def logprob_of(token_id: int, temperature: float, logits_V: np.ndarray = LOGITS_V) -> float:
    """log_softmax(logits / T) of a token."""
    scaled_V = logits_V / temperature
    return float(scaled_V[token_id % V] - np.log(np.exp(scaled_V).sum()))


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
    api_key: str = ""
    """Wanted for every call, if not empty."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Replaces fields of ``meta_info`` in answers."""
    ignores_updates: bool = False
    """Accept new weights, but keep the version."""
    version: str = "0"
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Every body that /generate got."""
    most_concurrent: int = 0

    def __enter__(self) -> Self:
        self._aborted: set[str] = set()
        self._concurrent = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one call; none closes the connection."""
        if path == "/model_info":
            return {"weight_version": self.version}
        if path == "/abort_request":
            self._aborted.add(body["rid"])
            return {}
        if path == "/update_weights_from_disk":
            self.version = self.version if self.ignores_updates else body["weight_version"]
            return {"success": True}
        assert path == "/generate", path
        with self._lock:
            self.requests.append(body)
            if self.connections_to_drop > 0:
                self.connections_to_drop -= 1
                return None
            self._concurrent += 1
            self.most_concurrent = max(self.most_concurrent, self._concurrent)
        try:
            return self._generate(body)
        finally:
            with self._lock:
                self._concurrent -= 1

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        version = self.version
        sampling = body["sampling_params"]
        temperature = 1.0 if self.ignores_temperature else sampling["temperature"]
        start, output_ids, finish = len(body["input_ids"]), [], "length"
        while len(output_ids) < sampling["max_new_tokens"]:
            if body["rid"] in self._aborted:
                finish = "abort"
                break
            if len(output_ids) == self.stalls.get(start):
                time.sleep(0.01)
                continue
            time.sleep(self.token_interval_s)
            output_ids.append(token_at(start + len(output_ids)))
            if self.stop_at is not None and start + len(output_ids) > self.stop_at:
                finish = "stop"
                break

        def row(token_id: int) -> list[Any]:
            return [logprob_of(token_id, temperature, self.logits_V), token_id, None]

        meta = {
            "finish_reason": {"type": finish},
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(output_ids)}],
        }
        if body["return_logprob"]:
            meta["output_token_logprobs"] = [row(token_id) for token_id in output_ids]
        if body.get("top_logprobs_num"):
            best = np.argsort(-self.logits_V)[: body["top_logprobs_num"]]
            meta["output_top_logprobs"] = [[row(int(token_id)) for token_id in best]]
        if body.get("token_ids_logprob"):
            meta["output_token_ids_logprobs"] = [[row(t) for t in body["token_ids_logprob"]]]
        return {"output_ids": output_ids, "meta_info": {**meta, **self.changes}}

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = 200, None
                if fake.api_key and self.headers["Authorization"] != f"Bearer {fake.api_key}":
                    status, answer = 401, {"error": "Unauthorized"}
                else:
                    answer = fake.answer(self.path, json.loads(content or b"{}"))
                if answer is None:
                    self.close_connection = True
                    return
                encoded = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
