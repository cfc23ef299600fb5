"""As much of the Hugging Face Hub as it takes to download a data set of jsonl files."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from typing import Any, Self

_COMMIT = "a" * 40


class FakeHub:
    """Serves data sets: ``{"owner/name": {"data/train.jsonl": rows}}``."""

    def __init__(self, repositories: dict[str, dict[str, list[Any]]]) -> None:
        self._repositories = {
            name: {
                path: "".join(json.dumps(row) + "\n" for row in rows).encode()
                for path, rows in files.items()
            }
            for name, files in repositories.items()
        }

    def __enter__(self) -> Self:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub._answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.do_GET()

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        missing = 404, {"X-Error-Code": "RepoNotFound"}, b""
        for name, files in self._repositories.items():
            if path.startswith(f"/api/datasets/{name}"):
                return 200, {"Content-Type": "application/json"}, self._about(name, files, path)
            prefix = f"/datasets/{name}/resolve/"
            if path.startswith(prefix):
                content = files.get(path.removeprefix(prefix).partition("/")[2])
                if content is None:
                    return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT}, b""
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                return 200, {"ETag": etag, "X-Repo-Commit": _COMMIT}, content
        return missing

    @staticmethod
    def _about(name: str, files: dict[str, bytes], path: str) -> bytes:
        if "/tree/" in path or "/paths-info/" in path:
            listed: Any = [
                {
                    "type": "file",
                    "path": file,
                    "oid": hashlib.sha1(content).hexdigest(),
                    "size": len(content),
                }
                for file, content in files.items()
            ]
        else:
            listed = {
                "id": name,
                "sha": _COMMIT,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": file} for file in files],
            }
        return json.dumps(listed).encode()
