"""The SGLang servers of a run or of the ``serve`` command, and their processes.

A server process runs ``launcher`` in its own session. It ends with ``close``, at interpreter exit,
or by itself when this process is gone. ``supervisor`` watches and restarts it.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.base import NO_WEIGHTS, START_VERSION, Engine, Readiness
from bapo_megatron.engine.sglang import SHARED_FILES
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys, check_key
from bapo_megatron.engine.sglang.settings import (
    ALGORITHMS,
    LORA_TARGETS,
    SERVERS_KEY,
    server_addresses,
)
from bapo_megatron.engine.supervisor import ServerSupervisor
from bapo_megatron.errors import RolloutError, ServerGoneError
from bapo_megatron.runtime.processes import (
    PrivateDirectory,
    child_environment,
    describe_exit,
    end_group,
    open_log,
    run_async,
    shared_files,
    unlink_shared_files,
)
from bapo_megatron.telemetry.console import ProgressLine

_LOG = logging.getLogger(__name__)

LAUNCHER = "bapo_megatron.engine.sglang.launcher"
"""The module that a server process runs."""
LOOPBACK = "127.0.0.1"
"""Where the trainer's own servers listen."""

_NUM_SEEDS = 1 << 32
# By default the server takes its memory fraction of the machine's free memory, which the trainer
# needs too, and the kernel kills it.
_CPU_MAX_TOTAL_TOKENS = 65536
_CPU_MEM_FRACTION = 0.95
_CPU_ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--grammar-backend=none",
)


