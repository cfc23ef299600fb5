"""A server as far as weights and memory are concerned: SGLang's rules, and failures on request."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.fake_server import BrokenError, FakeServer
from tests.fakes.fake_sglang import INFO

LOGPROB = -1.5
"""Log-prob of every input token but the first."""
MEMORY = {"kv_cache", "cuda_graph", "weights"}


@dataclass
class FakeWeightServer(FakeServer):
    """Start it with ``with``; attributes may be changed while it runs."""

    tensor_ranks: int = 1
    version: str = "0"
    in_session: bool = False
    is_busy: bool = False
    """Requests are running, whatever is aborted: their cache cannot be flushed."""
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
    memory: set[str] = field(default_factory=lambda: set(MEMORY))
    """What it holds."""
    is_paused: bool = False

    def start(self) -> None:
        self._closing = threading.Event()
        super().start()

    def crash(self) -> None:
        self._closing.set()
        super().crash()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {**INFO, "tp_size": self.tensor_ranks}
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        self.calls.append((path, body))
        if path in self.hanging:
            self._closing.wait()
        if path.startswith("/update_weights"):
            time.sleep(self.delay_s)
        if error := self.refusals.get(path) or self._act(path, body):
            return 400, {"success": False, "message": error}
        if path == "/generate":
            first, *others = body["input_ids"]
            rows = [[None, first, None], *([self.logprob, token, None] for token in others)]
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
        elif path.startswith("/flush_cache") and self.is_busy:
            return "requests are running"
        else:
            self._move_memory(path, body)
        if body.get("flush_cache") and self.is_busy:
            return "weights were updated, but the cache was not flushed"
        if "weight_version" in body and not self.ignores_labels:
            self.version = body["weight_version"]
        return ""

    def _move_memory(self, path: str, body: dict[str, Any]) -> None:
        """Die of what SGLang dies of."""
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation" and body == {"mode": "abort"}
        elif path == "/release_memory_occupation":
            if self.is_busy or not self.is_paused:
                raise BrokenError
            self.memory -= set(body["tags"])
        elif path == "/resume_memory_occupation":
            if self.memory & set(body["tags"]):
                raise BrokenError
            self.memory |= set(body["tags"])
