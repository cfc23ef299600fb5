"""Rank 0's side of the collector, which owns the servers: starts it, calls it, ends it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import select
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bapo_megatron.data.dump import read_encoded
from bapo_megatron.evaluation.report import result_from_json
from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.processes import (
    child_environment,
    describe_exit,
    end_group,
    open_log,
    tail,
)
from bapo_megatron.rollout.sglang_server import START_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.types import EncodedBatch, EvalResult

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5
_RECEIVE_BYTES = 1 << 20
_CLOSE_GRACE_S = 5.0


class CollectorClient:
    """A ``RolloutSource`` on real servers; ``start`` it early, it gets ready in the background."""

    def __init__(
        self,
        config: RunConfig,
        *,
        on_progress: Callable[[str], None],
        for_training: bool = True,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            config: The run.
            on_progress: Takes lines for people while something is waited for.
            for_training: Whether batches will be collected; else only evaluations are, and neither
                the training prompts nor the temperature convention matter.
        """
        self._config = config
        self._on_progress = on_progress
        self._for_training = for_training
        self._log_path = config.run_dir / "logs" / "collector.log"
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._poll = select.poll()  # not select(): a trainer may have more than 1024 open files
        self._lines: deque[bytes] = deque()
        self._partial_line = bytearray()
        self._call_numbers = itertools.count(1)
        self._opening: int | None = None
        self._is_connected = False
        # Servers that it did not start may hold anything.
        self._start_version = None if config.rollout.servers else START_VERSION
        self._lacks_weights = self._start_version is None

    def start(self) -> None:
        """Start the collector, which starts the servers, and return at once."""
        assert self._process is None, "a collector is started once"
        atexit.register(self.close)
        self._socket, remote = socket.socketpair()
        self._poll.register(self._socket, select.POLLIN)
        with remote, open_log(self._log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bapo_megatron.rollout.collector", str(remote.fileno())],
                env=child_environment(),
                pass_fds=(remote.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._opening = self._send(
            "open",
            config=self._config.model_dump(mode="json"),
            for_training=self._for_training,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )

    def wait_ready(self) -> None:
        """Wait until prompts are loaded and every server answers by the trainer's convention.

        Raises:
            RolloutError: A data row is unreadable, a server does not start or answer, or its
                log-probs do not fit.
        """
        if self._is_connected:
            return
        self._wait_opened()
        self._call("connect", version=self._start_version)
        self._is_connected = True

    def collect(self, step: int) -> EncodedBatch | None:
        """Return the batch of ``step``; needs a weight sync before the first one."""
        self.wait_ready()
        written = self._call("collect", step=step)
        if "needs_weights" in written:
            return None
        path = Path(written["path"])
        batch = read_encoded(path)
        if not written["keep"]:
            path.unlink()
        return batch

    def sync_weights(self, model_dir: Path, version: int) -> None:
        """Load ``model_dir`` into every server as ``version``."""
        self.wait_ready()
        self._on_progress(f"loading weights version {version} into the servers")
        self._lacks_weights = True
        self._call("sync_weights", model_dir=str(model_dir.absolute()), version=version)
        self._lacks_weights = False

    def release_memory(self) -> None:
        """Have colocated servers give their memory away until weights are pushed."""
        self.wait_ready()
        self._call("release_memory")
        self._lacks_weights = True

    def call_weights(self, name: str, **arguments: Any) -> Callable[[], Any]:
        """Start a call of the collector's ``WeightService``; what is returned waits for it."""
        self.wait_ready()
        number = self._send(f"weights.{name}", **arguments)

        def answer() -> Any:
            result = self._wait_for(number)
            if name == "resume":  # the last call of every push
                self._lacks_weights = False
            return result

        return answer

    def ensure_weights(self) -> None:
        """Load ``model.path`` into servers of whose weights nothing is known."""
        self.wait_ready()
        if self._lacks_weights:
            self.sync_weights(self._config.model.path, START_VERSION)

    def evaluate(self, step: int) -> list[EvalResult] | None:
        """Score every evaluation set with the weights that were pushed.

        Every answer is kept in ``<run_dir>/eval``, under the step; before training: ``start``.

        Returns:
            None where no server holds the trainer's weights any more.
        """
        self.ensure_weights()
        moment = f"step_{step:06d}" if step >= 0 else "start"
        return self._evaluate(moment, weights=f"{moment} of {self._config.name}", resume=False)

    def evaluate_model(self, weights: str, *, resume: bool) -> list[EvalResult]:
        """Score every evaluation set with ``model.path``; nothing is trained.

        Args:
            weights: Names them, see ``evaluation.settings``.
            resume: Go on with the samples of an earlier process.
        """
        while True:
            self.ensure_weights()
            results = self._evaluate("", weights=weights, resume=resume)
            if results is not None:
                return results
            self._lacks_weights = True

    def _evaluate(self, moment: str, *, weights: str, resume: bool) -> list[EvalResult] | None:
        answer = self._call("evaluate", moment=moment, weights=weights, resume=resume)
        if "needs_weights" in answer:
            return None
        return [result_from_json(result) for result in answer["results"]]

    def state(self) -> dict[str, Any]:
        """Data position and unfinished samples."""
        self._wait_opened()
        state: dict[str, Any] = self._call("state")
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; works before the servers are ready.

        Raises:
            RolloutError: It does not fit data and settings, or a replay wrote it.
        """
        if not state:
            raise RolloutError(
                "the checkpoint was written by a replay and has no position in the training data; "
                "continue with replay, or start a new run with model.path set to its export"
            )
        self._wait_opened()
        self._call("restore", state=state)

    def close(self) -> None:
        """End the collector and its servers; safe to call twice, does nothing in a fork."""
        if os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.close)
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            end_group(self._process, _CLOSE_GRACE_S)
            self._process = None

    def _wait_opened(self) -> None:
        """Take the answer to ``open``, once."""
        assert self._process is not None, "start comes first"
        if self._opening is not None:
            number, self._opening = self._opening, None
            self._on_progress("reading the prompts")
            self._wait_for(number)

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._wait_for(self._send(name, **arguments))

    def _send(self, name: str, **arguments: Any) -> int:
        assert self._socket is not None, "start comes first"
        number = next(self._call_numbers)
        message = {"id": number, "call": name, "arguments": arguments}
        with contextlib.suppress(ConnectionError):  # reported by the wait for the answer
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        return number

    def _wait_for(self, number: int) -> Any:
        """Handle messages until call ``number`` is answered."""
        while True:
            message = self._receive()
            if message is None:
                continue
            if "progress" in message:
                self._on_progress(message["progress"])
            elif "warning" in message:
                _LOG.warning("%s", message["warning"])
            elif message["id"] == number:
                if "error" in message:
                    raise RolloutError(message["error"])
                return message["result"]

    def _receive(self) -> dict[str, Any] | None:
        """The next message, or none if there is none for a while.

        Raises:
            RolloutError: The collector died.
        """
        if not self._lines and self._poll.poll(_POLL_S * 1000):
            self._receive_chunk()
        if not self._lines:
            return None
        message: dict[str, Any] = json.loads(self._lines.popleft())
        return message

    def _receive_chunk(self) -> None:
        """Read what the socket has; a line of many megabytes is copied once."""
        assert self._socket is not None
        chunk = b""
        with contextlib.suppress(ConnectionError):
            chunk = self._socket.recv(_RECEIVE_BYTES)
        if not chunk:
            self._raise_collector_died()
        first, *others = chunk.split(b"\n")
        self._partial_line += first
        for part in others:
            self._lines.append(bytes(self._partial_line))
            self._partial_line = bytearray(part)

    def _raise_collector_died(self) -> None:
        assert self._process is not None
        try:
            how = describe_exit(self._process.wait(_CLOSE_GRACE_S))
        except subprocess.TimeoutExpired:
            how = "its connection closed"
        raise RolloutError(
            f"the collector process died ({how}); the last lines of {self._log_path} say why:\n"
            f"{tail(self._log_path)}"
        )
