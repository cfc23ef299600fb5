"""Starts a run before Megatron is imported, so that servers load meanwhile.

It claims the run directory, starts generation, and chooses the checkpoint to continue from. Neither
this module nor what it imports may import torch: a test checks that.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.config.check import check_settings
from bapo_megatron.config.load import dump_yaml
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import differing, flat_settings, read_settings
from bapo_megatron.errors import describe_os_error
from bapo_megatron.policy import checkpoint_files as files
from bapo_megatron.rollout.client import CollectorClient, ReplaySource
from bapo_megatron.rollout.demonstrations import DemonstrationSource
from bapo_megatron.rollout.messages import RolloutSource
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import atomic_write_text, read_regular
from bapo_megatron.runtime.processes import RUN_DIR_FILE, launched_number
from bapo_megatron.runtime.versions import own_software
from bapo_megatron.telemetry.console import PhaseTimer, ProgressLine, Pulse, console_kept_in, say
from bapo_megatron.telemetry.run_dir import run_dir_locked
from bapo_megatron.telemetry.sinks import ShowRow, rows_served
from bapo_megatron.trainer.check import check_training
from bapo_megatron.trainer.stopping import STOPPED_NAME, Stopping

SAVED_NAME = "saved"
"""File of a run directory: the newest checkpoint's name, which outlives ``checkpoints/``."""
_REMEDY = "restore one from a copy, or change run_dir"


@dataclass(frozen=True, slots=True)
class Opening:
    """What a rank has before the policy is built."""

    timer: PhaseTimer
    source: RolloutSource | None = None
    """On rank 0, already started."""
    progress: ProgressLine | None = None
    """On rank 0."""
    show_row: ShowRow | None = None
    """On rank 0, with ``log.prometheus_port``."""
    demonstrations: DemonstrationSource | None = None
    """On rank 0, in a run with demonstrations."""


@contextmanager
def open_run(config: RunConfig, stopping: Stopping) -> Iterator[Opening]:
    """Check the configuration and, on rank 0, start generation, which ends at exit.

    Raises:
        ValueError: The configuration cannot be trained, or ``run_dir`` holds an earlier run or is
            in use.
    """
    rank, timer = launched_number("RANK", 0), PhaseTimer()
    check_training(config, launched_number("WORLD_SIZE", 1), owns_files=rank == 0)
    if rank != 0:
        yield Opening(timer)
        return
    with ExitStack() as stack:
        stack.enter_context(run_dir_locked(config.run_dir, "train"))
        show_row = stack.enter_context(rows_served(config.log))
        claim_run_dir(config)
        stack.enter_context(console_kept_in(config.run_dir / "console.log"))
        progress, demonstrations = stack.enter_context(ProgressLine()), None
        if config.num_demonstrations:
            demonstrations = DemonstrationSource(config, progress.update)
            config = config.with_steps(demonstrations.num_steps)
            check_settings(config, 0)
        write_config(config)
        source = open_source(config, progress, timer.pulse, stopping, demonstrations)
        stack.callback(source.close)
        yield Opening(timer, source, progress, show_row, demonstrations)


def claim_run_dir(config: RunConfig) -> None:
    """Tell torchrun the run's directory; a ``ValueError`` if it holds another run."""
    run_dir = config.run_dir
    if not config.resume and _holds_run(run_dir):
        raise ValueError(
            f"{run_dir} already holds a run; continue it with resume=true, or change run_dir"
        )
    (run_dir / STOPPED_NAME).unlink(missing_ok=True)
    if RUN_DIR_FILE in os.environ:
        Path(os.environ[RUN_DIR_FILE]).write_text(str(run_dir))


