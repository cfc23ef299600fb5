"""What an optimizer update minimises: objectives over the response tokens of an update.

An objective sees a ``TokenBatch`` and returns the loss of every token. The caller weights, masks
and sums the losses, and autograd gives their derivatives with respect to ℓ and H, which the kernels
spread over the logits (``algorithm.loss``). A new objective can be a single function:

    def reinforce(tokens: TokenBatch) -> Tensor:
        return -tokens.advantage * tokens.logprob

``Objective`` documents what a class may declare beyond that. docs/extending.md has complete
examples. Importing this module does not import torch (see ``algorithm.objectives``).

Shape legend: T = response tokens of a micro-batch or chunk, K = entries of a statistic, D = entries
of a decision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.config.schema import AlgorithmConfig
    from bapo_megatron.config.section import Section

Needs = Literal["token", "response", "update", "micro_batch"]
"""What an objective must know about other tokens before the first gradient."""

Speculate = Literal["auto", "never", "always"]
"""Whether the loss pass runs with a predicted decision (docs/algorithm.md)."""

LOG_RATIO_LIMIT = 20.0
"""Clamp of ℓ − μ in every ratio (``ops.logprob``)."""


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
    """H before the first gradient, by the forward-only pass; else ``entropy``, detached."""
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
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Token columns by name, [T] or [T, K], such as ``reference_logprob`` with a reference
    (``data.token_columns``); where the mask is 0, values may be NaN."""

    def __len__(self) -> int:
        """T."""
        return int(self.logprob.shape[0])

    def select(self, index: slice | Tensor) -> Self:
        """Return the tokens at ``index``, in its order."""
        chosen: dict[str, Any] = {n: v[index] for n, v in self.tensors().items() if n != "decision"}
        columns = {name: value[index] for name, value in self.columns.items()}
        return replace(self, **chosen, columns=columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return every field that is a tensor, by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        others = ("update", "columns")
        return {n: v for n, v in values.items() if n not in others and v is not None}


class Objective(ABC):
    """A loss over tokens. Subclass it and write ``loss``; everything else has a default.

    Methods see tokens of one micro-batch or chunk only, in any order: nothing may depend on which
    tokens share it. All they know about other tokens is a sum, which the caller computes exactly
    (in integers) over all micro-batches and data- and context-parallel ranks.
    """

    needs: Needs = "token"
    """- ``token``: nothing about other tokens.
    - ``response``: ``statistics`` returns a float [T]; its sum over each response comes back as
      ``tokens.response_sums`` (over tokens that train; in units of 2^-36, each term clamped to
      ±256).
    - ``update``: ``statistics`` returns int64 [K] over the tokens with mask 1, which is summed over
      the whole update; ``decide`` turns the total into ``tokens.decision``.
    - ``micro_batch``: the same over the micro-batches that all data-parallel ranks compute at the
      same time. No forward-only pass, but results depend on the split into micro-batches.

    ``response`` costs a forward-only pass over the update before its first gradient; so does
    ``update``, unless its decision is predicted (``decisive``)."""
    decisive: slice | None = None
    """With ``needs: update``: the entries of a decision that ``loss``, ``bounds`` and ``report``
    read, if they lie on a grid, so that a prediction can be right to the last bit. The loss pass
    then need not wait for them (docs/algorithm.md). None: nothing is predicted."""
    speculate: Speculate = "auto"
    """Whether the loss pass runs with predictions of the ``decisive`` entries."""
    trains_zero_advantage: bool | None = None
    """Whether A = 0 gives a token a loss, a gradient or a part in ``statistics``.

    - False: none of them. Responses with A = 0 are not computed, unless an entropy bonus needs
      them; denominators count their tokens.
    - True: they train like all others.
    - None (not declared): they are computed, but an update without others is skipped."""
    selects_tokens: bool = False
    """Whether ``select`` leaves tokens out; the denominators then count those that it keeps.
    Requires ``needs`` ``response`` or ``update``."""

    centers: bool = False
    """Whether ``weights`` is defined, so that ``algorithm.centering`` works."""

    @abstractmethod
    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the loss of each token, [T], differentiable in ``logprob`` and ``entropy``.

        The update's loss is the weighted sum over all tokens (``algorithm.loss_aggregation``); the
        weights are the caller's.
        """

    def statistics(self, tokens: TokenBatch) -> Tensor:
        """Return what is summed over responses or the update (see ``needs``); no gradient."""
        raise NotImplementedError

    def decide(self, total_K: Tensor) -> Tensor:
        """Turn the summed statistics into the decision, [D] float64."""
        return total_K.double()

    def foresee(self, known_K: Tensor, recent_K: Tensor | None) -> Tensor:
        """Return the predicted total of an update's statistics, [K] int64, for ``decide``.

        ``known_K`` are the statistics of its tokens at ℓ = μ. ``recent_K`` is a decaying sum over
        earlier updates; None before the first.
        """
        return known_K

    def select(self, tokens: TokenBatch) -> Tensor:
        """Return which tokens train, [T] bool, where ``selects_tokens``."""
        return tokens.mask > 0

    def weights(self, tokens: TokenBatch, ratio_TK: Tensor) -> Tensor:
        """Return the weights that other tokens would have in the place of these, [T, K].

        The loss's derivative by ℓ is −A w(r): w at ratios [T, K] with all else as in ``tokens``.
        With ``centers``; the result has the dtype of the ratios.
        """
        raise NotImplementedError

    def bounds(self, tokens: TokenBatch) -> tuple[Tensor, Tensor] | None:
        """Return the limits (low, high) of r, [] or [T], for ``loss/positive_share``, or None."""
        return None

    def report(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return values of each token, [T], by metric name: always the same names.

        The step reports their sum over the tokens with a loss, divided by the tokens with m = 1.
        """
        return {}

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for differentiating the loss; it may translate errors."""
        return nullcontext()

    def report_decision(self, decision: Sequence[float]) -> Mapping[str, float]:
        """Return metrics of one decision by name; the step reports their means."""
        return {}

    def refuses(self, decision: Tensor) -> Tensor | None:
        """Return a 0-d bool tensor on the device: whether the update must be refused."""
        return None

    def explain_refusal(self, decision: Sequence[float]) -> str:
        """Say in one line why ``refuses`` is true, and what to do."""
        return "the objective refuses the update"


@dataclass(frozen=True, slots=True)
class FunctionObjective(Objective):
    """A function from tokens to their losses, [T], as an objective."""

    function: Callable[[TokenBatch], Tensor]
    trains_zero_advantage: bool | None = None
    weight: Callable[[Tensor], Tensor] | None = None
    """w as a function of the ratio, if that is all it depends on."""

    @property
    def centers(self) -> bool:  # type: ignore[override]
        """Whether the weight is known."""
        return self.weight is not None

    def loss(self, tokens: TokenBatch) -> Tensor:
        """Return the function's losses, [T]."""
        return self.function(tokens)

    def weights(self, tokens: TokenBatch, ratio_TK: Tensor) -> Tensor:
        """Return the weights at these ratios, [T, K]."""
        assert self.weight is not None, "centers is False"
        return self.weight(ratio_TK)


@dataclass(frozen=True, slots=True)
class NamedObjective:
    """An objective that ``algorithm.objective`` names."""

    make: Callable[[Any, AlgorithmConfig], Objective]
    """Makes it from its options (None without any) and the whole section."""
    options: type[Section] | None = None
    """The section ``algorithm.<name>``."""
    dual_clip: bool = False
    """Whether ``algorithm.dual_clip`` applies to it."""
    centers: bool = False
    """Whether ``algorithm.centering`` does; not for a loss whose mean score is 0 anyway."""
    key: str = ""
    """Key of its options, if not its name."""


def hide_rest(decision: Tensor, decisive: slice) -> Tensor:
    """Return a decision, [D], with NaN in the entries that are not decisive."""
    hidden = decision.new_full(decision.shape, math.nan)
    hidden[decisive] = decision[decisive]
    return hidden
