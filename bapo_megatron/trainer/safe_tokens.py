"""A micro-batch's tokens as objectives see them: every value finite.

Shape legend: T = response tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bapo_megatron.algorithm.loss import limit_weights
from bapo_megatron.algorithm.objective import SAFE_LOGPROB, TokenBatch, is_finite
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.data.micro_batch import on_device
from bapo_megatron.ops.backend import Kernels
from bapo_megatron.ops.ratio import importance_ratio
from bapo_megatron.types import MicroBatch


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update knows about its place in the run."""

    num_updates: int
    """Optimizer updates made before this one: the age of a token is this minus its version."""
    rollout_version: int | None
    """While the policy still has the weights that the engines held, their version: its tokens are
    compared with the trainer's log-probs. None once the weights have moved."""


class SafeTokens:
    """The tokens of a micro-batch for an objective, harmless where they do not train."""

    def __init__(
        self,
        config: AlgorithmConfig,
        micro_batch: MicroBatch,
        decision: Tensor | None,
        context: UpdateContext,
        device: torch.device,
    ) -> None:
        """Copy the micro-batch to the device; prepare all that does not depend on ℓ and H."""
        self.micro_batch = own = on_device(micro_batch, device)
        self.entropy_coefficient = config.entropy_coefficient
        self.trains_T = own.mask_T > 0
        self.correction_T: Tensor | None = None
        if config.correction.kind != "none":
            self.correction_T = limit_weights(own.importance_T, config.correction)
        self.context = context
        self._finite_T = self.trains_T & is_finite(own.behaviour_logprob_T + own.advantage_T)
        behaviour_T = torch.where(self._finite_T, own.behaviour_logprob_T, SAFE_LOGPROB)
        has_rollout_T = self._finite_T & is_finite(own.rollout_logprob_T)
        self._fixed = TokenBatch(
            logprob=behaviour_T,
            behaviour_logprob=behaviour_T,
            rollout_logprob=torch.where(has_rollout_T, own.rollout_logprob_T, behaviour_T),
            ratio=behaviour_T,
            advantage=own.advantage_T,
            reward=own.reward_T,
            mask=(self.trains_T if own.selected_T is None else own.selected_T).float(),
            entropy=behaviour_T,
            collected_entropy=behaviour_T if own.entropy_T is None else own.entropy_T,
            response=own.sample_T,
            response_tokens=own.response_tokens_T,
            response_sums=None if own.response_sum_T is None else own.response_sum_T.float(),
            decision=decision,
            update=context.num_updates,
        )

    def finite(self, logprob_T: Tensor, entropy_T: Tensor, part: slice = slice(None)) -> Tensor:
        """Return which tokens of ``part`` train and have finite values only, [T] bool."""
        return self._finite_T[part] & is_finite(logprob_T + entropy_T)

    def as_sampled(self) -> TokenBatch:
        """Return the tokens, [T], with ℓ = μ, r = 1 and H = 0."""
        fixed, nothing_T = self._fixed, torch.zeros_like(self._fixed.logprob)
        return replace(
            fixed,
            ratio=torch.ones_like(nothing_T),
            advantage=torch.where(self._finite_T, fixed.advantage, 0.0),
            mask=fixed.mask * self._finite_T,
            entropy=nothing_T,
            collected_entropy=nothing_T,
        )

    def batch(
        self,
        logprob_T: Tensor,
        entropy_T: Tensor,
        part: slice = slice(None),
        *,
        kernels: Kernels | None,
    ) -> TokenBatch:
        """Return tokens with these ℓ and H, [T] each.

        Without kernels ``differentiate`` makes the ratio.
        """
        is_whole = part.indices(len(logprob_T))[:2] == (0, len(self._fixed))
        fixed = self._fixed if is_whole else self._fixed.select(part)
        finite_T = self.finite(logprob_T, entropy_T, part)
        logprob_T = torch.where(finite_T, logprob_T, fixed.behaviour_logprob)
        entropy_T = torch.where(finite_T, entropy_T, 0.0)
        ratio_T = fixed.ratio
        if kernels is not None:
            ratio_T = importance_ratio(logprob_T, fixed.behaviour_logprob, kernels)
        collected_T = entropy_T if self.micro_batch.entropy_T is None else fixed.collected_entropy
        return replace(
            fixed,
            logprob=logprob_T,
            ratio=ratio_T,
            advantage=torch.where(finite_T, fixed.advantage, 0.0),
            mask=fixed.mask * finite_T,
            entropy=entropy_T,
            collected_entropy=collected_T,
        )
