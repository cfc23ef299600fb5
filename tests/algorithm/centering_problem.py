"""Centred losses of tokens, by the package and in float64 with head and tail spelt out."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.ops.chunked import Chunks, OutputHead, chunked_loss
from bapo_megatron.trainer.loss import MicroBatchLoss, SafeTokens
from tests.fakes.given_tokens import CONTEXT, CPU, make_micro_batch

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

    def gradients(
        self,
        kind: str,
        *,
        chunk_tokens: int = 13,
        centred: bool = True,
        columns_of: slice = slice(None),
        group: dist.ProcessGroup | None = None,
    ) -> list[Tensor]:
        """By the package, of hidden states and of a rank's columns of the head."""
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
        hidden_TH = self.hidden_TH.clone().requires_grad_()
        weight_VH = self.weight_VH[columns_of].clone().requires_grad_()
        chunks = Chunks(
            OutputHead(weight_VH, group),
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
