"""Runs whose batches come from a stub: dumps, interrupts and failures by a script."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import shutil
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.errors import RolloutError, StoppedError
from bapo_megatron.policy.checkpoint_files import ROLLOUT_NAME, find_best, find_latest
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.runtime.distributed import shutdown_distributed
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.telemetry import hang
from bapo_megatron.telemetry.sinks import read_metrics
from bapo_megatron.trainer import loop, opening
from bapo_megatron.trainer.step import BatchTrainer
from bapo_megatron.trainer.stopping import Stopping
from tests.distributed_launch import take_port
from tests.trainer.dumps import replay_settings
from tests.trainer.runs import train_whole_run
from tests.trainer.stub_source import StubSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from bapo_megatron.policy.checkpoint_files import BestCheckpoint
    from bapo_megatron.types import RolloutBatch, Sample

QUIET = {"tensorboard": False, "console": False}
BEST = {"best": "eval/sums/avg_at_k", "keep_last": 1, "asynchronous": True}


@dataclass(frozen=True)
class Outcome:
    """What became of a run on one rank."""

    error: str
    calls: list[str]
    """What the source was asked, in order."""
    rows: list[dict[str, float]]
    checkpoint: str
    saved_state: dict[str, Any]
    """State of the source, in the newest checkpoint."""
    kept: list[str]
    """What is in the directory of checkpoints."""
    best: BestCheckpoint | None
    is_marked: bool
    """Whether the run directory says that the run was stopped."""
    stacks: str
    collectives: set[str]
    """Kinds of the collectives that were written with the stacks."""


def _train(num_steps: int) -> dict[str, int]:
    return {"steps": num_steps, "max_tokens_per_micro_batch": 512}


def _evaluate(root: Path, **changes: Any) -> dict[str, Any]:
    """An evaluation of one problem after every step."""
    data = root / "sums.jsonl"
    data.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    sets = [{"path": str(data)}]
    return {"sets": sets, "every_steps": 1, "at_start": False, "max_response_tokens": 64, **changes}


def _outcome(
    model: Path,
    dumps: Path,
    run_dir: Path,
    on_collect: dict[int, Callable[[StubSource], bool]] | None = None,
    weight_sync: dict[str, Any] | None = None,
    right: dict[int, int] | None = None,
    signals: Signals | None = None,
    loses_weights_in: int = 0,
    **changes: Any,
) -> Outcome:
    run_dir.mkdir(exist_ok=True, parents=True)
    data = run_dir.parent / "train.jsonl"
    data.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    settings = replay_settings(model, dumps, run_dir) | {
        "replay": None,
        "data": {"train": {"path": str(data)}, "max_prompt_tokens": 32},
        "rollout": {
            "servers": ["http://127.0.0.1:1"],
            "groups_per_step": 4,
            "max_response_tokens": 64,
            "weight_sync": weight_sync or {},
        },
        "checkpoint": {"every_steps": 1},
        "train": _train(3),
        "log": QUIET,
        **changes,
    }
    config = RunConfig.model_validate(settings)
    stopping = Stopping(config.train)
    source = StubSource(
        dumps, on_collect or {}, right=right or {}, loses_weights_in=loses_weights_in
    )
    opening.open_source = lambda *_: source
    take_port()
    error = ""
    try:
        with ExitStack() as stack:
            if signals is not None:
                stopping.listen(keeps_time=False)
                source.at = functools.partial(signals.at, stopping)
                stack.enter_context(mock.patch.object(loop, "_MAX_SILENCE_S", 0.1))
                stack.enter_context(mock.patch.object(BatchTrainer, "train", _observed(source)))
                stack.enter_context(mock.patch.object(Stopping, "joining", _begun(source)))
            train_whole_run(config, stopping)
    except (RolloutError, OSError, KeyboardInterrupt, StoppedError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        shutdown_distributed()
    checkpoints, logs, rank = run_dir / "checkpoints", run_dir / "logs", os.environ["RANK"]
    latest, metrics = find_latest(checkpoints), run_dir / "metrics.jsonl"
    traced, stacks = logs / f"gloo_trace_rank_{rank}", logs / f"stacks_rank_{rank}.txt"
    trace = pickle.loads(traced.read_bytes()) if traced.exists() else {"entries": []}
    return Outcome(
        error=error,
        calls=source.calls,
        rows=read_metrics(metrics) if metrics.exists() else [],
        checkpoint=latest.name if latest else "",
        saved_state=json.loads((latest / ROLLOUT_NAME).read_text()) if latest else {},
        kept=sorted(path.name for path in checkpoints.glob("*")),
        best=find_best(checkpoints) if rank == "0" else None,
        is_marked=(run_dir / "stopped").exists(),
        stacks=stacks.read_text() if stacks.exists() else "",
        collectives={entry["profiling_name"] for entry in trace["entries"]},
    )


@dataclass(frozen=True)
class Signals:
    """Signals that rank 0 sends to a rank, each twice, as torchrun and Slurm do."""

    moments: Sequence[str]
    rank: int
    number: signal.Signals
    pids: Sequence[int]

    def at(self, stopping: Stopping, moment: str) -> bool:
        if moment not in self.moments or os.environ["RANK"] != "0":
            return False
        for _ in range(2):
            os.kill(self.pids[self.rank], self.number)
        is_wait = moment.startswith(("rollout", "evaluation"))
        while is_wait and stopping.error() is None:
            time.sleep(0.01)
        return is_wait


def slow_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Lets a test signal a run before it ends."""
    time.sleep(0.5)
    return rewards - rewards.mean()


