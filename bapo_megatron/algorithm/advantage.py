"""Advantages: how much better a response is than the others of its group or batch.

A built-in advantage is a function with an entry in ``NAMED`` (docs/objectives.md). It gets the
rewards R and the lengths (sampled tokens) of all responses of a batch, and returns A, [P, G]
float64 each. Sums over the batch must be exact, so that the order of groups does not matter.

A user's function is called once per group, with the rewards [G] float64 and the group's samples,
and returns [G]:

    def centred(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
        return rewards - rewards.mean()

Every rank calls it for all groups of a batch, so it must give the same values everywhere. Importing
this module does not import torch, because the configuration reads ``NAMED``.

Shape legend: P = prompts (groups), G = responses per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bapo_megatron.algorithm.user_code import UserCode, kind_of

if TYPE_CHECKING:
    from torch import Tensor

    from bapo_megatron.types import Group

STD_EPSILON = 1e-6
"""Added to the standard deviation of ``grpo``."""

VARIANCE_EPSILON = 1e-8
"""Added to the variance of ``reinforce_pp`` and ``reinforce_pp_baseline``."""


class Advantages:
    """The estimator that ``algorithm.advantage`` names."""

    def __init__(self, kind: str, baseline_shift: float = 0.0) -> None:
        """Import a user's function.

        Args:
            kind: One of ``NAMED`` or ``package.module:function``.
            baseline_shift: See ``group_advantages``.

        Raises:
            UserCodeError: The function cannot be imported.
        """
        self._kind, self._shift = kind, baseline_shift
        self._code = UserCode("algorithm.advantage", kind) if ":" in kind else None
        if self._code is not None and not callable(self._code.object):
            self._code.refuse(f"is a {type(self._code.object).__name__}; name a function")

    def compute(self, groups: Sequence[Group], reward_PG: Tensor | None = None) -> Tensor:
        """Return the advantage of every sample, [P, G] float32.

        Args:
            groups: All groups of the batch, of equal size.
            reward_PG: [P, G] float64, to be used instead of the samples' own rewards.

        Raises:
            ValueError: A reward is not finite, or groups have fewer than 2 samples.
            UserCodeError: The user's function raised, or its result is not [G] or not finite.
        """
        import torch

        if reward_PG is None:
            rewards = [[sample.reward for sample in group.samples] for group in groups]
            reward_PG = torch.tensor(rewards, dtype=torch.float64)
        if self._code is None:
            lengths = [[sample.episode_sampled for sample in group.samples] for group in groups]
            return group_advantages(reward_PG, torch.tensor(lengths), self._kind, self._shift)
        _check_rewards(reward_PG)
        pairs = zip(reward_PG, groups, strict=True)
        return torch.stack([_call(self._code, reward_G, group) for reward_G, group in pairs])


def _call(code: UserCode, reward_G: Tensor, group: Group) -> Tensor:
    import torch

    with code.guard():
        advantage_G = code.object(reward_G.clone(), group.samples)
    if not isinstance(advantage_G, torch.Tensor) or advantage_G.shape != reward_G.shape:
        code.refuse(
            f"returned {kind_of(advantage_G)} for {len(reward_G)} samples; return a torch tensor "
            f"[{len(reward_G)}]"
        )
    if not bool(advantage_G.isfinite().all()):
        code.refuse(
            f"returned {advantage_G.tolist()} for the rewards {reward_G.tolist()}; advantages "
            "must be finite"
        )
    return advantage_G.float()


def group_advantages(
    reward_PG: Tensor, length_PG: Tensor, kind: str, baseline_shift: float = 0.0
) -> Tensor:
    """Compute the advantage of every response.

    A group of equal rewards gets exactly 0 minus the shift; without a shift it counts as having no
    gradient. With the ``reinforce_pp`` kinds this needs equal rewards in the whole batch.

    Args:
        reward_PG: [P, G] R of all groups of the batch, identical on every rank.
        length_PG: [P, G] number of tokens of each response.
        kind: A key of ``NAMED``.
        baseline_shift: Added to the baseline of those in ``SHIFTED``, else 0; negative in AsymRE
            (arXiv 2506.20520).

    Returns:
        [P, G] float32 advantages; computed in float64, rounded once.

    Raises:
        ValueError: For a shape other than [P, G ≥ 2], or a reward that is not finite.
    """
    if reward_PG.dim() != 2 or reward_PG.shape[1] < 2:
        raise ValueError(
            "reward_PG must have shape [prompts, responses per prompt >= 2], got "
            f"{list(reward_PG.shape)}; group-relative advantages need siblings to compare with"
        )
    _check_rewards(reward_PG)
    advantage_PG = NAMED[kind](reward_PG.double(), length_PG.double())
    return (advantage_PG - baseline_shift).float()


def _centred(reward_PG: Tensor, weight_PG: Tensor) -> Tensor:
    """R − weighted mean of the group; exactly 0 where all rewards of the group are equal."""
    weighted_P1 = (reward_PG * weight_PG).sum(dim=1, keepdim=True)
    centred_PG = reward_PG - weighted_P1 / weight_PG.sum(dim=1, keepdim=True)
    all_equal_P1 = reward_PG.amax(dim=1, keepdim=True) == reward_PG.amin(dim=1, keepdim=True)
    return centred_PG.masked_fill(all_equal_P1, 0.0)


def _grpo_no_std(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R − mean of the group (Dr. GRPO, arXiv 2503.20783)."""
    return _centred(reward_PG, length_PG.new_ones(length_PG.shape))


