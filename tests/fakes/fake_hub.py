"""As much of the Hugging Face Hub as it takes to list and download models and data sets."""

import hashlib
import http.server
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any, Self

COMMIT = "a" * 40
_LARGE = 1 << 10
"""Bytes of a file from which on the Hub keeps it in LFS, and knows its SHA-256."""

Files = dict[str, bytes]
"""Content by path."""


def as_jsonl(rows: list[Any]) -> bytes:
    """A file of rows."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class FakeHub:
    """Serves repositories, by kind and id; attributes may be changed while it runs."""

    datasets: dict[str, Files] = field(default_factory=dict)
    models: dict[str, Files] = field(default_factory=dict)
    others: Files = field(default_factory=dict)
    """Files at other addresses, by path."""
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    """Commit by branch or tag."""
    stall_after: int | None = None
    """Send only so many bytes of a large file, and then nothing, while the server runs."""
    damaged: set[str] = field(default_factory=set)
    """Files whose first byte arrives as another one."""
    downloads: list[tuple[str, int]] = field(default_factory=list)
    """Path within the repository, and first byte, of every file that was sent."""

    def __enter__(self) -> Self:
        hub = self
        self._closing = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub._answer(self.path.partition("?")[0])
                is_file = status == 200 and "ETag" in headers and self.command != "HEAD"
                if is_file and (
                    found := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
                ):
                    first, status = int(found[1]), 206
                    headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
                else:
                    first = 0
                if is_file:
                    hub.downloads.append((headers.pop("X-Path"), first))
                self.send_response(status)
                body = body[first:]
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if is_file and hub.stall_after is not None and len(body) >= _LARGE:
                    self.wfile.write(body[: hub.stall_after])
                    hub._closing.wait()
                    self.close_connection = True
                else:
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
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if (content := self.others.get(path)) is not None:
            return 200, {"ETag": '"x"', "X-Path": path}, content
        for prefix, repositories in (("datasets/", self.datasets), ("", self.models)):
            for name, files in repositories.items():
                api = f"/api/{prefix or 'models/'}{name}"
                if path == api or path.startswith(f"{api}/"):
                    return self._about(name, files, path.removeprefix(api))
                resolve = f"/{prefix}{name}/resolve/"
                if path.startswith(resolve):
                    revision, _, file = path.removeprefix(resolve).partition("/")
                    return self._file(files, revision, file)
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _file(self, files: Files, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        headers = {"X-Repo-Commit": self.commits.get(revision, revision)}
        if path not in files:
            return 404, {"X-Error-Code": "EntryNotFound", **headers}, b""
        content = files[path]
        headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Path": path}
        if path in self.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        return 200, headers, content

    def _about(self, name: str, files: Files, rest: str) -> tuple[int, dict[str, str], bytes]:
        revision = found[1] if (found := re.fullmatch(r"/revision/(.+)", rest)) else "main"
        if revision not in self.commits and revision not in self.commits.values():
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        listed: Any
        if "/tree/" in rest or "/paths-info/" in rest:
            listed = [
                {"type": "file", "path": path, "oid": _git_sha1(content), "size": len(content)}
                for path, content in files.items()
            ]
        else:
            listed = {
                "id": name,
                "sha": self.commits.get(revision, revision),
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [_sibling(path, content) for path, content in files.items()],
            }
        return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    entry = {"rfilename": path, "size": len(content), "blobId": _git_sha1(content)}
    if len(content) >= _LARGE:
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return entry


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
