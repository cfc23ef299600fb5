"""The sources of batches on rank 0: the collector's client, and the dumps of a replay."""

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.dump import dump_path, read_encoded
from bapo_megatron.engine.base import START_VERSION
from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.rollout import messages
from bapo_megatron.runtime import calls
from bapo_megatron.runtime.calls import Call, Caller
from bapo_megatron.runtime.processes import (
    child_environment,
    describe_exit,
    end_group,
    open_log,
    tail,
)
from bapo_megatron.types import EncodedBatch, EvalResult
from bapo_megatron.weight_sync.receive import LOAD, RESUME, Load

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5
_RECEIVE_BYTES = 1 << 20
_CLOSE_GRACE_S = 5.0
_MIN_RELEASED_BYTES = 10**8
"""Less than weights and cache of any model that needs a GPU."""


class CollectorClient:
    """Starts, calls and ends the collector: a ``RolloutSource`` on real servers.

    Its calls raise ``RolloutError`` with the line that the collector sent or, if it died, with the
    end of its log.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        on_progress: Callable[[str], None],
        for_training: bool = True,
        awaits_weights: bool = False,
        stopped: Callable[[], StoppedError | None] = lambda: None,
    ) -> None:
        """Prepare; nothing is started.

        With ``awaits_weights``, or with ``model.lora.path``, a weight sync comes first: the run's
        servers read no weights, or those of the base alone.
        Without ``for_training`` only evaluations run. ``stopped`` returns an error once the run is
        to stop: startup raises it, and ``collect`` and ``evaluate`` end at once.
        """
        self._config = config
        awaits_weights = awaits_weights or config.model.lora.path is not None
        self._request = messages.Open(
            config=config, for_training=for_training, awaits_weights=awaits_weights
        )
        self._on_progress = on_progress
        self._stopped = stopped
        self._log_path = config.run_dir / "logs" / "collector.log"
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._poll = select.poll()  # not select(): a trainer may have more than 1024 open files
        self._lines: deque[bytes] = deque()
        self._partial_line = b""
        self._call_numbers = itertools.count(1)
        self._opening: Callable[[], None] | None = None
        self._is_connected = False
        # The weights of external servers are unknown.
        self._lacks_weights = awaits_weights or not config.rollout.starts_servers

    def launch(self) -> None:
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
        self._opening = self.start(messages.OPEN, self._request)

    def wait_ready(self) -> None:
        if not self._is_connected:
            self._wait_opened()
            self._call(messages.CONNECT, None)
            self._is_connected = True

    def collect(self, step: int) -> EncodedBatch | None:
        self.wait_ready()
        path = self._call(messages.COLLECT, step)
        if path is None:
            return None
        batch = read_encoded(path)
        if not self._config.rollout.dump:
            path.unlink()
        return batch

    def sync_weights(self, model_dir: Path, version: int) -> None:
        """Load ``model_dir`` into every server as ``version``."""
        self.wait_ready()
        self._on_progress(f"loading weights version {version} into the servers")
        self._lacks_weights = True
        self._call(LOAD, Load(model_dir=model_dir.absolute(), version=version))
        self._call(RESUME, ())

    def release_memory(self) -> None:
        self.wait_ready()
        import torch  # late: the collector is started before anything waits for torch

        free_before, _ = torch.cuda.mem_get_info()
        self._call(messages.RELEASE_MEMORY, None)
        self._lacks_weights = True
        free_after, _ = torch.cuda.mem_get_info()
        if (released := free_after - free_before) < _MIN_RELEASED_BYTES:
            raise RolloutError(
                "rollout.colocated: after the servers released their memory, the free memory of "
                f"rank 0's GPU grew by only {released / 1e9:.2f} GB: torch_memory_saver is not "
                "active in them (its library needs libcudart, on LD_LIBRARY_PATH), or another "
                f"process took it; see {self._log_path.parent}, or set rollout.colocated=false"
            )

    @property
    def weights(self) -> Caller:
        """This client, a ``Caller``, once ``wait_ready`` has returned."""
        return self

    def start[RequestT, ResponseT](
        self, call: Call[RequestT, ResponseT], request: RequestT, /
    ) -> Callable[[], ResponseT]:
        assert self._socket is not None, "launch comes first"
        number = next(self._call_numbers)
        with contextlib.suppress(ConnectionError):  # reported by the wait for the answer
            self._socket.sendall(calls.encode(calls.Request(number, call.name, request)))

        def wait() -> ResponseT:
            response = calls.decode(call.response, self._wait_for(number, call))
            if call is RESUME:  # the last call of every weight sync
                self._lacks_weights = False
            return response

        return wait

    def ensure_weights(self) -> None:
        """Load the model's weights into servers whose weights are unknown."""
        self.wait_ready()
        if self._lacks_weights:
            self.load_weights()

    def load_weights(self) -> None:
        """Load ``model.path``, or its adapter ``model.lora.path``, into every server."""
        model = self._config.model
        self.sync_weights(model.lora.path or model.path, START_VERSION)

    def evaluate(self, step: int, *, resume: bool = False) -> list[EvalResult] | None:
        """See ``RolloutSource``; samples are kept in ``<run_dir>/eval``, named by step."""
        self.ensure_weights()
        return self._call(messages.EVALUATE, self._evaluation_of(step, resume=resume))

    def begin_evaluation(self, step: int) -> None:
        self.ensure_weights()
        self._call(messages.BEGIN_EVALUATION, self._evaluation_of(step))

    def _evaluation_of(self, step: int, *, resume: bool = False) -> messages.Evaluate:
        moment = f"step_{step:06d}" if step else "start"
        weights = f"{moment} of {self._config.name}"
        return messages.Evaluate(moment=moment, weights=weights, resume=resume)

    def evaluate_model(self, weights: str, *, resume: bool) -> list[EvalResult]:
        """Score every evaluation set with the model's weights, which ``weights`` names."""
        self.ensure_weights()
        request = messages.Evaluate(moment="", weights=weights, resume=resume)
        while (results := self._call(messages.EVALUATE, request)) is None:
            self.load_weights()
        return results

    def save(self, path: Path) -> Callable[[], None]:
        self._wait_opened()
        self._call(messages.SAVE, path.absolute())

        def wait() -> None:
            if error := self._call(messages.SAVED, None):
                raise OSError(error)

        return wait

    def restore(self, path: Path) -> None:
        """See ``RolloutSource``; works before the servers are ready."""
        if not path.is_file():
            raise RolloutError(
                "the checkpoint was written by a replay and has no position in the training data; "
                "continue with replay, or start a new run with model.path set to its export"
            )
        self._wait_opened()
        self._call(messages.RESTORE, path.absolute())

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
        assert self._process is not None, "launch comes first"
        if self._opening is not None:
            wait, self._opening = self._opening, None
            self._on_progress("reading the prompts")
            wait()

    def _call[RequestT, ResponseT](
        self, call: Call[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        return self.start(call, request)()

    def _wait_for(self, number: int, call: Call[Any, Any]) -> Any:
        """Handle messages until call ``number`` is answered."""
        is_interrupted = False
        while True:
            while not self._lines:  # between polls, Python handles signals that another thread got
                is_interrupted = is_interrupted or self._interrupts(call)
                if self._poll.poll(_POLL_S * 1000):
                    self._receive()
            match calls.decode(calls.Reply, json.loads(self._lines.popleft())):
                case calls.Progress(progress):
                    self._on_progress(progress)
                case calls.Notice(warning):
                    _LOG.warning("%s", warning)
                case calls.Failure(id=id_, error=error) if id_ == number:
                    raise RolloutError(error)
                case calls.Result(id=id_, result=result) if id_ == number:
                    return result

    def _interrupts(self, call: Call[Any, Any]) -> bool:
        """Interrupt a long call if the run is to stop; return whether it is to stop."""
        if (error := self._stopped()) is None:
            return False
        if call in (messages.OPEN, messages.CONNECT):
            raise error
        if call in (messages.COLLECT, messages.EVALUATE):
            self.start(messages.INTERRUPT, None)
        return True

    def _receive(self) -> None:
        assert self._socket is not None
        chunk = b""
        with contextlib.suppress(ConnectionError):
            chunk = self._socket.recv(_RECEIVE_BYTES)
        if not chunk:
            raise self._collector_died()
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        self._lines.extend(lines)

    def _collector_died(self) -> RolloutError:
        assert self._process is not None
        try:
            how = describe_exit(self._process.wait(_CLOSE_GRACE_S))
        except subprocess.TimeoutExpired:
            how = "its connection closed"
        return RolloutError(
            f"the collector process died ({how}); the last lines of {self._log_path} say why:\n"
            f"{tail(self._log_path)}"
        )


@dataclass
class ReplaySource:
    """A ``RolloutSource`` without servers, which reads the dumps of an earlier run."""

    directory: Path
    """Its ``<run_dir>/rollouts``."""

    weights: ClassVar[None] = None
    """There are no servers."""

    def wait_ready(self, *_: Any, **__: Any) -> None:
        """Do nothing, as all calls that are only about servers."""

    release_memory = begin_evaluation = restore = close = wait_ready

    def collect(self, step: int) -> EncodedBatch:
        """Read the dump of ``step``; a ``RolloutError`` if there is none."""
        path = dump_path(self.directory, step)
        if not path.is_file():
            present = sorted(self.directory.glob("step_*.parquet"))
            names = f"from {present[0].name} to {present[-1].name}" if present else "none"
            raise RolloutError(
                f"{path}: no dump of this step (there are: {names}); set train.steps to the number "
                "of dumps, or copy the missing file"
            )
        return read_encoded(path)

    def evaluate(self, step: int, *, resume: bool = False) -> list[EvalResult]:
        """Return no results: there are no servers."""
        return []

    def save(self, path: Path) -> Callable[[], None]:
        """Write nothing: the step number alone selects a dump."""
        return lambda: None
