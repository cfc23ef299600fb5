"""Runs a sweep's runs: on this machine, where none outlives the sweep, or as a Slurm array."""

import re
import shlex
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
from bapo_megatron.runtime.files import lock
from bapo_megatron.runtime.processes import (
    child_environment,
    describe_exit,
    end_group,
    open_log,
    tail,
)
from bapo_megatron.telemetry.console import ProgressLine, say
from bapo_megatron.tools.sweep.file import PlannedRun, Sweep

_DEFAULTS = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Variables of a run where the environment has none, as in the launch scripts (docs/launch.md)."""
_POLL_S = 0.1
_PROGRESS_S = 5.0
_ERROR_PREFIX = "bapo-megatron: "
"""Beginning of the line in which ``train`` says why it ended."""

_SCRIPT = """\
#!/usr/bin/env bash
# The runs of {file} as a Slurm array, {jobs} at a time. Submit it with sbatch; afterwards
# `bapo-megatron sweep {file}` shows the results. Before the time limit a run saves and its task is
# requeued; a finished run exits at once.
# Set the time, and whatever else your site needs.
#SBATCH --job-name={name} --array=0-{last}%{jobs} --time=24:00:00
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --output={log}
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node={gpus}
set -euo pipefail
cd {here}
{exports}
case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
[[ ! -e $run_dir/summary.json ]] || exit 0
rm -f "$run_dir/stopped" # of an earlier attempt, in case this one fails before train removes it
"${{command[@]}}" &
trainer=$! is_cancelled='' status=0
trap 'kill "$trainer" || true' USR1
trap 'is_cancelled=1; kill "$trainer" || true' TERM
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" && status=0 || status=$?; done
if [[ -e $run_dir/stopped && ! $is_cancelled ]]; then # saved
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
    status=0
fi
exit "$status"
"""


@dataclass(frozen=True, slots=True)
class FailedRun:
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


def run_sweep(sweep: Sweep) -> list[FailedRun]:
    """Begin or continue every run that is not finished; return those that failed.

    A failed run does not stop the others. On an interrupt, or any other end of this process, the
    runs in progress save and end; a second interrupt ends them at once.

    Raises:
        ValueError: Another sweep, or what is left of one, works in the directory.
        InterruptedRunError: It was interrupted.
    """
    with _locked(sweep.config.dir) as lock_file, ProgressLine() as progress:
        loop = _Loop(sweep, lock_file, progress)
        try:
            return loop.run()
        except KeyboardInterrupt:
            raise InterruptedRunError("interrupted; rerun the command to continue") from None
        finally:
            loop.stop()


class _Loop:
    """Keeps ``jobs`` runs in progress."""

    def __init__(self, sweep: Sweep, lock_file: IO[bytes], progress: ProgressLine) -> None:
        self._sweep, self._lock_file, self._progress = sweep, lock_file, progress
        self._waiting = [run for run in sweep.runs if not run.is_finished]
        self._free = list(range(sweep.config.jobs))
        self._active: list[_Active] = []
        self._failures: list[FailedRun] = []

    def run(self) -> list[FailedRun]:
        """Return the failures once every run has ended."""
        num_runs = len(self._sweep.runs)
        if len(self._waiting) < num_runs:
            say(f"{num_runs - len(self._waiting)} of {num_runs} runs are finished already")
        shown_s = 0.0
        while self._waiting or self._active:
            while self._waiting and self._free:
                self._active.append(self._start(self._waiting.pop(0), self._free.pop(0)))
            for active in [run for run in self._active if run.process.poll() is not None]:
                self._active.remove(active)
                self._free.append(active.slot)
                end_group(active.process)
                self._report(active)
            if time.monotonic() - shown_s >= _PROGRESS_S:
                shown_s = time.monotonic()
                steps = ", ".join(f"{run.label} step {_last_step(run)}" for run in self._running)
                num_done = num_runs - len(self._waiting) - len(self._active)
                self._progress.update(f"{num_done}/{num_runs} runs: {steps}")
            time.sleep(_POLL_S)
        return self._failures

    def stop(self) -> None:
        """Have the runs in progress save and end; a second Ctrl-C ends them at once."""
        if not self._active:
            return
        for active in self._active:
            active.process.terminate()
        labels = ", ".join(run.label for run in self._running)
        say(f"saving and ending {labels}; press Ctrl-C again to end them at once")
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

    @property
    def _running(self) -> list[PlannedRun]:
        return [active.run for active in self._active]

    def _start(self, run: PlannedRun, slot: int) -> _Active:
        environment = {**_DEFAULTS, **child_environment()}
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
        errors = [line for line in lines if line.startswith(_ERROR_PREFIX)] or lines
        reason = f"{errors[-1].removeprefix(_ERROR_PREFIX)} ({describe_exit(status)})"
        self._failures.append(FailedRun(run, reason))
        say(f"{run.label}: failed after {took_s:,.0f} s: {reason}")


@contextmanager
def _locked(directory: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of a sweep's directory; its runs inherit it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("ab") as file:  # NFS locks no directory
        try:
            if not lock(file):
                say(f"{directory}: file system does not support locks; do not start a second sweep")
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: in use by another sweep, or by runs of a killed one that still "
                "save; wait until they end"
            ) from error
        yield file


def _last_step(run: PlannedRun) -> str:
    steps = re.findall(r'^ *{"step": (\d+)', tail(run.run_dir / "metrics.jsonl"), re.MULTILINE)
    return f"{steps[-1] if steps else 0}/{run.config.train.steps}"


def slurm_script(sweep: Sweep) -> str:
    """Return the text of an sbatch script; all paths are as seen from this directory."""
    cases = [
        f"{number})\n    run_dir={shlex.quote(str(run.run_dir))}\n"
        f"    command=({shlex.join(run.command())})\n    ;;"
        for number, run in enumerate(sweep.runs)
    ]
    exports = [f"export {name}=${{{name}:-{value}}}" for name, value in _DEFAULTS.items()]
    return _SCRIPT.format(
        file=shlex.quote(str(sweep.file)),
        jobs=sweep.config.jobs,
        name=shlex.quote(sweep.config.dir.name),
        last=len(sweep.runs) - 1,
        log=shlex.quote(f"{sweep.config.dir}/slurm-%a.log"),
        gpus=max(run.num_gpus for run in sweep.runs),
        here=shlex.quote(str(Path.cwd())),
        exports="\n".join(exports),
        cases="\n".join(cases),
    )