@dataclass(eq=False)
class SglangServer:
    """An ``EngineServer``: the process group of one server."""

    config: RunConfig
    """The server loads its ``model`` first, and logs to its ``run_dir``."""
    device: str
    """``cuda`` or ``cpu``."""
    keys: ApiKeys
    """Keys that the server requires."""
    index: int = 0
    """Index among the servers of this host: determines GPUs, port and log."""
    host: str = LOOPBACK
    """Address to listen on."""
    awaits_weights: bool = False
    """Whether it starts without weights, because a weight sync comes first."""

    def __post_init__(self) -> None:
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._port_holder: socket.socket | None = None
        self._scratch: PrivateDirectory | None = None
        """For its temporary files and sockets."""
        self._closing = threading.Lock()
        self._shared_files: set[Path] = set()
        """Collected until it is ready; after its processes exit, they cannot be identified."""
        self._has_all_shared_files = False
        self.num_starts = 0
        self._settings = self.config.rollout.server
        self._gets_adapters = self.awaits_weights and self.config.sends_adapters
        self.port = self._settings.port and self._settings.port + self.index
        # Rollout nodes may share the directory, so the address is part of the log's name.
        names = ["sglang"] if self.host == LOOPBACK else ["sglang", self.host]
        names += [str(self.index)] if self._settings.count > 1 else []
        self.log_path = self.config.run_dir / "logs" / f"{'_'.join(names)}.log"

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def name(self) -> str:
        return f"the SGLang server at {self.address}"

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPUs of its ranks, as this process numbers them; empty on the CPU."""
        num_ranks = self._settings.tensor
        first = self._settings.first_gpu + self.index * num_ranks
        return () if self.device == "cpu" else tuple(range(first, first + num_ranks))

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        assert self._process is None, "close comes first"
        self._port_holder = _hold_port(self.host, self.port)
        self.port = self._port_holder.getsockname()[1]
        atexit.register(self.close)
        self._scratch = PrivateDirectory()
        scratch = str(self._scratch.path)
        with open_log(self.log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", LAUNCHER, *self.arguments()],
                env={**self.environment(), "TMPDIR": scratch},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.num_starts += 1
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; see exit_reason
            line = json.dumps({"keys": asdict(self.keys), "scratch": scratch})
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def exit_reason(self) -> str | None:
        assert self._process is not None, "start comes first"
        status = self._process.poll()
        return None if status is None else describe_exit(status)

    async def ask(self, timeout_s: float) -> Readiness:
        """See ``EngineServer`` and ``keys.InfoAnswers``; /health would generate a token."""
        client = SglangClient(self.address, self.keys, request_timeout_s=timeout_s)
        readiness = Readiness.READY
        try:
            await client.call("/server_info")
        except ServerGoneError:
            readiness = Readiness.SILENT
        except RolloutError:
            readiness = Readiness.BUSY
        finally:
            await client.close()
        if not self._has_all_shared_files and self._process is not None:
            self._shared_files |= await asyncio.to_thread(
                shared_files, self._process.pid, SHARED_FILES
            )
            self._has_all_shared_files = readiness is Readiness.READY
            if self._scratch is not None:
                self._scratch.note_shared_files(self._shared_files)
        return readiness

    def kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            unlink_shared_files(process.pid, SHARED_FILES)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """See ``EngineServer``; thread-safe, and does nothing in a fork."""
        if os.getpid() != self._owner_pid:
            return
        with self._closing:
            if self._port_holder is not None:
                self._port_holder.close()
            if self._process is not None:
                atexit.unregister(self.close)
                unlink_shared_files(self._process.pid, SHARED_FILES, self._shared_files)
                self._shared_files, self._has_all_shared_files = set(), False
                end_group(self._process)  # no grace: it has no state
                self._process = None
            if self._scratch is not None:
                self._scratch.close()

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        environment = {**child_environment(), "HF_HUB_OFFLINE": "1"}
        # Importance ratios need log_softmax(logits / T) of sampled tokens: not log_softmax(logits),
        # nor tokens accepted at random.
        for name in ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_SIMULATE_ACC_LEN"):
            environment.pop(name, None)
        if self.device == "cpu":
            # With a thread per core, steps of a small model are several times slower.
            environment.setdefault("OMP_NUM_THREADS", "1")
        if self.host == LOOPBACK:
            # All members of its groups are on this host.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.config.rollout.colocated:
            # The memory saver refuses the trainer's expandable segments.
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                environment.pop(name, None)
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        return environment

    def arguments(self) -> list[str]:
        """Return the arguments of ``sglang.launch_server``; the API keys are not among them."""
        server, model, is_cpu = self._settings, self.config.model, self.device == "cpu"
        # The seed differs between the servers of all hosts and is the same in every run.
        host_seed = 0 if self.host == LOOPBACK else zlib.crc32(self.host.encode())
        seed = (self.config.seed + self.index + host_seed) % _NUM_SEEDS
        arguments = [
            f"--model-path={model.path}",
            "--served-model-name=policy",  # the default is the path, which must not contain a colon
            f"--host={self.host}",
            f"--port={self.port}",
            f"--dtype={model.dtype}",
            f"--tensor-parallel-size={server.tensor}",
            f"--random-seed={seed}",
            f"--weight-version={NO_WEIGHTS if self.awaits_weights else START_VERSION}",
            # The cache of a CPU server has a fixed size, whatever else uses the memory.
            f"--mem-fraction-static={_CPU_MEM_FRACTION if is_cpu else server.mem_fraction}",
            "--incremental-streaming-output",  # else each piece repeats all earlier ones
            "--skip-server-warmup",
            "--sleep-on-idle",
            "--log-level-http=warning",
        ]
        limits = {
            "max-total-tokens": server.max_total_tokens or (_CPU_MAX_TOTAL_TOKENS if is_cpu else 0),
            "max-running-requests": server.max_running_requests,
        }
        arguments += [f"--{name}={limit}" for name, limit in limits.items() if limit]
        if is_cpu:
            arguments += _CPU_ARGUMENTS
        else:
            arguments.append(f"--base-gpu-id={self.gpus[0]}")
        if self.config.rollout.colocated:
            # Decode graphs can be released, piecewise prefill graphs cannot.
            arguments += ["--enable-memory-saver", "--cuda-graph-backend-prefill=disabled"]
        if server.quantization == "fp8":
            # Keeps what it needs to quantize new weights in place, which dummy weights would not.
            arguments += ["--quantization=fp8", "--load-format=flash_rl"]
        elif self.awaits_weights and not self._gets_adapters:
            arguments.append("--load-format=dummy")
        if (speculative := server.speculative).method != "none":
            arguments += [
                f"--speculative-algorithm={ALGORITHMS[speculative.method]}",
                # With the token before them.
                f"--speculative-num-draft-tokens={speculative.draft_tokens + 1}",
                f"--speculative-draft-model-path={speculative.draft_model or model.path}",
                "--speculative-draft-load-format=auto",
                f"--speculative-num-steps={speculative.draft_tokens}",
                "--speculative-eagle-topk=1",
            ]
        if self.config.algorithm.router_replay == "rollout":
            arguments.append("--enable-return-routed-experts")
        if self._gets_adapters:
            arguments += [
                "--enable-lora",
                f"--max-lora-rank={model.lora.rank}",
                "--max-loras-per-batch=2",  # one, and none
                "--lora-target-modules",
                *(model.lora.targets or LORA_TARGETS),
                *(["--lora-backend=torch_native"] if is_cpu else []),
            ]
        return [*arguments, *server.extra_args]


class SglangBackend:
    """A ``Backend`` of SGLang servers, the run's own or external ones."""

    def __init__(self, config: RunConfig, device: str, *, awaits_weights: bool) -> None:
        """Prepare the servers on ``cuda`` or ``cpu``; nothing is started."""
        self._config = config
        # A teacher, or servers for an evaluation, may speculate and quantize as they like.
        self._settings = config.rollout.server if awaits_weights else None
        has_adapters = awaits_weights and config.sends_adapters
        self._lora = config.model.lora if has_adapters else None
        self.servers: Sequence[SglangServer] = ()
        if config.rollout.starts_servers:
            self._keys = ApiKeys(secrets.token_hex(16), secrets.token_hex(16))
            self.servers = own_servers(config, device, self._keys, awaits_weights=awaits_weights)
        else:
            self._keys = ApiKeys.from_environment()

    def addresses(self) -> Sequence[str]:
        return server_addresses(self._config.rollout) or [s.address for s in self.servers]

    async def connect(self, address: str) -> Engine:
        return SglangClient(
            address,
            self._keys,
            request_timeout_s=self._config.rollout.request_timeout_s,
            model=self._config.model.path,
            gpus=next((s.gpus for s in self.servers if s.address == address), ()),
            returns_routes=self._config.algorithm.router_replay == "rollout",
            settings=self._settings,
            keeps_cache=self._config.rollout.weight_sync.in_flight == "in_place",
            lora=self._lora,
        )


