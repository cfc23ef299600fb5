"""The objectives by name: derivatives of the published losses, and tokens by hand.

The published losses are written out here with their stop-gradients (``.detach()``), per token or
per response, and differentiated by autograd in float64. Shape legend: T = tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.loss import differentiate, with_sums
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.algorithm.objectives import NAMED
from bapo_megatron.config.load import ConfigError, parse_section
from bapo_megatron.config.schema import OBJECTIVES, AlgorithmConfig
from tests.algorithm.batches import make_objective
from tests.fakes.given_tokens import make_tokens

TOKENS, RESPONSES = 400, 12


def random_tokens(seed: int = 0, spread: float = 0.7) -> TokenBatch:
    """Float64 tokens of ``RESPONSES`` responses, with ratios on both sides of all bounds."""
    generator = torch.Generator().manual_seed(seed)
    response_T = torch.randint(RESPONSES, (TOKENS,), generator=generator)
    count_B = torch.bincount(response_T, minlength=RESPONSES)
    advantage_B = torch.randn(RESPONSES, generator=generator, dtype=torch.float64)
    behaviour_T = -3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    noise_T = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    drift_B = 0.2 * torch.randn(RESPONSES, generator=generator, dtype=torch.float64)
    return make_tokens(
        behaviour_T + spread * (noise_T + drift_B[response_T]),
        behaviour_T,
        advantage_B[response_T],
        reward=(advantage_B > 0.3).double()[response_T],
        response=response_T,
        response_tokens=count_B[response_T].double(),
        entropy_T=3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64),
    )


def coefficients(objective: Objective, tokens: TokenBatch, weight_T: Tensor) -> Tensor:
    return differentiate(objective, with_sums(objective, tokens), weight_T).logprob_T


def by_ratio(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[TokenBatch, Tensor], Tensor]:
    """A loss of r and A as one of tokens and ℓ."""
    return lambda t, logprob: loss((logprob - t.behaviour_logprob).exp(), t.advantage)


def _ppo(r: Tensor, a: Tensor, low: Any, high: Any, dual: float = math.inf) -> Tensor:
    loss = torch.maximum(-a * r, -a * r.clamp(low, high))
    return torch.where(a < 0, torch.minimum(loss, -a * dual), loss)


def _sapo(r: Tensor, a: Tensor) -> Tensor:
    gate = {tau: torch.sigmoid(tau * (r - 1)) * 4 / tau for tau in (1.5, 2.5)}
    return -torch.where(a > 0, gate[1.5], gate[2.5]) * a


def _ce_gppo(r: Tensor, a: Tensor) -> Tensor:
    loss = -r * a
    loss = torch.where((a < 0) & (r < 0.8), -0.5 * 0.8 / r.detach() * r * a, loss)
    loss = torch.where((a > 0) & (r > 1.2), -0.9 * 1.2 / r.detach() * r * a, loss)
    return torch.where(a < 0, torch.minimum(loss, -a * 3), loss)


def _aspo(t: TokenBatch, logprob: Tensor) -> Tensor:
    r, a = (logprob - t.behaviour_logprob).exp(), t.advantage
    up, down = r.clamp(max=1.2), r.clamp(min=0.8)
    turned = -a * up / up.detach() / up.detach()
    turned = torch.where(1 / up > 1.5, -a * 1.5 * logprob, turned)
    kept = torch.where(down > 1.5, -a * 1.5 * logprob, -a * down)
    return torch.where(a < 0, kept, turned)


def _topr(t: TokenBatch, logprob: Tensor) -> Tensor:
    r = (logprob.detach() - t.behaviour_logprob).exp()
    positive, negative = (t.reward > 0).double(), (t.reward <= 0).double()
    return -(positive + negative * r.clamp(0, 1)) * t.advantage * logprob


def _dppo_tv(t: TokenBatch, logprob: Tensor) -> Tensor:
    p, q = logprob.exp(), t.behaviour_logprob.exp()
    valid = torch.where(t.advantage > 0, p - q <= 0.1, p - q >= -0.1).double()
    return -t.advantage * (p / q).clamp(max=1.7).detach() * logprob * valid.detach()


def _dcpo(t: TokenBatch, logprob: Tensor) -> Tensor:
    q = t.behaviour_logprob.exp()
    root = 1 - 4 * 0.16 / q
    low = (1 + torch.sqrt(torch.where(root > 0, root, 0.0))) / 2
    high = torch.clamp((1 + torch.sqrt(1 + 4 * 0.2 / q)) / 2, max=1.9)
    return _ppo(logprob.exp() / q, t.advantage, low, high, 3.0)


def _responses(t: TokenBatch) -> list[Tensor]:
    return [torch.nonzero(t.response == b).squeeze(1) for b in range(RESPONSES)]


def _per_response(t: TokenBatch, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """Mean over responses of a loss of their tokens' x and their advantage."""
    losses = [loss(x[index], t.advantage[index[0]]) for index in _responses(t)]
    return torch.stack(losses).mean()


