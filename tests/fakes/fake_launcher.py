"""Stands in for SGLang's launcher: a process that answers /ready and ends when its owner does.

What it does is read from the file in its argument ``--fate=FILE`` each time it starts: ``serve``,
``exit`` with status 3 at once, or ``load`` for ever without ever getting ready. ``stuck`` takes
effect also while it runs: what a scheduler would answer gets no answer. Several words are those of
several servers: each takes the one that its seed counts to. Like SGLang, it maps a file in /dev/shm
whose name has its process id; like the launcher, it removes it when its owner is gone.
"""

import argparse
import json
import mmap
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def shared_file(pid: int) -> Path:
    """The file of the process with this id."""
    return Path(f"/dev/shm/sglang_loads_fake_{pid}.shm")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fate", type=Path)
    parser.add_argument("--random-seed", type=int)
    options, _ = parser.parse_known_args(arguments)
    keys = json.loads(sys.stdin.readline())["keys"]
    fates = options.fate.read_text().split()
    fate = fates[options.random_seed % len(fates)]
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

    with shared_file(os.getpid()).open("wb+") as shared:
        shared.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(shared.fileno(), mmap.PAGESIZE)
    http = ThreadingHTTPServer((options.host, options.port), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the owner is gone
    mapped.close()
    shared_file(os.getpid()).unlink()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
