"""The conditions under which the loss stage may overwrite Megatron's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.trainer.in_place_ranks import refuse_multi_token_prediction, watch_the_logits

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def watched(random_model: Path, mixed_dumps: Path) -> dict[str, Any]:
    return run_ranks(watch_the_logits, 1, random_model, mixed_dumps / "step_000001.parquet")[0]


def test_logits_come_in_the_type_of_the_model(watched: dict[str, Any]) -> None:
    assert watched["seen"]["dtype"] == torch.bfloat16


def test_logits_are_the_output_of_the_head_itself_and_no_copy(watched: dict[str, Any]) -> None:
    assert watched["seen"]["same_storage"]


def test_the_head_keeps_its_input_and_weight_but_not_its_output(watched: dict[str, Any]) -> None:
    assert watched["seen"]["saved_by_linear"]
    assert not any(watched["seen"]["saved_by_linear"])


def test_the_loss_is_no_view(watched: dict[str, Any]) -> None:
    assert not watched["seen"]["loss_is_view"]


def test_overwriting_the_logits_changes_no_gradient(watched: dict[str, Any]) -> None:
    kept, overwritten = watched["gradients"][False], watched["gradients"][True]
    assert kept.keys() == overwritten.keys()
    assert any(gradient.abs().max() > 0 for gradient in kept.values())
    for name, gradient in kept.items():
        assert torch.equal(gradient, overwritten[name]), name


def test_a_model_with_multi_token_prediction_is_refused(random_model: Path) -> None:
    (message,) = run_ranks(refuse_multi_token_prediction, 1, random_model)
    assert message.startswith("multi-token prediction adds its loss inside the model")