def _gspo(t: TokenBatch, logprob: Tensor) -> Tensor:
    return _per_response(
        t,
        lambda x, a: _ppo(x.mean().exp(), a, 0.9, 1.1, 1.3),
        logprob - t.behaviour_logprob,
    )


def _gmpo(t: TokenBatch, logprob: Tensor) -> Tensor:
    def loss(x: Tensor, a: Tensor) -> Tensor:
        held = torch.sign(a) * torch.minimum(torch.sign(a) * x, torch.sign(a) * x.clamp(-0.4, 0.3))
        return -a * torch.prod(held.exp()) ** (1 / len(x))

    return _per_response(t, loss, logprob - t.behaviour_logprob)


def _opsm(t: TokenBatch, logprob: Tensor) -> Tensor:
    def loss(x: Tensor, a: Tensor) -> Tensor:
        kl = -x.detach().mean()
        return _ppo(x.exp(), a, 0.8, 1.2).mean() * float(a >= 0 or kl <= 0.05)

    return _per_response(t, loss, logprob - t.behaviour_logprob)


def _m2po(t: TokenBatch, logprob: Tensor) -> Tensor:
    """Given the threshold, that of the decision."""
    low, high, _, _ = make_objective(objective="m2po", m2po=M2PO).decide(
        make_objective(objective="m2po", m2po=M2PO).statistics(t)
    )
    return _ppo((logprob - t.behaviour_logprob).exp(), t.advantage, low, high)


M2PO = {"budget": 0.1, "max_low": 0.95, "min_high": 1.05}
FIXED = {"low": 0.8, "high": 1.2}
CASES: dict[str, tuple[dict[str, Any], Callable[[TokenBatch, Tensor], Tensor]]] = {
    "clip": ({"fixed": FIXED, "dual_clip": 3.0}, by_ratio(lambda r, a: _ppo(r, a, 0.8, 1.2, 3.0))),
    "none": ({}, by_ratio(lambda r, a: -a * r)),
    "reinforce": ({}, lambda t, logprob: -t.advantage * logprob),
    "nll": ({}, lambda t, logprob: -t.reward * logprob),
    "cispo": (
        {"cispo": {"low": 0.5, "high": 1.5}},
        lambda t, logprob: (
            -(logprob - t.behaviour_logprob).exp().clamp(0.5, 1.5).detach() * t.advantage * logprob
        ),
    ),
    "sapo": ({"sapo": {"positive": 1.5, "negative": 2.5}}, by_ratio(_sapo)),
    "ce_gppo": (
        {"ce_gppo": {"beta_low": 0.5, "beta_high": 0.9}, "fixed": FIXED, "dual_clip": 3.0},
        by_ratio(_ce_gppo),
    ),
    "aspo": ({"aspo": {"cap": 1.5}, "fixed": FIXED}, _aspo),
    "topr": ({}, _topr),
    "dppo_tv": ({"dppo_tv": {"delta": 0.1, "cap": 1.7}}, _dppo_tv),
    "dcpo": ({"dcpo": {"max_high": 1.9}, "dual_clip": 3.0}, _dcpo),
    "gspo": ({"gspo": {"low": 0.9, "high": 1.1}, "dual_clip": 1.3}, _gspo),
    "gmpo": ({"gmpo": {"log_low": -0.4, "log_high": 0.3}}, _gmpo),
    "opsm": ({"opsm": {"delta": 0.05}, "fixed": FIXED}, _opsm),
    "m2po": ({"m2po": M2PO}, _m2po),
}
"""Settings in which every branch of the loss has tokens, and the published loss with them: of each
token [T], or the mean over responses."""