def own_servers(
    config: RunConfig, device: str, keys: ApiKeys, host: str = LOOPBACK, *, awaits_weights: bool
) -> list[SglangServer]:
    """Prepare the ``rollout.server.count`` servers that listen on ``host``; nothing is started."""
    return [
        SglangServer(config, device, keys, index, host, awaits_weights)
        for index in range(config.rollout.server.count)
    ]


def serve(config: RunConfig, show: Callable[[str], None], key: str = SERVERS_KEY) -> None:
    """Run the ``serve`` command: keep ``rollout.server.count`` servers until this process is ended.

    An admin key that is not in the environment is created in ``<run_dir>/admin_api_key``; for
    servers beyond the loopback also an API key in ``<run_dir>/api_key``. ``show`` gets the lines
    for a trainer's environment and command once the servers are ready. ``key``: see ``EngineKind``.

    Raises:
        RolloutError: A server died before it was ever ready, or a port is in use.
        ValueError: A key in the environment or in ``run_dir`` is too short.
        OSError: ``run_dir`` cannot be written.
    """
    import torch  # not at the top: the collector imports this module

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("bapo_megatron").setLevel(logging.INFO)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    keys, exports, host = ApiKeys.from_environment(), [], config.rollout.server.host
    for name in ["admin_api_key"] if host == LOOPBACK else list(asdict(keys)):
        if not getattr(keys, name):
            path = config.run_dir.absolute() / name
            keys = replace(keys, **{name: _stored_key(path)})
            exports.append(f"export BAPO_MEGATRON_{name.upper()}=$(cat '{path}')")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Every user of ``rollout.servers``, a trainer, ``eval`` or ``generate``, syncs weights first.
    servers = own_servers(config, device, keys, host, awaits_weights=key == SERVERS_KEY)

    async def run() -> None:
        supervisor = ServerSupervisor(servers, config.rollout)
        try:
            supervisor.start()
            with ProgressLine() as progress:
                await supervisor.wait_ready(progress.update)
            _LOG.info("ready; for the trainer's environment and command:")
            for export in exports:
                show(export)
            show(f"'{key}=[{','.join(server.address for server in servers)}]'")
            await supervisor.watch()
        finally:
            await supervisor.close()

    run_async(run())


def _stored_key(path: Path) -> str:
    """Return the key in ``path``; if there is none, create one that only its owner can read."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        draft.touch(mode=0o600)
        try:
            draft.write_text(secrets.token_hex(16) + "\n")
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)  # complete, and never replaces another node's key
        finally:
            draft.unlink()
    key = path.read_text().strip()
    check_key(key, str(path), "delete the file: serve makes a new one")
    return key


def _hold_port(host: str, port: int) -> socket.socket:
    """Bind a socket to ``port``, or to a free one for 0, without listening.

    It reserves the port until the server has loaded its model and binds it, which Linux allows with
    ``SO_REUSEADDR`` on both sockets.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            holder = stack.enter_context(socket.socket(family))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            stack.pop_all()
            return holder
    except OSError as error:
        raise RolloutError(
            f"rollout.server: cannot listen on host {host}, port {port} ({error.strerror}); give "
            "an address of this node, and a free port or 0"
        ) from error
