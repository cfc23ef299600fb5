"""What an optimizer update minimises: objectives over the response tokens of an update.

An objective sees a ``TokenBatch`` and returns the loss of every token. The caller weighs, masks and
sums the losses, and autograd gives their derivatives with respect to ℓ and H, which the kernels
spread over the logits. So one function of a user is a new objective:

    def reinforce(tokens: TokenBatch) -> Tensor:
        return -tokens.advantage * tokens.logprob

``Objective`` documents what a class may declare beyond that. docs/extending.md has complete
examples.

Shape legend: T = response tokens of a micro-batch or chunk, B = responses of the step's batch, K =
entries of a statistic, D = entries of a decision.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from bapo_megatron.config.objectives import Speculate
from bapo_megatron.ops.backend import Kernels
from bapo_megatron.ops.ratio import importance_ratio

Needs = Literal["token", "response", "update", "micro_batch"]
"""What an objective must know of other tokens before the first gradient."""

SAFE_LOGPROB = -1.0
"""ℓ and μ of tokens that do not train, so that every objective is finite there."""

RESPONSE_UNIT = 2.0**-36
"""Resolution of sums over a response. They are integers, so they depend neither on the order of
tokens nor on the ranks that hold them."""

RESPONSE_LIMIT = 256.0
"""Terms are clamped to ±this, so that 2^18 tokens of a response fit in int64 whatever they are."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of one micro-batch or chunk, as an objective sees them.

    Every tensor but ``decision`` is [T], on one device, of one floating dtype: float32 in training,
    float64 in tests. Tokens with m = 0 or a value that is not finite are there too, with mask 0 and
    harmless values: ℓ = μ, r = 1, A = 0, H = 0. Those that ``Objective.select`` leaves out have
    mask 0 and their own values.
    """

    logprob: Tensor
    """ℓ, differentiable."""
    behaviour_logprob: Tensor
    """μ: the engine's, or the trainer's at the start of the step (``behaviour: recomputed``)."""
    rollout_logprob: Tensor
    """The engine's log-prob, also where μ was recomputed."""
    ratio: Tensor
    """r = exp(clamp(ℓ − μ, ±20)), differentiable, with the bits of the bound search."""
    advantage: Tensor
    """A."""
    reward: Tensor
    """Reward of the token's response."""
    mask: Tensor
    """1 for tokens that train, else 0."""
    entropy: Tensor
    """H of the distribution that the token was drawn from, differentiable."""
    collected_entropy: Tensor
    """H from the collection pass, before the first gradient; without one, ``entropy`` detached."""
    response: Tensor
    """int64: index of the token's response in the step's batch."""
    response_tokens: Tensor
    """Tokens that train in the token's whole response, whatever chunk or rank holds them."""
    response_sums: Tensor | None
    """Sum of ``Objective.statistics`` over the token's whole response; with ``needs: response``."""
    decision: Tensor | None
    """[D] float64, from ``Objective.decide``; with ``needs: update`` or ``micro_batch``."""
    update: int
    """Optimizer updates made before this one."""

    def __len__(self) -> int:
        """T."""
        return int(self.logprob.shape[0])

    def select(self, index: slice | Tensor) -> Self:
        """Return the tokens at ``index``, in its order."""
        chosen: dict[str, Any] = {n: v[index] for n, v in self.tensors().items() if n != "decision"}
        return replace(self, **chosen)

    def tensors(self) -> dict[str, Tensor]:
        """Return every field that is a tensor, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


class Objective(Protocol):
    """A loss over tokens. Subclass it and write ``loss``; everything else has a default.

    Methods see tokens of one micro-batch or chunk only, in any order: nothing may depend on which
    tokens come together. What must be known of other tokens is a sum that the caller forms over all
    micro-batches and data- and context-parallel ranks, exactly, in integers.
    """

    needs: Needs = "token"
    """- ``token``: nothing of other tokens.
    - ``response``: ``statistics`` returns a float [T]; its sum over each response comes back as
      ``tokens.response_sums`` (over tokens that train; in units of 2^-36, each term clamped to
      ±256).
    - ``update``: ``statistics`` returns int64 [K] of the tokens with mask 1, which is added up over
      the whole update; what ``decide`` makes of the total comes back as ``tokens.decision``.
    - ``micro_batch``: the same over the micro-batches that all data-parallel ranks compute at the
      same time. No collection pass, but the result depends on the division into micro-batches.

    ``response`` and ``update`` cost a forward pass over the update before its first gradient, the
    latter only where ``decisive`` cannot save it."""
    decisive: slice | None = None
    """With ``needs: update``: the entries of a decision that ``loss``, ``bounds`` and ``report``
    read, if they lie on a grid, so that a prediction can be right to the last bit. The loss pass
    then need not wait for them (docs/algorithm.md). None: predictions are not tried."""
    speculate: Speculate = "auto"
    """Whether the loss pass runs with predicted entries, where ``decisive`` names some."""
    trains_zero_advantage: bool | None = None
    """Whether A = 0 gives a token a loss, a gradient or a part in ``statistics``.

    - False: none of them. Responses with A = 0 are not computed, unless an entropy bonus needs
      them; denominators count their tokens.
    - True: they train like all others.
    - None, where it is not declared: they are computed, but an update that holds only such is
      skipped."""
    selects_tokens: bool = False
    """Whether ``select`` leaves tokens out; the denominators then count those that it keeps. Needs
    ``needs`` to be ``response`` or ``update``."""

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the loss of each token, [T], differentiable in ``logprob`` and ``entropy``.

        The update's loss is the weighted sum over all tokens (``algorithm.loss_aggregation``); the
        weights are the caller's.
        """
        ...

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return what is summed over responses or the update (see ``needs``); no gradient."""
        return torch.zeros(0, dtype=torch.int64)

    def decide(self, total_K: Tensor) -> Tensor:
        """Return the decision, [D] float64, that follows from the summed statistics."""
        return total_K.to(torch.float64)

    def foresee(self, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
        """Return the predicted total of an update's statistics, [K] int64, for ``decide``.

        ``known_K`` are the statistics of its tokens with ℓ = μ. ``recent_K`` are those of earlier
        updates, added up so that newer ones count more; None before the first.
        """
        return known_K

    def select(self, tokens: TokenBatch) -> Tensor:
        """Return which tokens train, [T] bool, where ``selects_tokens``."""
        return tokens.mask > 0

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor] | None:
        """Return the limits (low, high) of r, [] or [T], for ``loss/positive_share``, or None."""
        return None

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return values of each token, [T], by metric name: always the same names.

        The step reports their sum over the tokens with a loss, divided by the tokens with m = 1.
        """
        return {}

    def guarded(self) -> AbstractContextManager[None]:
        """Return the context in which the loss is differentiated: it may translate errors."""
        return nullcontext()

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return numbers of one decision by metric name; the step reports their means."""
        return {}

    def refuses(self, decision: Tensor) -> Tensor | None:
        """Return a bool tensor (no dimensions) on the device: the update must not be made."""
        return None

    def explain_refusal(self, decision: Sequence[float]) -> str:
        """Say in one line why ``refuses`` is true, and what to do."""
        return "the objective refuses the update"


class TokenGradient(NamedTuple):
    """Losses of tokens and the derivatives of their weighted sum; nothing has a graph."""

    ratio_T: Tensor
    """[T] r."""
    loss_T: Tensor
    """[T] loss of each token, without its weight."""
    logprob_T: Tensor
    """[T] ∂(Σ weight · loss)/∂ℓ."""
    entropy_T: Tensor | None
    """[T] ∂(Σ weight · loss)/∂H; None where the loss does not depend on the entropy."""


def differentiate(
    objective: Objective, tokens: TokenBatch, weight_T: Tensor, kernels: Kernels | None = None
) -> TokenGradient:
    """Compute the losses of tokens and their derivatives by autograd on leaves ℓ and H.

    Args:
        objective: What is differentiated.
        tokens: At least one; its ratio is computed again, with a graph.
        weight_T: [T] weight of each token in the sum, 0 for tokens that do not train.
        kernels: Those of the importance ratio; None: the best for the device.
    """
    with torch.enable_grad():
        logprob_T = tokens.logprob.detach().requires_grad_()
        entropy_T = tokens.entropy.detach().requires_grad_()
        ratio_T = importance_ratio(logprob_T, tokens.behaviour_logprob, kernels)
        leaves = replace(tokens, logprob=logprob_T, entropy=entropy_T, ratio=ratio_T)
        loss_T = objective.loss(leaves)
        with objective.guarded():
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss_T, [logprob_T, entropy_T], grad_outputs=weight_T, allow_unused=True
            )
    by_logprob_T, by_entropy_T = gradients
    if by_logprob_T is None:
        by_logprob_T = torch.zeros_like(weight_T)
    return TokenGradient(ratio_T.detach(), loss_T.detach(), by_logprob_T, by_entropy_T)


def add_over_responses(sum_B: Tensor, value_T: Tensor, response_T: Tensor) -> None:
    """Add values of tokens to the sums of their responses, exactly.

    Sums of several ranks that hold parts of the same responses are added up.

    Args:
        sum_B: [B] int64 in units of ``RESPONSE_UNIT``; changed in place.
        value_T: [T] finite; clamped to ±``RESPONSE_LIMIT``.
        response_T: [T] int64 index of each token's response.
    """
    limited_T = value_T.double().clamp(-RESPONSE_LIMIT, RESPONSE_LIMIT)
    sum_B.index_add_(0, response_T, (limited_T / RESPONSE_UNIT).round().to(torch.int64))


def response_sums(sum_B: Tensor, response_T: Tensor) -> Tensor:
    """Return the sum of every token's response, [T] float64, from ``add_over_responses``."""
    return (sum_B.double() * RESPONSE_UNIT)[response_T]


