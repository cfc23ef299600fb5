"""An HTTP server in a thread of the test, which fakes of SGLang answer for."""

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from bapo_megatron.engine.sglang.keys import ApiKeys

POLL_S = 0.01


class BrokenError(Exception):
    """The connection is to be closed here."""


@dataclass(kw_only=True)
class FakeServer:
    """Start it with ``with``; attributes may be changed while it runs."""

    keys: ApiKeys = field(default_factory=ApiKeys)
    """Those that calls need, if they are not empty."""
    certificate: Path | None = None
    """PEM file of its certificate and key; none: plain HTTP."""
    is_hanging: bool = False
    """Answer nothing, as a stopped process."""

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._port = 0
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.crash()

    def start(self) -> None:
        """Listen, at the same port after ``crash``."""
        self.is_hanging = self.is_down = False
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
        if self.is_down:
            return
        self.is_down, self.is_hanging = True, False
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

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | Iterator[Any]:
        """Status and content of an answer, or the events of a stream."""
        raise NotImplementedError

    def headers(self, path: str) -> dict[str, str]:
        return {}

    def wait_while_hanging(self) -> None:
        while self.is_hanging:
            time.sleep(POLL_S)


class _HttpServer(ThreadingHTTPServer):
    """Takes many connections at a time; the standard library's five would reset the others."""

    daemon_threads = True
    request_queue_size = 1024


class _Handler(BaseHTTPRequestHandler):
    """One connection; ``fake`` is set by a subclass for each server."""

    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def setup(self) -> None:
        super().setup()
        with self.fake._lock:
            self.fake._connections.add(self.connection)

    def finish(self) -> None:
        with self.fake._lock:
            self.fake._connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.fake.wait_while_hanging()
        is_generation, keys = self.path in ("/generate", "/model_info"), self.fake.keys
        key = keys.api_key if is_generation else keys.admin_api_key
        try:
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self._send_whole(401, {"error": "Unauthorized"})
                return
            answer = self.fake.handle(self.path, json.loads(content or b"{}"))
            if isinstance(answer, tuple):
                self._send_whole(*answer)
            else:
                self._send_stream(answer)
        except (BrokenError, OSError):
            self.close_connection = True

    def _send_whole(self, status: int, content: Any) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        for name, value in self.fake.headers(self.path).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def _send_stream(self, events: Iterator[Any]) -> None:
        first = next(events)  # before the status: a connection may break without any answer
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._send_event(first)
        for event in events:
            self._send_event(event)
        self._send_chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send_event(self, event: Any) -> None:
        text = json.dumps(event).replace("-Infinity", "null").replace("NaN", "null")
        self._send_chunk(f"data: {text}\n\n".encode())

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass
