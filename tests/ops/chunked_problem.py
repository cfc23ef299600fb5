"""A small language-model head with tokens, its loss by the three ways, and how to compare them.

Shape legend: N = rows of hidden states, H = hidden size, V = padded vocabulary, T = response
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.loss import differentiate
from bapo_megatron.algorithm.objectives.clip import FixedClip
from bapo_megatron.ops import chunked
from bapo_megatron.ops.chunked import Chunks, OutputHead, TeacherRows
from bapo_megatron.ops.logprob import (
    LossGradient,
    TokenLogprobs,
    apply_token_loss,
    vocab_parallel_logprobs,
)
from tests.fakes.given_tokens import make_tokens
from tests.oracles.kl import kl_divergence
from tests.oracles.policy_loss import policy_loss
from tests.tolerances import HEADROOM

VOCAB_SIZE, PADDED_VOCAB, HIDDEN_SIZE = 41, 64, 24
TEMPERATURE = 0.9
LOW, HIGH, DUAL_CLIP = 0.8, 1.25, 3.0
EARLIER_GRADIENT = 2.0**-6
"""What ``main_grad`` holds before the loss, as from a micro-batch before."""


@dataclass(frozen=True)
class Tokens:
    """[T] each."""

    rows_T: Tensor
    target_T: Tensor
    behaviour_logprob_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor
    loss_weight_T: Tensor

    def select(self, index: Any) -> Tokens:
        return Tokens(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True)
class Problem:
    hidden_NH: Tensor
    weight_VH: Tensor
    tokens: Tokens

    def to(self, device: str, dtype: torch.dtype) -> Problem:
        return Problem(
            self.hidden_NH.to(device, dtype),
            self.weight_VH.to(device, dtype),
            replace(
                self.tokens,
                **{f.name: getattr(self.tokens, f.name).to(device) for f in fields(self.tokens)},
            ),
        )


@dataclass(frozen=True)
class Outcome:
    """A loss with everything that comes of it; gradients are those of weight and hidden states."""

    loss: Tensor
    logprob_T: Tensor
    entropy_T: Tensor
    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    kl_T: Tensor | None = None
    """With a teacher."""


class ClippedLoss:
    """A ``TokenLoss``: the clipped loss, an entropy bonus, and a divergence where it gets one."""

    def __init__(
        self, tokens: Tokens, entropy_coefficient: float = 0.0, *, ignores_kl: bool = False
    ) -> None:
        self.kl_T = torch.full_like(tokens.mask_T, torch.nan)
        """That it was called with."""
        self._tokens = tokens
        self._entropy_coefficient = entropy_coefficient
        self._ignores_kl = ignores_kl

    def __call__(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor,
        part: slice,
        kl_T: Tensor | None = None,
        head_TK: Tensor | None = None,
    ) -> LossGradient:
        assert len(logprob_T) == len(entropy_T) == part.stop - part.start > 0
        assert not logprob_T.requires_grad
        assert not entropy_T.requires_grad
        chunk = self._tokens.select(part)
        batch = make_tokens(
            logprob_T, chunk.behaviour_logprob_T, chunk.advantage_T, chunk.mask_T, entropy_T
        )
        weight_T, bonus_T = chunk.loss_weight_T * chunk.mask_T, None
        objective = FixedClip(LOW, HIGH, DUAL_CLIP)
        _, loss_T, by_logprob_T, _ = differentiate(objective, batch, weight_T)
        loss = (weight_T * loss_T).sum(dtype=torch.float64)
        if self._entropy_coefficient != 0:
            bonus_T = -self._entropy_coefficient * weight_T
            loss = loss + (bonus_T * entropy_T).sum(dtype=torch.float64)
        if kl_T is None or self._ignores_kl:
            return LossGradient(loss, by_logprob_T, bonus_T)
        assert kl_T.shape == logprob_T.shape
        assert not kl_T.requires_grad
        self.kl_T[part] = kl_T
        by_kl_T = kl_weights(chunk)
        loss = loss + (by_kl_T * kl_T).sum(dtype=torch.float64)
        return LossGradient(loss, by_logprob_T, bonus_T, by_kl_T)


def kl_weights(tokens: Tokens) -> Tensor:
    """[T] of the size of the clipped loss's, 0 where the mask is."""
    return 0.3 * tokens.loss_weight_T