def with_sums(objective: Objective, tokens: TokenBatch) -> TokenBatch:
    """Return the tokens of a whole update with what the objective needs of them together."""
    if objective.needs == "token":
        return tokens
    statistics = objective.statistics(tokens)
    if objective.needs != "response":
        return replace(tokens, decision=objective.decide(statistics))
    num_responses = int(tokens.response.max()) + 1
    sum_B = torch.zeros(num_responses, dtype=torch.int64, device=tokens.logprob.device)
    value_T = torch.where(tokens.mask > 0, statistics, 0.0)
    add_over_responses(sum_B, value_T, tokens.response)
    sums_T = response_sums(sum_B, tokens.response).to(tokens.logprob.dtype)
    return replace(tokens, response_sums=sums_T)


def is_finite(values: Tensor) -> Tensor:
    """Return where values are neither NaN nor infinite: ``isfinite`` in two launches, not four."""
    return (values - values) == 0


def first_nonfinite(values_T: Tensor, mask_T: Tensor) -> int | None:
    """Return the index of the first token with mask 1 whose value is NaN or infinite, or None.

    It waits for the device, so call it only to explain a failure that a count has shown.
    """
    index_K = torch.nonzero((mask_T > 0) & ~torch.isfinite(values_T))
    return int(index_K[0].item()) if index_K.numel() else None