def _holds_run(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    has_checkpoints = files.holds_checkpoints(run_dir / "checkpoints")
    return has_metrics or has_checkpoints or bool(evidence_of_save(run_dir))


def write_config(config: RunConfig) -> None:
    """Write ``config.yaml``; keep a different one of an earlier start as ``config.1.yaml``, …."""
    path, text = config.run_dir / "config.yaml", dump_yaml(config)
    if config.resume and path.exists():
        keys = differing(read_settings(path), flat_settings(config))
        changed = [key for key in keys if key != "resume"]
        if changed:
            names = (path.with_name(f"config.{number}.yaml") for number in itertools.count(1))
            backup = next(name for name in names if not name.exists())
            atomic_write_text(backup, path.read_text(encoding="utf-8"))
            say(f"changed since the last start ({backup}): {', '.join(changed)}")
    header = "".join(f"# {line}\n" for line in own_software().lines())
    atomic_write_text(path, header + text)


def open_source(
    config: RunConfig,
    progress: ProgressLine,
    pulse: Pulse,
    stopping: Stopping,
    demonstrations: DemonstrationSource | None = None,
) -> RolloutSource:
    """Start the collector, or open the dumps of a replay or demonstrations alone."""
    if config.eval.sets and not config.has_engines:
        say("the run has no server: eval.sets are not evaluated")
    if config.replay.dumps is not None:
        return ReplaySource(config.replay.dumps)
    if demonstrations is not None and config.imitates:
        return demonstrations
    by_default = config.rollout.weight_sync.adapters is None
    if by_default and config.model.lora.rank and not config.sends_adapters:
        bits = config.rollout.local.sampling_bits
        reason = f"rollout.local.sampling_bits: {bits} rounds whole weights"
        if bits is None:
            reason = f"{config.rollout.engine} has not been measured with unmerged adapters"
        say(f"weight syncs send merged weights: {reason} (rollout.weight_sync.adapters)")

    def on_progress(text: str) -> None:
        progress.update(text)
        pulse.beat()

    source = CollectorClient(
        config, on_progress=on_progress, awaits_weights=True, stopped=stopping.error
    )
    source.launch()
    return source


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Turn errors of files into a ``CheckpointError``, which ranks raise together."""
    try:
        yield
    except files.CheckpointError:
        raise
    except OSError as error:
        raise files.CheckpointError(f"{error.filename}: {describe_os_error(error)}") from error
    except ValueError as error:
        raise files.CheckpointError(str(error)) from error


@as_checkpoint_error()
def choose_checkpoint(run_dir: Path, *, checks_latest: bool = True) -> tuple[Path | None, str]:
    """Return the checkpoint to continue from, and a message if ``latest`` does not name it.

    None: no checkpoint was saved yet. Without ``checks_latest`` the one that ``latest`` names may
    be damaged, which ``load_checkpoint`` reports in the same words.

    Raises:
        CheckpointError: The one that ``latest`` names is damaged; or none is complete, though one
            was saved. The message says how to continue.
    """
    root = run_dir / "checkpoints"
    try:
        latest = files.find_latest(root)
        problem = f"{root / files.LATEST_NAME}: missing"
    except files.DamagedError as error:
        latest, problem = None, str(error)
    if latest is not None:
        if checks_latest:
            with files.damage_of(latest):
                files.check_complete(latest)
        return latest, ""
    steps = files.find_steps(root)[::-1]
    newest = files.first_complete(root, steps)
    if newest is not None:
        name = files.step_name(newest)
        return newest, f"{problem}; continuing from {name}, the newest complete checkpoint"
    if files.holds_checkpoints(root):
        lack = "no checkpoint beside it"
        if steps and (path := files.find_checkpoint(root, steps[0])):
            lack = f"no complete checkpoint, {files.step_name(path)}: {files.why_incomplete(path)}"
        raise files.CheckpointError(f"{problem}; {lack}; {_REMEDY}")
    if evidence := evidence_of_save(run_dir):
        raise files.CheckpointError(f"{root}: no checkpoint, but {evidence}; {_REMEDY}")
    return None, f"{root}: no checkpoint yet, starting at step 1"


def note_save(run_dir: Path, checkpoint: Path) -> None:
    """Write ``saved``, once a checkpoint is complete."""
    atomic_write_text(run_dir / SAVED_NAME, f"{checkpoint.name}\n")


def evidence_of_save(run_dir: Path) -> str:
    """Return the evidence that a run has saved or finished; '' if there is none."""
    saved = run_dir / SAVED_NAME
    if saved.exists():
        return f"{saved} names {shown_value(read_regular(saved).decode(errors='replace').strip())}"
    if (run_dir / "summary.json").exists():
        return "summary.json says that the run finished"
    return ""


def how_to_continue(run_dir: Path) -> str:
    """Return the end of a message that says why a run ended: how to continue it, or use it."""
    try:
        checkpoint, _ = choose_checkpoint(run_dir)
    except files.CheckpointError as error:
        return f"; {error}"
    if checkpoint is None:
        return "; no checkpoint yet: the same command with --resume starts at step 1"
    return (
        f"; the same command with --resume continues from {checkpoint}, of which bapo-megatron "
        "convert makes a model"
    )
