"""When a run is to stop: after a signal to any of its ranks, at a time, before its job ends.

A rank only takes note; all ranks act on it together, at the safe points of ``Run``.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from bapo_megatron.config.schema import TrainConfig
from bapo_megatron.errors import StoppedError
from bapo_megatron.runtime.processes import end_once, launched_number

STOPPED_NAME = "stopped"
"""File of a run directory: the run was stopped and saved, and ``resume`` continues it."""

_INTERRUPTED = b"\nSaving and exiting; press Ctrl-C again after 5 s to quit without saving\n"
_BY_OTHER = "stopped by a signal to another rank"
SAME_SIGNAL_S = 5.0
"""Signals within this time count as one: torchrun and Slurm both forward the same one."""
_Handler = Callable[[int, FrameType | None], Any] | int | None
_SAVING = (signal.SIGTERM, signal.SIGUSR1)
_AT_ONCE = dict.fromkeys((*_SAVING, signal.SIGINT), signal.SIG_DFL)


class Stopping:
    """Whether this rank knows that the run is to stop."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._error: StoppedError | None = None
        self._signalled_s: float | None = None
        self.is_interrupted = False
        """Whether Ctrl-C stopped the run."""
        self._handlers: dict[signal.Signals, _Handler] = {}
        self._keeps_time = False
        self._stop_at_s = self._job_end_s = math.inf

    def listen(self, *, keeps_time: bool) -> None:
        """Note SIGTERM and SIGUSR1 and, on rank 0 (``keeps_time``), watch the clock from now on.

        Another rank notes nothing until it has joined: it has nothing to save, and torchrun waits
        for it if rank 0 has failed.
        """
        self._keeps_time = keeps_time
        if not keeps_time:
            self._install(_AT_ONCE)
            return
        self._install(dict.fromkeys(_SAVING, self._note))
        if self._config.stop_after is not None:
            self._stop_at_s = time.monotonic() + self._config.stop_after
        self._job_end_s = _job_end_s()

    def listen_to_interrupts(self) -> None:
        """Note Ctrl-C as well from now on; before, there is nothing to save, and it ends all."""
        self._install({signal.SIGINT: self._note})

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Let any signal end this process at once while it joins the other ranks, in C++.

        Raises:
            ValueError: A signal came before.
        """
        self._install(self._handlers)
        if not self._handlers or launched_number("WORLD_SIZE", 1) == 1:
            yield
            return
        self._install(_AT_ONCE)
        if self._signalled_s is not None:
            raise ValueError(
                f"{self._error} before rendezvous; nothing to save, start the run again"
            )
        yield
        self._install(dict.fromkeys(_SAVING, self._note) | {signal.SIGINT: end_once})

    def error(self) -> StoppedError | None:
        """Return the error that the run is to end with; None while it is to continue."""
        lead_s = self._config.stop_lead_s
        if self._error is None and time.monotonic() >= self._stop_at_s:
            self._error = StoppedError("stopped by train.stop_after")
        if self._error is None and time.time() >= self._job_end_s - lead_s:
            end = datetime.fromtimestamp(self._job_end_s).isoformat(" ", "seconds")
            self._error = StoppedError(
                f"stopped by train.stop_lead_s = {lead_s:g}: the Slurm job ends at {end}"
            )
        return self._error

    def check(self) -> None:
        """Raise ``error()``, if there is one."""
        if (error := self.error()) is not None:
            raise error

    def agree(self, any_rank: Callable[[bool], bool]) -> StoppedError | None:
        """Return ``error()``, on all ranks if one has it; ``any_rank`` is a collective."""
        if threading.current_thread() is threading.main_thread():  # which alone may
            self._install(self._handlers)
        if any_rank(self.error() is not None) and self._error is None:
            self._error = StoppedError(_BY_OTHER)
        return self._error

    def _install(self, handlers: Mapping[signal.Signals, _Handler]) -> None:
        """Set handlers: new ones, or again all, which a user's code may have replaced."""
        self._handlers |= handlers
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._signalled_s is None:
            self._signalled_s = now_s
            # The same signal may have reached another rank first.
            if self._error is None or str(self._error) == _BY_OTHER:
                self._error = StoppedError(f"stopped by {signal.Signals(number).name}")
                self.is_interrupted = number == signal.SIGINT
            if number == signal.SIGINT and self._keeps_time:
                os.write(2, _INTERRUPTED)  # a stream may be in the middle of a write
        elif now_s - self._signalled_s > SAME_SIGNAL_S:
            end_once(number, frame)


def _job_end_s() -> float:
    """Return when Slurm ends this job, in seconds since 1970; infinity outside of Slurm."""
    text = os.environ.get("SLURM_JOB_END_TIME")
    if text is None:
        return math.inf
    try:
        end_s = float(text)
        datetime.fromtimestamp(end_s)  # rejects what is not a time
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(
            "SLURM_JOB_END_TIME: must be the end of the job in seconds since 1970, got "
            f"'{text}'; unset it"
        ) from error
    return end_s
