"""Times the parts of training steps on each rank; used by bench_step.py."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bapo_megatron.config.load import load_config
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.train_state import TrainState
from bapo_megatron.telemetry.sinks import MetricsSinks
from bapo_megatron.trainer import loop as loop_module
from bapo_megatron.trainer import speculation as speculation_module
from bapo_megatron.trainer import step as step_module
from bapo_megatron.trainer.loss import LossStage
from tests.distributed_launch import take_port
from tests.trainer.runs import train_whole_run

PARTS: dict[str, list[tuple[Any, str]]] = {
    "read and share the batch": [(loop_module.Run, "next_batch")],
    "build micro-batches": [(step_module, "split_step")],
    "forward only": [(Model, "forward_only")],
    "forward and backward": [(TrainState, "forward_backward")],
    "predict bounds, search": [
        *((LossStage, name) for name in ("known_statistics", "collect")),
        (speculation_module, "predict"),
    ],
    "check and measure updates": [(step_module, name) for name in ("check", "read_measurements")],
    "optimizer": [(TrainState, "optimizer_step")],
    "export weights (sync)": [(Model, "export_hf")],
    "write metrics": [(MetricsSinks, "write")],
}
"""What is timed, by label: functions that contain none of the others."""


def profile_steps(overrides: list[str], config: Path) -> list[dict[str, float]]:
    """Replay dumps; return, for every step, the seconds of each part and of the whole."""
    seconds: list[dict[str, float]] = []
    current: defaultdict[str, float] = defaultdict(float)
    began = time.perf_counter()

    def end_step(self: loop_module.Run, *args: Any) -> None:
        nonlocal began
        # As a run with servers does.
        self.state.model.export_hf(self.config.run_dir / "exported", durable=False)
        whole_s = time.perf_counter() - began
        seconds.append({**current, "whole": whole_s})
        current.clear()
        began = time.perf_counter()

    take_port()
    with _timed(current), mock.patch.object(loop_module.Run, "save_if_due", end_step):
        loaded = load_config(config, overrides)
        train_whole_run(loaded)
    return seconds


@contextmanager
def _timed(current: defaultdict[str, float]) -> Iterator[None]:
    with ExitStack() as stack:
        for label, functions in PARTS.items():
            for owner, name in functions:
                timed = _wrap(getattr(owner, name), label, current)
                stack.enter_context(mock.patch.object(owner, name, timed))
        yield


def _wrap(
    function: Callable[..., Any], label: str, current: defaultdict[str, float]
) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            current[label] += time.perf_counter() - began

    return timed
