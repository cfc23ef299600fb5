"""Routers that repeat choices: their own give the same numbers, others change them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policy.layouts import (
    BALANCE,
    BATCHES,
    EXPERTS,
    Results,
    by_rank,
    layouts_of,
    run_balanced,
    run_replays,
)
from tests.policy.oracle import Gradients, Oracle
from tests.policy.parity_ranks import multiples_of
from tests.policy.tiny_models import (
    Models,
    Problem,
    make_model,
    make_problems,
    per_expert,
    reference_logits,
)
from tests.tolerances import assert_within

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]

TESTED = layouts_of(
    *("one rank, recomputed", "TP 2 × EP 2, ETP 1", "PP 2, recomputed"),
    "PP 2 × VPP 2 × CP 2 × EP 2",
    models=EXPERTS,
) + layouts_of("one rank, recomputed", "TP 2 × EP 2, ETP 1", models=("gpt_oss",))
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
CASES = [f"{layout.name}, {family}" for layout in TESTED for family in layout.models]


@pytest.fixture(scope="module")
def routed(deep_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("gpt_oss")
    return deep_models | {"gpt_oss": make_model("gpt_oss", directory, num_hidden_layers=4)}


@pytest.fixture(scope="module")
def results(routed: Models) -> Results:
    return by_rank(run_replays, TESTED, routed)


def per_token(case: str) -> int:
    """Experts of a token."""
    return 3 if case.endswith(("glm4_moe", "gpt_oss")) else 2


@pytest.mark.parametrize("repeated", ["own", "half"])
@pytest.mark.parametrize("case", CASES)
def test_the_routers_own_choices_give_the_same_logits_and_gradients_bit_for_bit(
    results: dict[str, Any], case: str, repeated: str
) -> None:
    for passes in results[case]:
        free, again = passes["free"], passes[repeated]
        for free_NV, again_NV in zip(free["logits"], again["logits"], strict=True):
            assert torch.equal(free_NV, again_NV)
    free, again = (results[case][0][name]["gradients"] for name in ("free", repeated))
    assert len(free) > 50
    for name, gradient in free.items():
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("case", CASES)
def test_other_choices_move_the_logits_and_train_the_router(
    results: dict[str, Any], case: str
) -> None:
    moved = [
        float((free_NV - other_NV).abs().max())
        for passes in results[case]
        for free_NV, other_NV in zip(
            passes["free"]["logits"], passes["other"]["logits"], strict=True
        )
    ]
    assert min(moved) > 0.1
    free, other = (results[case][0][name]["gradients"] for name in ("free", "other"))
    routers = [name for name in free if name.endswith(ROUTERS)]
    assert len(routers) >= 3
    for name in routers:
        assert other[name].norm() > 1e-4
        assert not torch.allclose(other[name], free[name], rtol=0.1)


@pytest.mark.parametrize("case", CASES)
def test_metrics_say_what_was_repeated_and_where_the_router_agrees(
    results: dict[str, Any], case: str
) -> None:
    (free, own, half, other), *further = (
        [passes[name]["sums"] for name in ("free", "own", "half", "other")]
        for passes in results[case]
    )
    assert all(sums == [free, own, half, other] for sums in further)  # on every rank
    assert free["router_replayed"] == free["router_compared"] == 0
    assert own["router_replayed"] == own["router_tokens"] > 0
    assert own["router_matches"] == own["router_compared"]
    assert 0 < half["router_replayed"] < half["router_tokens"]
    assert half["router_matches"] == half["router_compared"]
    assert 0 < other["router_matches"] < 0.7 * other["router_compared"]
    assert own["router_compared"] == per_token(case) * own["router_tokens"]
    for sums in (free, own, half):
        assert sums["router_entropy"] == pytest.approx(free["router_entropy"])
        assert 0 < sums["router_entropy"] / sums["router_tokens"] < 2.08  # log 8
        assert sums["router_load"] == pytest.approx(free["router_load"])
        assert 1 < sums["router_load"] / sums["router_layers"] <= sums["router_load_max"] <= 8


@pytest.fixture(scope="module")
def balanced(routed: Models) -> dict[str, Any]:
    """Gradients without and with the loss, on rank 0."""
    of_ranks = by_rank(run_balanced, TESTED, routed)
    return {name: first for name, (first, *_) in of_ranks.items()}


def balancing_gradients(model: Any, family: str, problems: list[Problem]) -> dict[str, Tensor]:
    """Gradients of Σ_layers E Σ_e f_e P_e, averaged by tokens over micro-batches."""
    model.zero_grad()
    seen: dict[int, list[Tensor]] = {}
    for number, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "router" if family == "gpt_oss" else "gate", None)
        if router is not None:
            router.register_forward_hook(
                lambda _, __, output, number=number: seen.setdefault(number, []).append(output[0])
            )
    num_tokens = sum(problem.micro_batch.num_tokens for problem in problems)
    for problem in problems:
        seen.clear()
        reference_logits(model, problem)
        for passes in seen.values():
            logits_NE = torch.cat(passes)
            chosen_NK = logits_NE.topk(per_token(family), dim=-1).indices  # also with a bias
            assert len(logits_NE) == problem.micro_batch.num_tokens
            probability_NE = logits_NE.softmax(dim=-1)
            if family not in ("qwen3_moe", "gpt_oss"):
                probability_NE = logits_NE.sigmoid() / logits_NE.sigmoid().sum(-1, keepdim=True)
            share_E = torch.bincount(chosen_NK.flatten(), minlength=8) / chosen_NK.numel()
            loss = 8 * (share_E * probability_NE.mean(dim=0)).sum()
            (BALANCE * loss * len(logits_NE) / num_tokens).backward(retain_graph=True)
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return per_expert({name: grad for name, grad in named.items() if grad is not None}, model)


@pytest.mark.parametrize("case", CASES)
def test_the_load_balancing_loss_has_the_gradient_of_its_formula_in_every_layout(
    balanced: dict[str, Any], routed: Models, case: str
) -> None:
    layout, _, family = case.rpartition(", ")
    context_size = next(x for x in TESTED if x.name == layout).sizes.get("context", 1)
    problems = make_problems(0, *multiples_of(context_size), batches=BATCHES)
    oracle = Oracle.of(family, routed[family])
    rest = oracle.gradients(problems)
    both = oracle.both(lambda model: balancing_gradients(model, family, problems))
    expected = Gradients.of(*both)
    plain, with_loss = balanced[case]
    assert sum(name.endswith(ROUTERS) for name in expected.exact) >= 3
    for name, gradient in plain.items():
        error = with_loss[name].double() - gradient - expected.exact.get(name, 0.0)
        # The rest is in both gradients, each with its own rounding.
        bound = expected.bounds.get(name, 0.0) + 2 * rest.bounds[name]
        assert_within(error.norm(), bound, name)
