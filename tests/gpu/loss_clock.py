"""How long the trainer's loss stage takes between the model's logits and its backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.trainer.loss import LossStage
from bapo_megatron.trainer.records import TokenReport

Mark = float | torch.cuda.Event


class LossClock:
    """Adds up log-probs, search, loss and the gradient of the logits; not the model around them.

    On a GPU by events on its stream, which nobody waits for before ``seconds``. It is made for
    objectives that search a whole update: where the search lies inside the loss it counts twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Mark, Mark]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every loss stage of this process within the block."""
        loss = self._timed(LossStage.loss)

        def loss_and_backward(
            stage: LossStage, output: Tensor, *args: Any, **options: Any
        ) -> tuple[Tensor, TokenReport]:
            result = loss(stage, output, *args, **options)
            self._time_backward(result[0], output)
            return result

        with (
            patch.object(PolicyOutput, "read", self._timed(PolicyOutput.read)),
            patch.object(LossStage, "collect", self._timed(LossStage.collect)),
            patch.object(LossStage, "loss", loss_and_backward),
        ):
            yield

    def seconds(self) -> float:
        """Return the sum of all spans; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        return sum(end - begin for begin, end in self._spans)

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begin = self._mark()
            result = function(*args, **options)
            self._spans.append((begin, self._mark()))
            return result

        return run

    def _time_backward(self, loss: Tensor, output: Tensor) -> None:
        """Time from the loss's gradient to that of the model's output."""
        begins: list[Mark] = []

        def begin(_: Tensor) -> None:
            begins.append(self._mark())

        def end(_: Tensor) -> None:
            self._spans.append((begins.pop(), self._mark()))

        loss.register_hook(begin)
        output.register_hook(end)
