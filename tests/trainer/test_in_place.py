"""The conditions under which the loss stage may overwrite Megatron's logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bapo_megatron.data.dump import read_batch
from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs
from bapo_megatron.trainer import loss
from tests.distributed_launch import joined, run_ranks
from tests.policy.parity_ranks import hf_gradients
from tests.trainer.one_update import Case, build_trainer

pytestmark = pytest.mark.distributed


def watch_the_logits(model_dir: Path, dump: Path) -> dict[str, Any]:
    """Make an update in bfloat16 with and without overwriting; see where the logits lived."""
    produced: list[Tensor] = []
    seen: dict[str, Any] = {}

    def remember(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        produced.append(output[0])

    def watch(logits_NV: Tensor, *args: Any, overwrites: bool, **options: Any) -> TokenLogprobs:
        head_output = produced[-1]
        if head_output.grad_fn is not None:
            saved = head_output.grad_fn.saved_tensors  # type: ignore[attr-defined]
            seen["dtype"] = logits_NV.dtype
            seen["same_storage"] = logits_NV.data_ptr() == head_output.data_ptr()
            seen["saved_by_linear"] = [t.data_ptr() == head_output.data_ptr() for t in saved]
        return vocab_parallel_logprobs(
            logits_NV, *args, **options | {"overwrite_logits": overwrites}
        )

    gradients = {}
    with joined() as groups:
        for overwrites in (False, True):
            optimizer = {"lr": 0.0, "clip_grad": 1e9}
            trainer = build_trainer(
                model_dir, groups, Case(dtype="bfloat16"), sizes={}, optimizer=optimizer
            )
            trainer.policy.chunks[-1].output_layer.register_forward_hook(remember)
            watching = partial(watch, overwrites=overwrites)
            with mock.patch.object(loss, "vocab_parallel_logprobs", watching):
                trainer.train(read_batch(dump))
            gradients[overwrites] = hf_gradients(trainer.policy)
    return {"gradients": gradients, "seen": seen}


@pytest.fixture(scope="module")
def watched(random_model: Path, mixed_dumps: Path) -> dict[str, Any]:
    return run_ranks(watch_the_logits, 1, random_model, mixed_dumps / "step_000001.parquet")[0]


def test_logits_are_the_output_of_the_head_itself_which_keeps_only_its_input_and_weight(
    watched: dict[str, Any],
) -> None:
    seen = watched["seen"]
    assert seen["dtype"] == torch.bfloat16  # that of the model
    assert seen["same_storage"]
    assert seen["saved_by_linear"]
    assert not any(seen["saved_by_linear"])


def test_overwriting_the_logits_changes_no_gradient(watched: dict[str, Any]) -> None:
    kept, overwritten = watched["gradients"][False], watched["gradients"][True]
    assert kept.keys() == overwritten.keys()
    assert any(gradient.abs().max() > 0 for gradient in kept.values())
    for name, gradient in kept.items():
        assert torch.equal(gradient, overwritten[name]), name
