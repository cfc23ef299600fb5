"""What does not depend on the layout, or needs no other one: updates, refusals, collectives."""

import math
from typing import Any

import pytest
import torch

from tests.distributed_launch import run_ranks
from tests.policy import parity_ranks
from tests.policy.convert_models import assert_same
from tests.policy.families import FAMILIES, VOCAB_SIZE, WITH_EXPERTS
from tests.policy.layouts import (
    Case,
    Results,
    by_rank,
    cases_of,
    chosen,
    in_every_case,
    run_accumulated,
)
from tests.policy.oracle import Oracle
from tests.policy.tiny_models import Models, Ranks, load_reference, make_problems, reference_logits

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one_rank(models: Models) -> dict[str, Any]:
    return run_ranks(parity_ranks.single_rank, 1, models["qwen2"])[0]


@pytest.fixture(scope="module")
def two_ranks(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(parity_ranks.two_ranks, 2, models["qwen2"], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def accumulated(request: pytest.FixtureRequest, models: Models) -> Results:
    return by_rank(run_accumulated, chosen(request), models)


@in_every_case(cases_of(FAMILIES, "one rank", "TP 2, ETP 1"))
def test_gradients_that_layers_add_up_themselves_are_those_of_transformers(
    accumulated: Results, models: Models, case: Case
) -> None:
    for rank in accumulated[str(case)]:
        # Two micro-batches through two layers of four products each, and the output layer.
        is_dense = case.family not in WITH_EXPERTS
        assert rank["products"] == 18 if is_dense else rank["products"] > 18
    expected = Oracle.of(case.family, models[case.family]).gradients(make_problems())
    expected.check(accumulated[str(case)][0]["gradients"])


def test_without_gradients_one_micro_batch_has_logits_at_a_time(one_rank: dict[str, Any]) -> None:
    assert one_rank["held logits"] == [1, 1]


def test_weight_decay_leaves_norms_and_biases_alone(one_rank: dict[str, Any]) -> None:
    before, after = one_rank["decay"]["before"], one_rank["decay"]["after"]
    for name, weight in before.items():
        # lr 0.1 · weight decay 0.5: a matrix keeps 95 %.
        expected = weight if weight.dim() == 1 else 0.95 * weight
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0), name


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_update_is_a_first_one(
    one_rank: dict[str, Any],
) -> None:
    broken, good = one_rank["non_finite"], one_rank["after non_finite"]
    assert (broken["step"].applied, broken["num_updates"]) == (False, 0)
    assert math.isnan(broken["step"].grad_norm)
    assert_same(broken["after"], broken["before"])
    assert (good["step"].applied, good["num_updates"]) == (True, 1)
    # Adam's first update moves a weight by the learning rate (1e-3), whatever its gradient.
    moved = good["after"]["lm_head.weight"] - good["before"]["lm_head.weight"]
    assert moved.abs().max() == pytest.approx(1e-3, rel=1e-2)


def test_bfloat16_logits_are_near_those_in_float32_and_weights_move(
    one_rank: dict[str, Any], models: Models
) -> None:
    model, run = load_reference("qwen2", models["qwen2"]), one_rank["bfloat16"]
    for logits_NV, problem in zip(run["logits"], make_problems(), strict=True):
        assert logits_NV.dtype is torch.bfloat16
        expected_NV = reference_logits(model, problem).detach()
        error = (logits_NV[:, :VOCAB_SIZE] - expected_NV).norm() / expected_NV.norm()
        assert error < 0.02
    assert run["step"].applied
    assert all(tensor.dtype is torch.bfloat16 for tensor in run["after"].values())
    changed = [
        not torch.equal(weight, run["after"][name]) for name, weight in run["before"].items()
    ]
    assert sum(changed) > len(changed) / 2


def test_what_cannot_be_computed_is_refused(one_rank: dict[str, Any], two_ranks: Ranks) -> None:
    assert "cu_seqlens ends at 5 but the micro-batch has 6 tokens" in one_rank["unpadded"]
    assert one_rank["no batch"].startswith("AssertionError: forward_backward needs a micro-batch")
    odd = [rank["odd tokens"] for rank in two_ranks]
    assert odd == ["AssertionError: 13 tokens over 2 ranks"] * 2


def test_an_export_that_cannot_be_written_fails_on_every_rank(two_ranks: Ranks) -> None:
    assert two_ranks[0]["unwritable"].startswith("NotADirectoryError")
    assert two_ranks[1]["unwritable"].startswith("OSError")
    assert all("blocked" in rank["unwritable"] for rank in two_ranks)


def test_collectives_give_every_rank_the_same(two_ranks: Ranks) -> None:
    for rank in two_ranks:
        collectives = rank["collectives"]
        assert collectives["bytes"]
        assert collectives["empty"] == b""
        assert collectives["any"] == [True, True, False]
        assert collectives["first"] == ["0", "1", None]  # the lowest rank that has one
