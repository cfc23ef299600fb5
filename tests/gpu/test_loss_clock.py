"""The clock of the loss stage, with work that advances a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.objectives.bapo import Bapo
from tests.benchmarks.stage import Stage
from tests.fakes.given_tokens import CONTEXT, one_rank
from tests.gpu.loss_clock import LossClock


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_stage_counts_and_the_model_around_it_does_not(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    now_s = 0.0

    def pass_s(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def takes(owner: Any, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def run(*args: Any) -> Any:
            pass_s(seconds)
            return original(*args)

        monkeypatch.setattr(owner, name, run)

    class Event:
        """Of the GPU's clock, here ours; in milliseconds."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.recorded_s = now_s

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.recorded_s - self.recorded_s)

    class Model(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            pass_s(1e6)
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            pass_s(1e6)
            return grad

    with one_rank() as groups:
        stage = Stage(8, 64, 4, groups)
        takes(torch.ops.bapo, "logprob_partials", 1)
        takes(torch.ops.bapo, "logits_backward_", 10)
        takes(Bapo, "statistics", 100)
        takes(Bapo, "loss", 1000)
        monkeypatch.setattr("tests.gpu.loss_clock.perf_counter", lambda: now_s)
        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        clock, leaf = LossClock(torch.device(device)), stage.logits_CV.requires_grad_()
        with clock.running():
            output = stage.losses._output
            policy = [output.read(Model.apply(leaf), batch) for batch in stage.micro_batches]
            known = stage.losses.collect(policy, stage.micro_batches, CONTEXT)
            for batch in known.micro_batches:
                loss, _ = stage.losses.loss(
                    Model.apply(leaf), batch, decision=known.decision, context=CONTEXT
                )
                loss.backward()
        stage.run()  # after the block
    # Per micro-batch: log-probs twice, statistics, loss, and the gradient of the logits.
    assert clock.seconds() == 2 * (2 * 1 + 100 + 1000 + 10)