def _grpo(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """(R − mean) / (std + 1e-6) of the group, with the unbiased standard deviation."""
    centred_PG, others = _grpo_no_std(reward_PG, length_PG), reward_PG.shape[1] - 1
    variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / others
    return centred_PG / (variance_P1.sqrt() + STD_EPSILON)


def _rloo(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R − mean of the other G − 1 responses: (R − mean) · G / (G − 1)."""
    group_size = reward_PG.shape[1]
    return _grpo_no_std(reward_PG, length_PG) * (group_size / (group_size - 1))


def _opo(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R − mean of the group weighted by the responses' lengths (arXiv 2505.23585)."""
    return _centred(reward_PG, length_PG.clamp(min=1))


def _reinforce_pp(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """R whitened over the batch (REINFORCE++, arXiv 2501.03262): (R − m) / √(v + 1e-8).

    m is the mean and v the unbiased variance over all *tokens*; 0 where all values are equal.
    """
    num_tokens = float(length_PG.sum())
    if num_tokens < 2 or bool(reward_PG.amax() == reward_PG.amin()):
        return reward_PG.new_zeros(reward_PG.shape)
    mean = math.fsum((reward_PG * length_PG).flatten().tolist()) / num_tokens
    square_PG = (reward_PG - mean).square() * length_PG
    variance = math.fsum(square_PG.flatten().tolist()) / (num_tokens - 1)
    return (reward_PG - mean) / math.sqrt(variance + VARIANCE_EPSILON)


def _reinforce_pp_baseline(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """The same of R − mean of the group."""
    return _reinforce_pp(_grpo_no_std(reward_PG, length_PG), length_PG)


def _distill(reward_PG: Tensor, length_PG: Tensor) -> Tensor:
    """0, so that tokens have only the advantage that the teacher adds."""
    return reward_PG.new_zeros(reward_PG.shape)


NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": _grpo,
    "grpo_no_std": _grpo_no_std,
    "rloo": _rloo,
    "opo": _opo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "distill": _distill,
}
"""The advantages by the name that ``algorithm.advantage`` gives them."""

SHIFTED = ("grpo_no_std", "rloo", "opo")
"""Those of the form R minus a baseline, which ``algorithm.baseline_shift`` raises."""


def _check_rewards(reward_PG: Tensor) -> None:
    if len(unfit := (~reward_PG.isfinite()).nonzero()):
        row, column = unfit[0].tolist()
        raise ValueError(
            f"reward_PG[{row}, {column}] is {float(reward_PG[row, column])}; rewards must be finite"
        )
