"""Stands in for SGLang's launcher: a process that answers /ready and ends when its owner does.

What it does is read from the file in its argument ``--fate=FILE`` each time it starts: ``serve``,
``exit`` with status 3 at once, or ``load`` for ever without ever getting ready. ``stuck`` takes
effect also while it runs: what a scheduler would answer gets no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fate", type=Path)
    options, _ = parser.parse_known_args(arguments)
    keys = json.loads(sys.stdin.readline())
    fate = options.fate.read_text().strip()
    sys.stdout.write(f"fate: {fate}; an api key: {bool(keys['api_key'])}\n")
    sys.stdout.flush()
    if fate == "exit":
        sys.exit(3)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while self.path == "/server_info" and options.fate.read_text() == "stuck":
                time.sleep(0.05)
            self.send_response(503 if fate == "load" else 200)
            self.end_headers()
            self.wfile.write(keys["admin_api_key"].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer((options.host, options.port), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the owner is gone
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
