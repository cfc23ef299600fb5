"""A page that follows runs: a server on loopback, which reads a run again when its files change."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bapo_megatron.tools.report.page import as_json, page_data, render

_HOST = "127.0.0.1"
_WATCHED = ("metrics.jsonl", "starts.jsonl", "config.yaml", "rollouts", "tokens", "eval")


def serve(
    run_dirs: Sequence[Path], tokenizer: Path | None, port: int, say: Callable[[str], None]
) -> None:
    """Serve the page on 127.0.0.1 until the process is interrupted; ``say`` gets its address.

    Raises:
        ValueError: A run cannot be read at the start.
        OSError: The port is taken.
    """
    with _Server(run_dirs, tokenizer, port) as server:
        server.newest()
        say(f"{server.address} follows {len(run_dirs)} run(s); Ctrl-C ends it")
        server.serve_forever()


class _Server(ThreadingHTTPServer):
    """Holds the newest data of runs; they are read when asked for, once per change."""

    daemon_threads = True

    def __init__(self, run_dirs: Sequence[Path], tokenizer: Path | None, port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self._run_dirs, self._tokenizer = run_dirs, tokenizer
        self._lock = threading.Lock()
        self._stamp, self._data = "", dict[str, Any]()

    @property
    def address(self) -> str:
        return f"http://{_HOST}:{self.server_port}/"

    def newest(self) -> tuple[str, dict[str, Any]]:
        """Return a stamp of the runs' files and what the page shows of them.

        Raises what ``page_data`` does; a later call may succeed.
        """
        with self._lock:
            stamp = self._stamp_of_files()
            if stamp != self._stamp:
                self._data = page_data(self._run_dirs, self._tokenizer)
                self._stamp = stamp
            return self._stamp, self._data

    def _stamp_of_files(self) -> str:
        digest = hashlib.sha256()
        for path in (run_dir / name for run_dir in self._run_dirs for name in _WATCHED):
            if path.exists():
                status = path.stat()
                digest.update(f"{path} {status.st_mtime_ns} {status.st_size};".encode())
        return f'"{digest.hexdigest()[:32]}"'


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page at / and its data at /data.json."""

    server: _Server

    def do_GET(self) -> None:
        port = self.server.server_port
        # A name that another site's owner points at 127.0.0.1 would let that site read runs.
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", f"open {self.server.address}")
        elif self.path == "/":
            self._read(lambda data: render(data, follows=True), "text/html")
        elif self.path == "/data.json":
            self._read(as_json, "application/json")
        else:
            self._answer(404, "text/plain", "no such page")

    def _read(self, show: Callable[[dict[str, Any]], str], kind: str) -> None:
        try:
            stamp, data = self.server.newest()
            if self.headers.get("If-None-Match") == stamp:
                self._answer(304, kind, "", stamp)
            else:
                self._answer(200, kind, show(data), stamp)
        except (ValueError, OSError) as error:
            self._answer(503, "text/plain", str(error))

    def _answer(self, status: int, kind: str, text: str, stamp: str = "") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("ETag", stamp)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests of the page are no news."""
