"""A reward service: scores batches of responses over HTTP.

python examples/rewards/service.py 8700

reward:
  functions:
    - {name: sections, url: "http://127.0.0.1:8700/score"}
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(item: dict[str, Any]) -> dict[str, float]:
    """Half a point for a conclusion, half for being no longer than 2,000 tokens."""
    has_conclusion = "Therefore" in item["response"]
    is_short = item["sample"]["num_tokens"] <= 2000
    return {"reward": 0.5 * has_conclusion + 0.5 * is_short, "conclusion": float(has_conclusion)}


class Handler(BaseHTTPRequestHandler):
    """Answers a JSON list of responses with a JSON list of results."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Score one batch."""
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps([score(item) for item in batch]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"scoring at http://127.0.0.1:{server.server_port}/score", flush=True)
    server.serve_forever()
