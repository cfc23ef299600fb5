"""Routers that repeat choices: their own give the same numbers, others change them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policy.families import TINY, WITH_EXPERTS
from tests.policy.layouts import (
    BALANCE,
    EXPERTS,
    ROUTERS,
    Case,
    Results,
    batches_of,
    by_rank,
    cases_of,
    chosen,
    in_every_case,
    run_routed,
)
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import multiples_of
from tests.policy.tiny_models import (
    Models,
    Problem,
    make_problems,
    per_expert,
    recorded_routers,
    reference_logits,
    routers_of,
)
from tests.tolerances import assert_within

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]

CASES = [
    *cases_of(WITH_EXPERTS, "one rank, recomputed", "TP 2 × EP 2, ETP 1"),
    *cases_of(EXPERTS, "PP 2, recomputed", "PP 2 × VPP 2 × CP 2 × EP 2"),
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, deep_models: Models) -> Results:
    return by_rank(run_routed, chosen(request), deep_models)


@pytest.mark.parametrize("repeated", ["own", "half"])
@in_every_case(CASES)
def test_the_routers_own_choices_give_the_same_logits_and_gradients_bit_for_bit(
    results: Results, case: Case, repeated: str
) -> None:
    for passes in results[str(case)]:
        free, again = passes["free"], passes[repeated]
        for free_NV, again_NV in zip(free["logits"], again["logits"], strict=True):
            assert torch.equal(free_NV, again_NV)
    free, again = (results[str(case)][0][name]["gradients"] for name in ("free", repeated))
    assert len(free) > 30
    for name, gradient in free.items():
        assert torch.equal(again[name], gradient), name


@in_every_case(CASES)
def test_other_choices_move_the_logits_and_train_the_router(results: Results, case: Case) -> None:
    moved = [
        float((free_NV - other_NV).abs().max())
        for passes in results[str(case)]
        for free_NV, other_NV in zip(
            passes["free"]["logits"], passes["other"]["logits"], strict=True
        )
    ]
    assert min(moved) > 0.1
    free, other = (results[str(case)][0][name]["gradients"] for name in ("free", "other"))
    routers = [name for name in free if name.endswith(ROUTERS)]
    assert routers
    for name in routers:
        assert other[name].norm() > 1e-4
        assert not torch.allclose(other[name], free[name], rtol=0.1)


@in_every_case(CASES)
def test_metrics_say_what_was_repeated_and_where_the_router_agrees(
    results: Results, case: Case
) -> None:
    (free, own, half, other), *further = (
        [passes[name]["sums"] for name in ("free", "own", "half", "other")]
        for passes in results[str(case)]
    )
    assert all(sums == [free, own, half, other] for sums in further)  # on every rank
    assert free["router_replayed"] == free["router_compared"] == 0
    assert own["router_replayed"] == own["router_tokens"] > 0
    assert own["router_matches"] == own["router_compared"]
    assert 0 < half["router_replayed"] < half["router_tokens"]
    assert half["router_matches"] == half["router_compared"]
    assert 0 < other["router_matches"] < 0.7 * other["router_compared"]
    assert own["router_compared"] == TINY[case.family]["num_experts_per_tok"] * own["router_tokens"]
    for sums in (free, own, half):
        assert sums["router_entropy"] == pytest.approx(free["router_entropy"])
        assert 0 < sums["router_entropy"] / sums["router_tokens"] < 2.08  # log 8
        assert sums["router_load"] == pytest.approx(free["router_load"])
        assert 1 < sums["router_load"] / sums["router_layers"] <= sums["router_load_max"] <= 8


def balancing_gradients(model: Any, family: str, problems: list[Problem]) -> dict[str, Tensor]:
    """Gradients of Σ_layers E Σ_e f_e P_e, averaged by tokens over micro-batches."""
    model.zero_grad()
    per_token = TINY[family]["num_experts_per_tok"]
    is_sigmoid = any(name.endswith("correction_bias") for name, _ in model.named_buffers())
    num_tokens = sum(problem.micro_batch.num_tokens for problem in problems)
    for problem in problems:
        with recorded_routers(model) as seen:
            reference_logits(model, problem)
        for outputs in seen.values():
            logits_NE = torch.cat([logits for logits, *_ in outputs])
            chosen_NK = logits_NE.topk(per_token, dim=-1).indices  # also with a bias
            assert len(logits_NE) == problem.micro_batch.num_tokens
            probability_NE = logits_NE.softmax(dim=-1)
            if is_sigmoid:
                probability_NE = logits_NE.sigmoid() / logits_NE.sigmoid().sum(-1, keepdim=True)
            share_E = torch.bincount(chosen_NK.flatten(), minlength=8) / chosen_NK.numel()
            loss = 8 * (share_E * probability_NE.mean(dim=0)).sum()
            (BALANCE * loss * len(logits_NE) / num_tokens).backward(retain_graph=True)
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return per_expert({name: grad for name, grad in named.items() if grad is not None}, model)


@in_every_case(CASES)
def test_the_load_balancing_loss_has_the_gradient_of_its_formula_in_every_layout(
    results: Results, oracles: dict[str, Oracle], case: Case
) -> None:
    multiples = multiples_of(case.layout.sizes.get("context", 1))
    problems = make_problems(0, *multiples, batches=batches_of(case.family))
    oracle = oracles[case.family]
    rest = oracle.gradients(problems)
    both = oracle.both(lambda model: balancing_gradients(model, case.family, problems))
    expected = Gradients.of(*both)
    plain, with_loss = results[str(case)][0]["free"]["gradients"], results[str(case)][0]["balanced"]
    assert sum(name.endswith(ROUTERS) for name in expected.exact) == len(routers_of(oracle.float32))
    for name, gradient in plain.items():
        error = with_loss[name].double() - gradient - expected.exact.get(name, 0.0)
        # The rest is in both gradients, each with its own rounding.
        bound = expected.bounds.get(name, 0.0) + 2 * rest.bounds[name]
        assert_within(error.norm(), bound, name)
