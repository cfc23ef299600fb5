"""An SGLang server that this process starts, watches and ends.

The server runs ``sglang_launcher`` in a session of its own, on the loopback interface. It ends with
``close``, at exit of the interpreter, or by itself when this process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

import httpx

from bapo_megatron.rollout.base import RolloutError
from bapo_megatron.rollout.processes import (
    child_environment,
    describe_exit,
    end_group,
    open_log,
    tail,
)
from bapo_megatron.rollout.sglang_client import ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.schema import ServerConfig

HOST = "127.0.0.1"
START_VERSION = 0
"""Weights version that a fresh server reports: the weights of ``model.path``."""

_POLL_S = 0.2
# Left to itself the server takes its memory fraction of the machine's free memory, in which the
# trainer lives as well, and is ended by the kernel.
_CPU_MAX_TOTAL_TOKENS = 65536
_CPU_ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--grammar-backend=none",
)


class SglangServer:
    """One server process group; use it as a context manager, or call ``close``."""

    def __init__(
        self,
        model: ModelConfig,
        server: ServerConfig,
        *,
        run_dir: Path,
        seed: int,
        device: str,
    ) -> None:
        """Prepare the server; ``start`` starts it.

        Args:
            model: The model that it loads first, and its dtype.
            server: Port, memory and further arguments.
            run_dir: The log goes to ``<run_dir>/logs/sglang.log``.
            seed: Seed of its sampler.
            device: ``cuda`` or ``cpu``.
        """
        self._model = model
        self._config = server
        self._seed = seed
        self._device = device
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self.log_path = run_dir / "logs" / "sglang.log"
        self.keys = ApiKeys(api_key=secrets.token_hex(16), admin_api_key=secrets.token_hex(16))
        self.port = server.port

    @property
    def address(self) -> str:
        """The server's ``http://host:port``."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and return at once; ``wait_ready`` waits until it answers.

        Raises:
            RolloutError: The port is in use.
        """
        assert self._process is None, "a server is started once"
        self.port = _claim_port(self._config.port)
        atexit.register(self.close)
        with open_log(self.log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bapo_megatron.rollout.sglang_launcher", *self.arguments()],
                env={**child_environment(), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already; ensure_alive says why
            keys = {"api_key": self.keys.api_key, "admin_api_key": self.keys.admin_api_key}
            self._process.stdin.write(json.dumps(keys).encode() + b"\n")
            self._process.stdin.flush()

    def arguments(self) -> list[str]:
        """Arguments of ``sglang.launch_server``; the API keys are not among them."""
        server = self._config
        arguments = [
            f"--model-path={self._model.path}",
            f"--host={HOST}",
            f"--port={self.port}",
            f"--dtype={self._model.dtype}",
            f"--tensor-parallel-size={server.tensor}",
            f"--random-seed={self._seed}",
            f"--weight-version={START_VERSION}",
            f"--mem-fraction-static={server.mem_fraction}",
            "--skip-server-warmup",
            "--sleep-on-idle",
            "--log-level-http=warning",
        ]
        max_total_tokens = server.max_total_tokens
        if max_total_tokens is None and self._device == "cpu":
            max_total_tokens = _CPU_MAX_TOTAL_TOKENS
        if max_total_tokens is not None:
            arguments.append(f"--max-total-tokens={max_total_tokens}")
        if server.max_running_requests is not None:
            arguments.append(f"--max-running-requests={server.max_running_requests}")
        if self._device == "cpu":
            arguments.extend(_CPU_ARGUMENTS)
        return [*arguments, *server.extra_args]

    def wait_ready(self, on_progress: Callable[[str], None]) -> None:
        """Wait until the server takes requests.

        Args:
            on_progress: Called about five times a second with a line for people.

        Raises:
            RolloutError: It died, or took longer than ``rollout.server.start_timeout_s``.
        """
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while not self._answers(client):
                self.ensure_alive()
                waited_s = time.monotonic() - self._started_s
                if waited_s > self._config.start_timeout_s:
                    raise RolloutError(
                        f"the SGLang server at {self.address} did not answer within "
                        f"{self._config.start_timeout_s:g} s; raise rollout.server."
                        f"start_timeout_s, or see {self.log_path}:\n{tail(self.log_path)}"
                    )
                on_progress(f"starting the SGLang server: {waited_s:.0f} s")
                time.sleep(_POLL_S)

    def ensure_alive(self) -> None:
        """Do nothing while the server runs.

        Raises:
            RolloutError: It died; the message holds the last lines of its log.
        """
        assert self._process is not None, "the server was not started"
        status = self._process.poll()
        if status is None:
            return
        raise RolloutError(
            f"the SGLang server at {self.address} died ({describe_exit(status)}); the last lines "
            f"of {self.log_path} say why:\n{tail(self.log_path)}"
        )

    def close(self) -> None:
        """End the process group and wait for it; safe to call twice, does nothing in a fork."""
        if self._process is None or os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.close)
        end_group(self._process)  # at once, as sglang ends its own children: it has no state
        self._process = None

    def _answers(self, client: httpx.Client) -> bool:
        """Whether requests are taken; /health would generate a token for each question."""
        try:
            reply = client.get(f"{self.address}/ready", headers=self.keys.headers(admin=False))
        except httpx.TransportError:
            return False
        return reply.status_code == httpx.codes.OK


def _claim_port(port: int) -> int:
    """A free port for 0, else ``port`` itself, after a check that it can be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RolloutError(
                f"rollout.server.port: cannot listen on {HOST}:{port} ({error.strerror}: the port "
                "is in use, or not allowed); end what uses it, or set rollout.server.port=0"
            ) from error
        bound: int = probe.getsockname()[1]
        return bound
