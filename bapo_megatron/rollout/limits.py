"""What one collector process can carry: open files, garbage, logs, the lag of its event loop."""

import asyncio
import contextlib
import gc
import os
import resource
from pathlib import Path

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.errors import RolloutError

_INTERVAL_S = 0.1
_GARBAGE_THRESHOLDS = (50_000, 50, 50)
_MAX_LOG_BYTES = 64 << 20
_LOG_INTERVAL_S = 1.0
_OTHER_FILES = 256
"""Open files beside the connections of requests: logs, graders, control calls."""


def raise_file_limit() -> None:
    """Allow this process as many open files as the system does: a request needs a connection."""
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))


def check_files(rollout: RolloutConfig) -> None:
    """Refuse more requests in flight than this process may have connections.

    Raises:
        RolloutError: It may open too few files.
    """
    num_batches = rollout.num_rounds + rollout.steps_ahead
    num_groups = rollout.groups_per_step * num_batches + rollout.oversample_groups
    num_samples = num_groups * rollout.samples_per_group
    needed = _OTHER_FILES + min(rollout.max_connections or num_samples, num_samples)
    available, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed > available:
        raise RolloutError(
            f"rollout.max_connections: a connection per request needs {needed} open files, got a "
            f"limit of {available} (ulimit -Hn); raise it, or set rollout.max_connections to at "
            f"most {max(available - _OTHER_FILES, 1)}"
        )


def collect_garbage_rarely() -> None:
    """Keep garbage collection out of the event loop; call ``gc.collect`` between batches.

    SGLang answers with nested lists. By Python's default thresholds they trigger full collections
    again and again, with 8,192 requests in flight up to 1.5 s each: the loop was 9 s late
    (docs/benchmarks/connections_cpu_202611.md).
    """
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)


async def limit_logs(directory: Path) -> None:
    """Keep the logs in a directory below a size, for ever: a user's function may print a lot.

    What is cut is in ``<name>.log.1`` until the next time. Whoever writes must append, as with
    ``processes.open_log``, and may lose what comes during a cut.
    """
    while True:
        with contextlib.suppress(OSError):  # the next time comes
            for path in directory.glob("*.log"):
                if (num_bytes := path.stat().st_size) > _MAX_LOG_BYTES:
                    await asyncio.to_thread(_cut_log, path, num_bytes)
        await asyncio.sleep(_LOG_INTERVAL_S)


def _cut_log(path: Path, num_bytes: int) -> None:
    kept = path.with_name(f"{path.name}.1")
    try:
        with path.open("rb") as log, kept.open("wb") as copy:
            os.sendfile(copy.fileno(), log.fileno(), 0, num_bytes)
        where = f"is in {kept.name}"
    except OSError as error:  # a full disk needs the cut more than anything
        kept.unlink(missing_ok=True)
        where = f"could not be kept ({error.strerror})"
    os.truncate(path, 0)
    with path.open("a") as log_end:
        log_end.write(f"--- longer than {_MAX_LOG_BYTES >> 20} MB; what was before {where}\n")


class LoopLag:
    """How late the running event loop runs what is due: the sign that it has too much to do."""

    def __init__(self) -> None:
        self._max_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure from now on; do nothing if that was begun already."""
        if self._timer is None:
            self._schedule()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()

    def take_max(self) -> float:
        """Return the largest lag since the last call, in seconds."""
        max_s, self._max_s = self._max_s, 0.0
        return max_s

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._measure)

    def _measure(self) -> None:
        assert self._timer is not None
        self._max_s = max(self._max_s, asyncio.get_running_loop().time() - self._timer.when())
        self._schedule()