def make_teacher(problem: Problem, direction: Any, *, hidden_size: int = 16) -> TeacherRows:
    """A teacher of another hidden size for the problem's tokens."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((len(problem.tokens.rows_T), hidden_size), (PADDED_VOCAB, hidden_size))
    hidden_TH, weight_VH = (torch.randn(*shape, generator=generator) for shape in shapes)
    dtype = problem.weight_VH.dtype
    return TeacherRows(
        hidden_TH.to(dtype), OutputHead((weight_VH / hidden_size**0.5).to(dtype)), direction
    )


def make_problem(num_rows: int = 90, num_tokens: int = 61, seed: int = 0) -> Problem:
    """Tokens in random order, on both sides of both bounds, one in six with mask 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden_NH, weight_VH = normal(num_rows, HIDDEN_SIZE), normal(PADDED_VOCAB, HIDDEN_SIZE) / 3
    rows_T = torch.randperm(num_rows, generator=generator)[:num_tokens]
    target_T = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)
    logits_TV = (hidden_NH @ weight_VH.t())[rows_T, :VOCAB_SIZE] / TEMPERATURE
    logprob_T = logits_TV.log_softmax(1).gather(1, target_T[:, None]).squeeze(1)
    mask_T = (torch.arange(num_tokens) % 6 != 5).float()
    tokens = Tokens(
        rows_T=rows_T,
        target_T=target_T,
        behaviour_logprob_T=logprob_T + 0.4 * normal(num_tokens),
        advantage_T=normal(num_tokens),
        mask_T=mask_T,
        loss_weight_T=mask_T * torch.rand(num_tokens, generator=generator) / max(num_tokens, 1),
    )
    return Problem(hidden_NH, weight_VH, tokens)


def away_from_bounds(problem: Problem) -> Problem:
    """Mask 0 where 16 bits, which move a log-prob by up to 0.05, could change a token's side."""
    exact = run_oracle(problem, entropy_coefficient=0.0)
    log_T = exact.logprob_T - problem.tokens.behaviour_logprob_T
    near_T = torch.stack([(log_T - math.log(x)).abs() < 0.05 for x in (LOW, HIGH, DUAL_CLIP)])
    far_T = ~near_T.any(0)
    mask_T, weight_T = problem.tokens.mask_T * far_T, problem.tokens.loss_weight_T * far_T
    return replace(problem, tokens=replace(problem.tokens, mask_T=mask_T, loss_weight_T=weight_T))


def leaves(problem: Problem) -> tuple[Tensor, Tensor]:
    return (
        problem.hidden_NH.detach().clone().requires_grad_(),
        problem.weight_VH.detach().clone().requires_grad_(),
    )


def with_main_grad(weight_VH: Tensor, **attributes: Any) -> Tensor:
    """As Megatron's data parallelism prepares a parameter."""
    parameter: Any = torch.nn.Parameter(weight_VH.clone())
    parameter.main_grad = torch.full(weight_VH.shape, EARLIER_GRADIENT)
    parameter.grad_added_to_main_grad = False
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def chunked_loss(
    hidden_MH: Tensor,
    head: OutputHead,
    tokens: Tokens,
    token_loss: ClippedLoss | None = None,
    **changes: Any,
) -> tuple[Tensor, TokenLogprobs]:
    token_loss = token_loss or ClippedLoss(tokens)
    return chunked.chunked_loss(hidden_MH, chunks_of(head, tokens, **changes), token_loss)


def chunks_of(head: OutputHead, tokens: Tokens, **changes: Any) -> Chunks:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "temperature": TEMPERATURE,
        "chunk_tokens": 16,
    }
    return Chunks(head, tokens.target_T, tokens.rows_T, **{**settings, **changes})


def collect(
    hidden_MH: Tensor, head: OutputHead, tokens: Tokens, chunk_tokens: int
) -> TokenLogprobs:
    """Log-probs and entropies without gradient, with this module's settings."""
    return chunked.chunked_logprobs(hidden_MH, chunks_of(head, tokens, chunk_tokens=chunk_tokens))


