"""Score centering against float64 autograd over the whole vocabulary, head and tail spelt out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.chunked import Chunks, OutputHead, chunked_loss
from bapo_megatron.trainer.loss import MicroBatchLoss, SafeTokens
from tests.fakes.given_tokens import CONTEXT, CPU, make_micro_batch
from tests.tolerances import HEADROOM

NUM_TOKENS, VOCAB_SIZE, PADDED, HIDDEN_SIZE = 48, 37, 40, 16
Weight = Callable[[Tensor, Tensor], Tensor]
"""f(r, A), [T, V] from ratios [T, V] and advantages [T, 1]."""


def clipped(low: float, high: float, dual: float = math.inf) -> Weight:
    def weight(ratio: Tensor, advantage: Tensor) -> Tensor:
        positive, negative = ratio <= high, (ratio >= low) & (ratio <= dual)
        return ratio * torch.where(advantage > 0, positive, negative)

    return weight


KINDS: dict[str, tuple[dict[str, Any], Weight]] = {
    "reinforce": ({"objective": "reinforce"}, lambda r, _: torch.ones_like(r)),
    "truncated": (
        {"objective": "cispo", "cispo": {"low": 0.0, "high": 1.05}},
        lambda r, _: r.clamp(max=1.05),
    ),
    "cispo": (
        {"objective": "cispo", "cispo": {"low": 0.95, "high": 1.05}},
        lambda r, _: r.clamp(0.95, 1.05),
    ),
    "clip": ({"objective": "clip", "fixed": {"low": 0.75, "high": 1.25}}, clipped(0.75, 1.25)),
    "dual": (
        {"objective": "clip", "fixed": {"low": 0.75, "high": 1.25}, "dual_clip": 2.0},
        clipped(0.75, 1.25, 2.0),
    ),
    "bapo": ({"objective": "bapo"}, clipped(0.625, 1.5)),
}


class Problem:
    """Tokens sampled by q, a perturbed policy; some do not train, one has no head."""

    def __init__(self, top_k: int, *, drift: float, temperature: float, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.temperature, self.top_k = temperature, top_k
        self.hidden_TH = normal(NUM_TOKENS, HIDDEN_SIZE)
        self.weight_VH = 0.4 * normal(PADDED, HIDDEN_SIZE)
        logits_TV = (self.hidden_TH.double() @ self.weight_VH.double().t())[:, :VOCAB_SIZE]
        moved_TV = logits_TV + drift * normal(NUM_TOKENS, VOCAB_SIZE)
        self.log_q_TV = (moved_TV / temperature).log_softmax(dim=1)
        self.target_T = torch.multinomial(self.log_q_TV.exp(), 1, generator=generator)[:, 0]
        self.advantage_T, self.mask_T = normal(NUM_TOKENS), torch.ones(NUM_TOKENS)
        self.advantage_T[5], self.mask_T[7:9] = 0, 0
        self.top = self.log_q_TV.topk(top_k, dim=1)
        self.loss_weight_T = self.mask_T * torch.rand(NUM_TOKENS, generator=generator)

    def gradients(self, kind: str, *, chunk_tokens: int = 13, centred: bool = True) -> list[Tensor]:
        """By the package, of hidden states and head."""
        algorithm = {**KINDS[kind][0], "centering": {"top_k": self.top_k if centred else 0}}
        config = AlgorithmConfig.model_validate(algorithm)
        columns = {}
        if centred:
            top_TK = self.top.values.float()
            columns = {"sampler_top_ids": self.top.indices, "sampler_top_logprobs": top_TK}
        micro_batch = make_micro_batch(
            behaviour_logprob_T=self.log_q_TV.gather(1, self.target_T[:, None])[:, 0].float(),
            target_T=self.target_T,
            advantage_T=self.advantage_T,
            mask_T=self.mask_T,
            loss_weight_T=self.loss_weight_T,
            columns=columns,
        )
        decision = torch.tensor([0.625, 1.5], dtype=torch.float64) if kind == "bapo" else None
        safe = SafeTokens(config, micro_batch, decision, CONTEXT, CPU)
        token_loss = MicroBatchLoss(load_objective(config).objective, safe)
        token_loss.is_whole_head = self.top_k == VOCAB_SIZE
        hidden_TH, weight_VH = (
            t.clone().requires_grad_() for t in (self.hidden_TH, self.weight_VH)
        )
        chunks = Chunks(
            OutputHead(weight_VH),
            self.target_T,
            torch.arange(NUM_TOKENS),
            VOCAB_SIZE,
            self.temperature,
            chunk_tokens,
            head_TK=self.top.indices if centred else None,
        )
        loss, _ = chunked_loss(hidden_TH, chunks, token_loss)
        loss.backward()
        assert hidden_TH.grad is not None
        assert weight_VH.grad is not None
        self.loss_stage = token_loss
        return [hidden_TH.grad, weight_VH.grad]

    def oracle(self, weight: Weight, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """−A (w_a log p_a − Σ_v q̂_v w_v log p_v) with the weights detached, and its gradients."""
        hidden_TH, weight_VH = (
            t.to(dtype, copy=True).requires_grad_() for t in (self.hidden_TH, self.weight_VH)
        )
        logits_TV = (hidden_TH @ weight_VH.t())[:, :VOCAB_SIZE] / self.temperature
        log_p_TV = logits_TV.log_softmax(dim=1)
        p_TV, q_TV = log_p_TV.detach().exp(), self.log_q_TV.to(dtype).exp()
        advantage_T1 = self.advantage_T[:, None].to(dtype)
        is_head_TV = torch.zeros_like(p_TV, dtype=torch.bool).scatter(1, self.top.indices, True)
        outside_TV = ~is_head_TV
        if self.top_k < VOCAB_SIZE:
            rho_T1 = (q_TV * outside_TV).sum(1, True) / (p_TV * outside_TV).sum(1, True)
            modelled_TV = torch.where(is_head_TV, q_TV, rho_T1 * p_TV)
        else:
            modelled_TV = q_TV
        target_T1 = self.target_T[:, None]
        own_T1 = weight((p_TV / q_TV).gather(1, target_T1), advantage_T1)
        mean_T = (modelled_TV * weight(p_TV / modelled_TV, advantage_T1) * log_p_TV).sum(1)
        score_T = (own_T1 * log_p_TV.gather(1, target_T1))[:, 0] - mean_T
        loss = -(self.loss_weight_T.to(dtype) * self.advantage_T.to(dtype) * score_T).sum()
        return list(torch.autograd.grad(loss, [hidden_TH, weight_VH]))


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, over the largest value."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a.double() - e).abs().max() / e.abs().max()) for a, e in pairs)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_k", [1, 8, VOCAB_SIZE])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_autograd_in_float64(kind: str, top_k: int, temperature: float) -> None:
    problem = Problem(top_k, drift=0.4, temperature=temperature)
    expected = problem.oracle(KINDS[kind][1])
    bound = HEADROOM * error(problem.oracle(KINDS[kind][1], torch.float32), expected)
    assert error(problem.gradients(kind), expected) < max(bound, 1e-6)
    plain = problem.gradients(kind, centred=False)
    assert error(plain, expected) > 1e-3  # centering is not a small part of the gradient


@pytest.mark.parametrize("top_k", [1, 8, VOCAB_SIZE])
def test_exact_importance_sampling_has_nothing_to_center(top_k: int) -> None:
    """With f = r the sum over the vocabulary vanishes for every k, and so below a cap."""
    problem = Problem(top_k, drift=0.1, temperature=1.0)
    KINDS["uncapped"] = ({"objective": "cispo", "cispo": {"high": 1e6}}, lambda r, _: r)
    try:
        difference = error(
            problem.gradients("uncapped"),
            [g.double() for g in problem.gradients("uncapped", centred=False)],
        )
    finally:
        del KINDS["uncapped"]
    assert difference < 4e-6


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_nothing_is_removed(kind: str) -> None:
    problem = Problem(8, drift=0.0, temperature=1.0)
    plain = [g.double() for g in problem.gradients(kind, centred=False)]
    assert error(problem.gradients(kind), plain) < 4e-6


def test_what_is_reported_of_each_token() -> None:
    problem = Problem(8, drift=0.4, temperature=1.0)
    problem.gradients("reinforce")
    head = problem.loss_stage.head_T
    assert head is not None
    log_p_TV = (problem.hidden_TH.double() @ problem.weight_VH.double().t())[:, :VOCAB_SIZE]
    p_TK = log_p_TV.log_softmax(1).exp().gather(1, problem.top.indices)
    torch.testing.assert_close(head.policy_mass_T, p_TK.sum(1), rtol=1e-5, atol=1e-5)
    q_TK = problem.top.values.exp()
    torch.testing.assert_close(head.sampler_mass_T, q_TK.sum(1), rtol=1e-5, atol=1e-5)
    rho_T = (1 - q_TK.sum(1)) / (1 - p_TK.sum(1))
    drift_T = (q_TK - rho_T[:, None] * p_TK).abs().sum(1)
    torch.testing.assert_close(head.coefficient_TK[:, 0], drift_T, rtol=1e-4, atol=1e-4)
    assert not head.is_limited_T.any()


def test_a_tail_that_only_one_side_has_is_limited() -> None:
    problem = Problem(8, drift=0.4, temperature=1.0)
    problem.top = problem.top.__class__((problem.top.values.softmax(1).log(), problem.top.indices))
    assert all(gradient.isfinite().all() for gradient in problem.gradients("reinforce"))
    head = problem.loss_stage.head_T
    assert head is not None
    assert head.is_limited_T.all()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"objective": "none"}, r"objective must be .*bapo.*, got none"),
        ({"objective": "gspo"}, r"objective must be .*, got gspo"),
        ({"objective": "reinforce", "behaviour": "recomputed"}, r"behaviour must be rollout"),
    ],
)
def test_what_cannot_be_centred_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate({**algorithm, "centering": {"top_k": 8}})