def endless_advantage(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Lets a test signal a run in the middle of a step, which is longer than the test waits."""
    sys.stderr.write("in a step\n")
    sys.stderr.flush()
    time.sleep(120)
    return rewards - rewards.mean()


def _observed(source: StubSource) -> Callable[..., Any]:
    train_batch = BatchTrainer.train

    def observed(trainer: BatchTrainer, batch: RolloutBatch, *others: Any) -> Any:
        source.at(f"training {batch.step}")
        return train_batch(trainer, batch, *others)

    return observed


def _begun(source: StubSource) -> Callable[..., Any]:
    joining = Stopping.joining

    @contextmanager
    def begun(stopping: Stopping) -> Iterator[None]:
        with joining(stopping):
            yield
        source.at("start")

    return begun


def stopped_runs(model: Path, dumps: Path, root: Path) -> dict[str, Outcome]:
    """A run of three steps that is stopped again and again, and one that cannot be saved."""
    pid_file = root / f"pid_{os.environ['RANK']}"
    atomic_write_text(pid_file, str(os.getpid()))
    while len(paths := sorted(root.glob("pid_?"))) < 2:
        time.sleep(0.01)
    pids = [int(path.read_text()) for path in paths]

    def run(*moments: str, rank: int = 1, name: str = "run", **changes: Any) -> Outcome:
        number = signal.SIGUSR1 if moments == ("start",) else signal.SIGTERM
        return _outcome(
            model,
            dumps,
            root / name,
            {1: _occupy(root / name / "checkpoints")} if name == "full" else {},
            right={1: 2, 2: 4, 3: 3},
            signals=Signals(moments, rank, number, pids),
            eval=_evaluate(root),
            resume=True,
            **changes,
        )

    return {
        "disk full": run("training 1", name="full"),
        "start": run("start", rank=0),  # the other one may not listen yet
        "rollout": run("rollout 1"),
        "save": run("save", rank=0),
        "updates": run("training 2", "probe"),
        "evaluation": run("evaluation 3"),
        "rest": run(),
    }


def one_rank(model: Path, dumps: Path, root: Path) -> dict[str, Outcome]:
    """An interrupt while a batch is collected, and servers that lack weights."""
    return {
        "interrupted": _outcome(model, dumps, root / "interrupted", {2: _interrupt}),
        "weights lost": _outcome(model, dumps, root / "weights", {2: _lacks_weights_once()}),
    }


def beside_runs(model: Path, dumps: Path, root: Path) -> dict[str, Outcome]:
    """Evaluations beside the next step, one of them given up; and a run that ends, and goes on."""
    settings: dict[str, Any] = {
        "right": {1: 2, 2: 6, 3: 4, 4: 3},
        "train": _train(4),
        "eval": _evaluate(root, overlap=True),
        "checkpoint": BEST | {"every_steps": 1},
    }
    return {
        "whole": _outcome(model, dumps, root / "whole", loses_weights_in=3, **settings),
        "failed": _outcome(model, dumps, root / "failed", {3: _fail}, **settings),
        "resumed": _outcome(model, dumps, root / "failed", resume=True, **settings),
    }


def two_ranks(model: Path, dumps: Path, root: Path) -> dict[str, Outcome]:
    """Generation and weight syncs that fail for good.

    The second run has ranks of a million operations per second.
    """
    return {
        "at the start": _outcome(model, dumps, root / "start", {1: _fail}),
        "after a save": _outcome(
            model, dumps, root / "later", {3: _fail}, log={**QUIET, "peak_tflops": 1e-6}
        ),
        "disk full": _outcome(
            model,
            dumps,
            root / "full",
            {1: _block(root / "full" / "weights")},
            weight_sync={"method": "disk"},
            algorithm={"objective": "clip", "behaviour": "recomputed"}
            | {"updates_per_batch": 2, "epochs": 2},
        ),
    }


STOPPED = re.compile(
    r"no progress for 2 s \(log.hang_s\): "
    r"rank 1 stuck in training, forward and backward of update 2 for \d+ s after 0 heartbeats; "
    r"rank 0 stuck in training, forward and backward of update 2 for \d+ s after [1-9]\d* "
    r"heartbeats; stacks and collective traces are in <run_dir>/logs \(docs/runtime.md\)"
)
"""What rank 0 is to say of ``stand_still``."""


def stand_still(model: Path, dumps: Path, root: Path) -> Outcome:
    """Rank 1 stops before the second update, until rank 0 has said so; then the run goes on."""
    train_update = TrainState.forward_backward
    stopped, said = root / "stopped", root / "said"

    def say(line: str) -> None:
        if STOPPED.fullmatch(line):  # a slow machine may have had reason to say more
            atomic_write_text(said, line)

    def wait_for(path: Path) -> None:
        while not path.exists():
            time.sleep(0.02)

    def forward_backward(state: TrainState, *arguments: Any) -> Any:
        if state.num_updates == 1 and state.model.groups.rank == 1:
            stopped.touch()
            wait_for(said)
        elif state.num_updates == 1:
            wait_for(stopped)
        return train_update(state, *arguments)

    with (
        mock.patch.object(TrainState, "forward_backward", forward_backward),
        mock.patch.object(hang, "say", say),
    ):
        return _outcome(
            model,
            dumps,
            root / "still",
            train=_train(2),
            checkpoint={"at_end": False},
            log={**QUIET, "hang_s": 2.0},  # a busy machine may keep a thread from telling for 1 s
        )


def best_runs(model: Path, dumps: Path, root: Path) -> dict[str, Outcome]:
    """A run that keeps the best checkpoint, resumed, and resumed from before the best one."""
    run_dir = root / "best"
    # Steps 1, 2 and 6 are better than all before them; step 3 only equals the second.
    right = {1: 2, 2: 4, 3: 4, 4: 3, 5: 3, 6: 6}

    def run(steps: int, *, resume: bool, **checkpoint: Any) -> Outcome:
        return _outcome(
            model,
            dumps,
            run_dir,
            right=right,
            resume=resume,
            train=_train(steps),
            eval=_evaluate(root),
            checkpoint=BEST | checkpoint,
        )

    outcomes = {"first": run(4, resume=False), "resumed": run(5, resume=True)}
    is_first = os.environ["RANK"] == "0"
    if is_first:  # as after a kill between the checkpoint and the pointer
        (run_dir / "checkpoints" / "best").unlink()
    outcomes["better"] = run(6, resume=True, keep_last=9)
    if is_first:
        atomic_write_text(run_dir / "checkpoints" / "latest", "step_5\n")
    right[6] = 5
    outcomes["again"] = run(6, resume=True)
    return outcomes


def _interrupt(_: StubSource) -> bool:
    raise KeyboardInterrupt


def _fail(_: StubSource) -> bool:
    raise RolloutError("no server left")


def _lacks_weights_once() -> Callable[[StubSource], bool]:
    answers = iter((True, False))
    return lambda _: next(answers)


def _occupy(directory: Path) -> Callable[[StubSource], bool]:
    """No directory can be made where a file is."""
    return lambda _: bool(directory.write_text(""))


def _block(directory: Path) -> Callable[[StubSource], bool]:
    """Nothing can be written to ``directory`` any more."""

    def block(_: StubSource) -> bool:
        shutil.rmtree(directory)
        directory.write_text("not a directory")
        return False

    return block