def run_chunked(
    problem: Problem,
    *,
    entropy_coefficient: float = 0.0,
    token_loss: ClippedLoss | None = None,
    teacher: TeacherRows | None = None,
    **changes: Any,
) -> Outcome:
    hidden_NH, weight_VH = leaves(problem)
    token_loss = token_loss or ClippedLoss(problem.tokens, entropy_coefficient)
    head, changes = OutputHead(weight_VH), changes | {"teacher": teacher}
    loss, policy = chunked_loss(hidden_NH, head, problem.tokens, token_loss, **changes)
    loss.backward()
    kl_T = None if teacher is None else token_loss.kl_T
    return Outcome(loss.detach(), *policy, hidden_NH.grad, weight_VH.grad, kl_T)


def run_unchunked(
    problem: Problem,
    *,
    entropy_coefficient: float,
    columns: slice = slice(None),
    group: dist.ProcessGroup | None = None,
) -> Outcome:
    """All logits at once, through the ops that the chunked path replaces.

    With a group this rank has some columns, and the gradient of the hidden states is its part.
    """
    hidden_NH, weight_VH = leaves(problem)
    tokens = problem.tokens
    logprob_T, entropy_T = vocab_parallel_logprobs(
        hidden_NH @ weight_VH[columns].t(),
        tokens.target_T,
        vocab_size=VOCAB_SIZE,
        rows_T=tokens.rows_T,
        temperature=TEMPERATURE,
        group=group,
    )
    loss = apply_token_loss(logprob_T, entropy_T, ClippedLoss(tokens, entropy_coefficient))
    loss.backward()
    results = (loss.detach(), logprob_T.detach(), entropy_T.detach())
    return Outcome(*results, hidden_NH.grad, weight_VH.grad)


def run_oracle(
    problem: Problem,
    *,
    entropy_coefficient: float,
    teacher: TeacherRows | None = None,
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """Autograd in float64, without any op of the package."""
    hidden_NH, weight_VH = leaves(problem.to("cpu", dtype))
    tokens = problem.tokens
    logits_TV = (hidden_NH @ weight_VH.t())[tokens.rows_T, :VOCAB_SIZE]
    all_TV = (logits_TV / TEMPERATURE).log_softmax(1)
    logprob_T = all_TV.gather(1, tokens.target_T[:, None]).squeeze(1)
    entropy_T = -(all_TV.exp() * all_TV).sum(1)
    loss = policy_loss(
        logprob_T,
        tokens.behaviour_logprob_T,
        tokens.advantage_T,
        tokens.mask_T,
        tokens.loss_weight_T,
        low=LOW,
        high=HIGH,
        dual_clip=DUAL_CLIP,
        entropy_T=entropy_T,
        entropy_coefficient=entropy_coefficient,
    ).loss
    kl_T = None
    if teacher is not None:
        kl_T = divergences(logits_TV, teacher)
        loss = loss + (kl_weights(tokens).double() * kl_T).sum()
        kl_T = kl_T.detach()
    loss.backward()
    results = (loss.detach(), logprob_T.detach(), entropy_T.detach())
    return Outcome(*results, hidden_NH.grad, weight_VH.grad, kl_T)


def float32_bound(problem: Problem, expected: Outcome, **settings: Any) -> float:
    """How far float32 may be off ``expected``, from the oracle's own error in float32."""
    return HEADROOM * worst_error(run_oracle(problem, dtype=torch.float32, **settings), expected)


def divergences(student_TV: Tensor, teacher: TeacherRows) -> Tensor:
    """[T] float64, of the student's logits without padding."""
    teacher_TW = teacher.hidden_TH.detach().double() @ teacher.head.weight.detach().double().t()
    return kl_divergence(student_TV, teacher_TW[:, :VOCAB_SIZE], teacher.direction, TEMPERATURE)


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """‖actual − expected‖ / ‖expected‖ over the whole tensor."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def worst_error(actual: Outcome, expected: Outcome) -> float:
    """The largest relative error of loss, log-probs, entropies, gradients and divergences."""
    names = ["loss", "logprob_T", "entropy_T", "hidden_NH", "weight_VH"]
    names += ["kl_T"] if expected.kl_T is not None else []
    return max(relative_error(getattr(actual, name), getattr(expected, name)) for name in names)