def test_every_name_is_an_objective_and_has_a_published_loss() -> None:
    assert tuple(NAMED) == OBJECTIVES
    kinds = [entry.options for entry in NAMED.values() if entry.options]
    assert all(isinstance(AlgorithmConfig().options(kind), kind) for kind in kinds)
    assert set(OBJECTIVES) - set(CASES) == {"bapo"}  # tests/algorithm/test_bapo.py


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_the_derivative_is_that_of_the_published_loss(name: str, seed: int) -> None:
    settings, published = CASES[name]
    tokens = random_tokens(seed)
    leaf_T = tokens.logprob.clone().requires_grad_()
    loss = published(tokens, leaf_T)
    weight_T = torch.ones(TOKENS, dtype=torch.float64)
    if loss.dim() == 0:  # the mean over responses: sequence_mean
        weight_T = 1 / tokens.response_tokens / RESPONSES
    expected_T = torch.autograd.grad(loss.sum(), leaf_T)[0]
    coefficient_T = coefficients(make_objective(objective=name, **settings), tokens, weight_T)
    torch.testing.assert_close(coefficient_T, expected_T, rtol=1e-6, atol=1e-9)
    held = {name for name in ("none", "reinforce", "nll", "cispo", "sapo", "topr") if name in CASES}
    assert name in held or 0 < int((expected_T == 0).sum()) < TOKENS


# Coefficients ∂loss/∂ℓ by hand: (r, A) → the coefficient; μ = log ½, so that p = r/2.
BY_HAND: list[tuple[dict[str, Any], list[tuple[float, float, float]]]] = [
    ({"objective": "reinforce"}, [(0.5, 2.0, -2.0), (1.5, -1.0, 1.0)]),
    ({"objective": "cispo"}, [(0.25, 1.0, -0.25), (8.0, 1.0, -5.0), (8.0, -2.0, 10.0)]),
    # σ(1) = 0.7310586, 4σ(1 − σ) = 0.7864477 at r = 2, and 1 at r = 1
    ({"objective": "sapo"}, [(1.0, 1.0, -1.0), (1.0, -1.0, 1.0), (2.0, 1.0, -1.5728955)]),
    (
        {"objective": "ce_gppo", "dual_clip": 3.0},
        [(1.5, 1.0, -1.2), (0.5, -1.0, 0.6), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (4.0, -1.0, 0.0)],
    ),
    (
        {"objective": "aspo"},
        [(1.25, 1.0, 0.0), (0.5, 1.0, -2.0), (0.25, 1.0, -3.0), (0.5, -1.0, 0.0), (4.0, -2.0, 6.0)],
    ),
    ({"objective": "topr"}, [(0.5, -1.0, 0.5), (1.5, -1.0, 1.0), (1.5, 1.0, -1.0)]),
    # p − q = 0.125, 0.25, −0.125, −0.25
    (
        {"objective": "dppo_tv"},
        [(1.25, 1.0, -1.25), (1.5, 1.0, 0.0), (0.75, -1.0, 0.75), (0.5, -1.0, 0.0), (0.5, 1, -0.5)],
    ),
    # c_low = ½ since 4 · 0.16 / ½ > 1, c_high = ½ + ½√2.6 = 1.3062
    (
        {"objective": "dcpo"},
        [(1.3, 1.0, -1.3), (1.31, 1.0, 0.0), (0.49, -1.0, 0.0), (0.51, -1.0, 0.51)],
    ),
]


@pytest.mark.parametrize(("settings", "rows"), BY_HAND, ids=lambda case: str(case)[:24])
def test_coefficients_by_hand(
    settings: dict[str, Any], rows: list[tuple[float, float, float]]
) -> None:
    ratios, advantages, expected = (
        torch.tensor(v, dtype=torch.float64) for v in zip(*rows, strict=True)
    )
    behaviour_T = torch.full_like(ratios, math.log(0.5))
    tokens = make_tokens(behaviour_T + ratios.log(), behaviour_T, advantages)
    coefficient_T = coefficients(make_objective(**settings), tokens, torch.ones_like(ratios))
    assert coefficient_T.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["gspo", "gmpo", "opsm"])
