"""A model that returns hidden states trains like one that returns logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy import output_head_ranks
from tests.policy.output_head_ranks import FAMILIES
from tests.policy.tiny_models import SIZES, Models, Ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one_rank(models: Models) -> dict[str, Any]:
    return run_ranks(output_head_ranks.one_rank, 1, models)[0]


@pytest.fixture(scope="module")
def layouts(models: Models, one_rank: dict[str, Any]) -> dict[str, Ranks]:
    """Results of the ranks, by layout."""
    ranks = run_ranks(output_head_ranks.two_ranks, 2, models)
    two = {layout: [rank[layout] for rank in ranks] for layout in ("tensor", "sequence")}
    return {"single": [one_rank["single"]], **two}


@pytest.mark.parametrize("layout", ["single", "tensor", "sequence"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_sums_and_all_gradients_are_those_of_logits(
    layouts: dict[str, Ranks], layout: str, family: str
) -> None:
    for rank in layouts[layout]:
        expected, actual = rank[family]["logits"], rank[family]["hidden"]
        assert actual["parameters"] == expected["parameters"]
        for name in ("logprobs", "sums"):
            for ours, theirs in zip(actual[name], expected[name], strict=True):
                assert ours.numel() > 0
                torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert bool(gradient.any()), name
            error = (actual["gradients"][name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, name
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("family", "weight"), FAMILIES.items())
def test_hidden_states_are_the_decoders_own_in_the_models_dtype(
    one_rank: dict[str, Any], family: str, weight: str
) -> None:
    returned = one_rank[f"returned {family}"]
    assert returned["shape"] == (6, SIZES["hidden_size"])
    assert returned["dtype"] is torch.bfloat16
    assert returned["output"] == returned["decoder"]
    assert returned["head"] == [weight]


def test_without_gradients_one_micro_batch_has_logits_at_a_time(one_rank: dict[str, Any]) -> None:
    assert one_rank["held logits"] == [1, 1]
