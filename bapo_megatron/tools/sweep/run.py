"""Runs a sweep's runs on this machine, several at a time; none outlives the sweep."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bapo_megatron.errors import InterruptedRunError
from bapo_megatron.runtime.files import lock, parse_json
from bapo_megatron.runtime.processes import (
    child_environment,
    describe_exit,
    end_group,
    open_log,
    tail,
)
from bapo_megatron.telemetry.console import ProgressLine, say
from bapo_megatron.tools.sweep.file import PlannedRun, Sweep

DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Variables of a run where the environment has none, as in the launch scripts (docs/launch.md)."""
_POLL_S = 0.1
_PROGRESS_S = 1.0
_LAST_ROW_BYTES = 1 << 20
_COMPLAINT = "bapo-megatron: "
"""Beginning of the line in which ``train`` says why it ended."""


class SweepError(ValueError):
    """A sweep cannot go on, or is not complete; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended without its last step."""

    run: PlannedRun
    reason: str


@dataclass(frozen=True, slots=True)
class _Active:
    """A run in progress."""

    run: PlannedRun
    slot: int
    process: subprocess.Popen[bytes]
    began_s: float


def run_sweep(sweep: Sweep) -> list[Failure]:
    """Begin or continue every run that is not finished; return those that failed.

    A failed run does not stop the others. An interrupt, or any other end of this process, has the
    runs in progress save what they have and end; a second interrupt ends them at once.

    Raises:
        SweepError: Another sweep, or what is left of one, works in the directory.
        InterruptedRunError: It was interrupted.
    """
    with _locked(sweep.config.dir) as lock_file, ProgressLine() as progress:
        waiting = [run for run in sweep.runs if not run.is_finished]
        num_done = len(sweep.runs) - len(waiting)
        if num_done:
            say(f"{num_done} of {len(sweep.runs)} runs are finished already")
        loop = _Loop(sweep, waiting, lock_file, progress)
        try:
            return loop.run()
        except KeyboardInterrupt:
            raise InterruptedRunError("interrupted; the same command continues the sweep") from None
        finally:
            loop.stop()


class _Loop:
    """Keeps ``jobs`` runs in progress."""

    def __init__(
        self,
        sweep: Sweep,
        waiting: list[PlannedRun],
        lock_file: IO[bytes],
        progress: ProgressLine,
    ) -> None:
        self._sweep, self._lock_file, self._progress = sweep, lock_file, progress
        self._waiting = waiting
        self._free = list(range(sweep.config.jobs))
        self._active: list[_Active] = []
        self._failures: list[Failure] = []

    def run(self) -> list[Failure]:
        """Return the failures once every run has ended."""
        shown_s = 0.0
        while self._waiting or self._active:
            while self._waiting and self._free:
                self._active.append(self._start(self._waiting.pop(0), self._free.pop(0)))
            for active in [each for each in self._active if each.process.poll() is not None]:
                self._active.remove(active)
                self._free.append(active.slot)
                end_group(active.process)
                self._report(active)
            if time.monotonic() - shown_s >= _PROGRESS_S:
                shown_s = time.monotonic()
                self._progress.update(self._describe())
            time.sleep(_POLL_S)
        return self._failures

    def stop(self) -> None:
        """Have the runs in progress save and end; a second Ctrl-C ends them at once."""
        if not self._active:
            return
        for active in self._active:
            active.process.terminate()
        labels = ", ".join(active.run.label for active in self._active)
        say(f"saving and ending {labels}; Ctrl-C ends them at once")
        # The first signal had all further ones ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for active in self._active:
                active.process.wait()
        except KeyboardInterrupt:
            say("ending them at once")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for active in self._active:
                end_group(active.process)

    def _start(self, run: PlannedRun, slot: int) -> _Active:
        environment = {**DEFAULTS, **child_environment()}
        if self._sweep.gpu_shares:
            environment["CUDA_VISIBLE_DEVICES"] = self._sweep.gpu_shares[slot]
        with open_log(run.log) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bapo_megatron.tools.sweep.owned", *run.command()],
                env=environment,
                # The lock is held until the run has ended, whatever ends the sweep.
                pass_fds=(self._lock_file.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone
            )
        return _Active(run, slot, process, time.monotonic())

    def _report(self, active: _Active) -> None:
        run, status = active.run, active.process.returncode
        took_s = time.monotonic() - active.began_s
        if status == 0 and run.is_finished:
            say(f"{run.label}: finished, {took_s:,.0f} s")
            return
        lines = [line.strip() for line in tail(run.log).splitlines()]
        said = [line for line in lines if line.startswith(_COMPLAINT)] or lines
        reason = f"{said[-1].removeprefix(_COMPLAINT)} ({describe_exit(status)})"
        self._failures.append(Failure(run, reason))
        say(f"{run.label}: failed after {took_s:,.0f} s: {reason}")

    def _describe(self) -> str:
        num_left = len(self._waiting) + len(self._active)
        steps = ", ".join(
            f"{active.run.label} step {_last_step(active.run.run_dir)}/"
            f"{active.run.config.train.steps}"
            for active in self._active
        )
        return f"{len(self._sweep.runs) - num_left}/{len(self._sweep.runs)} runs: {steps}"


@contextmanager
def _locked(directory: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of a sweep's directory; its runs inherit it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("ab") as file:  # NFS locks no directory
        try:
            if not lock(file):
                say(f"{directory}: its file system has no locks; do not start two sweeps in it")
        except BlockingIOError as error:
            raise SweepError(
                f"{directory}: another sweep works here, or runs of one that was killed still "
                "save; wait until they end"
            ) from error
        yield file


def _last_step(run_dir: Path) -> int:
    """The newest step in ``metrics.jsonl``, read from its end; 0 where there is none yet."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _LAST_ROW_BYTES))
        rows = stream.read().rpartition(b"\n")[0].splitlines()
    return int(parse_json(rows[-1])["step"]) if rows else 0