def test_a_response_without_a_token_that_trains_has_a_finite_loss_and_no_gradient(
    name: str,
) -> None:
    # The loss stage gives such tokens ℓ = μ, A = 0 and mask 0.
    zero_T = torch.zeros(2, dtype=torch.float64)
    tokens = make_tokens(zero_T - 1, zero_T - 1, zero_T, mask_T=zero_T)
    assert tokens.response_tokens.tolist() == [0.0, 0.0]
    objective = make_objective(objective=name)
    computed = differentiate(objective, with_sums(objective, tokens), zero_T)
    assert computed.loss_T.tolist() == [0.0, 0.0]
    assert computed.logprob_T.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"cispo": {"high": 0.9}}, "'cispo.high' must be"),
        ({"cispo": {"low": 1.1}}, "'cispo.low' must be"),
        ({"sapo": {"positive": 0}}, "'sapo.positive' must be greater than 0"),
        ({"ce_gppo": {"beta_low": -1}}, "'ce_gppo.beta_low' must be"),
        ({"aspo": {"cap": 0.5}}, "'aspo.cap' must be"),
        ({"dppo_tv": {"delta": 0}}, "'dppo_tv.delta' must be greater than 0"),
        ({"dcpo": {"epsilon_low": -0.1}}, "'dcpo.epsilon_low' must be"),
        ({"gspo": {"low": 1.1}}, "'gspo.low' must be"),
        ({"gmpo": {"log_low": 0.1}}, "'gmpo.log_low' must be"),
        ({"opsm": {"delta": -1}}, "'opsm.delta' must be"),
        ({"m2po": {"budget": 0}}, "'m2po.budget' must be greater than 0"),
        ({"m2po": {"tau": 1}}, "unknown key 'm2po.tau'"),
        ({"entropy_share": 0}, "'entropy_share' must be greater than 0"),
        ({"entropy_share": 1.1}, "'entropy_share' must be"),
        ({"objective": "cispo", "dual_clip": 3.0}, "'dual_clip' is for bapo, .* objective: cispo"),
        ({"baseline_shift": -0.1}, "'baseline_shift' is for .* advantage: grpo"),
    ],
)
def test_settings_out_of_range_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_section(AlgorithmConfig, section, place="test")


@pytest.mark.parametrize(
    "algorithm",
    [
        {"objective": "gspo"},
        {"objective": "gmpo"},
        {"objective": "opsm"},
        {"bapo": {"scope": "micro_batch"}},
        {"bapo": {"speculate": "always"}},
        {"objective": "m2po", "m2po": {"speculate": "always"}},
    ],
    ids=str,
)
def test_a_share_of_tokens_needs_an_objective_of_tokens_or_updates(
    algorithm: dict[str, Any],
) -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm\.entropy_share: must be 1 with an objective"
    ):
        make_objective(**algorithm, entropy_share=0.2)


def test_the_recipe_has_its_dual_clip_where_there_is_one() -> None:
    recipe = {"bapo": {"preset": "recipe"}}
    assert AlgorithmConfig.model_validate(recipe).dual_clip == 3.0
    assert AlgorithmConfig.model_validate(recipe | {"objective": "clip"}).dual_clip == 3.0
    assert AlgorithmConfig.model_validate(recipe | {"objective": "cispo"}).dual_clip is None


def test_a_token_at_the_limit_of_gmpo_is_not_clipped() -> None:
    objective = make_objective(objective="gmpo", gmpo={"log_low": -0.5, "log_high": 0.5})
    logprob_T = torch.tensor([0.5, 0.51, -0.5, -0.51])
    advantage_T = torch.tensor([1.0, 1.0, -1.0, -1.0])
    report = objective.report(make_tokens(logprob_T, torch.zeros(4), advantage_T))
    assert report["clip/fraction_high"].tolist() == [False, True, False, False]
    assert report["clip/fraction_low"].tolist() == [False, False, False, True]


def test_an_objective_selects_all_tokens_with_mask_1_by_default() -> None:
    zero_T = torch.zeros(3)
    tokens = make_tokens(zero_T, zero_T, zero_T, torch.tensor([1.0, 0.0, 1.0]))
    assert make_objective(objective="clip").select(tokens).tolist() == [True, False, True]
