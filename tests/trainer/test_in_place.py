"""The conditions under which the loss stage may overwrite Megatron's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.trainer.in_place_ranks import watch_the_logits

pytestmark = pytest.mark.distributed


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
