"""The conditions under which the loss stage may overwrite Megatron's logits."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bapo_megatron.data.dump import read_batch
from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs
from bapo_megatron.policy import model
from tests.distributed_launch import joined, run_ranks
from tests.trainer.one_update import Case, build_trainer

pytestmark = pytest.mark.distributed


def watch_the_logits(model_dir: Path, dump: Path) -> dict[str, Any]:
    """Make an update in bfloat16; see where the logits lived."""
    produced: list[Tensor] = []
    seen: dict[str, Any] = {}

    def remember(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        produced.append(output[0])

    def watch(logits_NV: Tensor, *args: Any, **options: Any) -> TokenLogprobs:
        head_output = produced[-1]
        if head_output.grad_fn is not None:
            saved = head_output.grad_fn.saved_tensors  # type: ignore[attr-defined]
            seen["dtype"] = logits_NV.dtype
            seen["same_storage"] = logits_NV.data_ptr() == head_output.data_ptr()
            seen["saved_by_linear"] = [t.data_ptr() == head_output.data_ptr() for t in saved]
        seen["overwrites"] = options["overwrite_logits"]
        return vocab_parallel_logprobs(logits_NV, *args, **options)

    with joined() as groups:
        trainer = build_trainer(
            model_dir, groups, Case(dtype="bfloat16"), sizes={}, optimizer={"lr": 0.0}
        )
        trainer.state.model.chunks[-1].output_layer.register_forward_hook(remember)
        with mock.patch.object(model, "vocab_parallel_logprobs", watch):
            trainer.train(read_batch(dump))
    return seen


def test_logits_are_the_output_of_the_head_itself_which_keeps_only_its_input_and_weight(
    random_model: Path, mixed_dumps: Path
) -> None:
    dump = mixed_dumps / "step_000001.parquet"
    (seen,) = run_ranks(watch_the_logits, 1, random_model, dump)
    assert seen["overwrites"]  # tests/ops has what that changes: nothing
    assert seen["dtype"] == torch.bfloat16  # that of the model
    assert seen["same_storage"]
    assert seen["saved_by_linear"]
    assert not any(seen["saved_by_linear"])
