"""Advantages: how much better a response is than the others of its group or batch.

A user's function is called once per group, with the rewards [G] float64 and the group's samples,
and returns [G]:

    def centred(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
        return rewards - rewards.mean()

Every rank calls it for all groups of a batch, so it must give the same values everywhere.

Shape legend: P = prompts (groups), G = responses per prompt.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algorithm.user_code import UserCode, kind_of
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
            kind: One of ``config.schema.ADVANTAGES`` or ``package.module:function``.
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
    with code.guard():
        advantage_G = code.object(reward_G.clone(), group.samples)
    if not isinstance(advantage_G, Tensor) or advantage_G.shape != reward_G.shape:
        code.refuse(
            f"returned {kind_of(advantage_G)} for {len(reward_G)} samples; return a torch tensor "
            f"[{len(reward_G)}]"
        )
    if not bool(torch.isfinite(advantage_G).all()):
        code.refuse(
            f"returned {advantage_G.tolist()} for the rewards {reward_G.tolist()}; advantages "
            "must be finite"
        )
    return advantage_G.to(torch.float32)


def group_advantages(
    reward_PG: Tensor, length_PG: Tensor, kind: str, baseline_shift: float = 0.0
) -> Tensor:
    """Compute the advantage of every response.

    R minus a baseline raised by ``baseline_shift`` (negative in AsymRE, arXiv 2506.20520):

    - ``grpo_no_std``: mean of the group (Dr. GRPO, arXiv 2503.20783);
    - ``rloo``: mean of the other G − 1 responses, so that A = (R − mean) · G / (G − 1);
    - ``opo``: mean of the group weighted by the responses' lengths (arXiv 2505.23585).

    Also scaled:

    - ``grpo``: (R − mean) / (std + 1e-6) of the group, with the unbiased standard deviation;
    - ``reinforce_pp``: R whitened over the batch (REINFORCE++, arXiv 2501.03262): (R − m) / √(v +
      1e-8), where m is the mean and v the unbiased variance over all *tokens* of the batch;
    - ``reinforce_pp_baseline``: the same for R − mean of the group;
    - ``distill``: 0, so that tokens have only the advantage that the teacher adds.

    A group of equal rewards gets exactly 0 minus the shift; without a shift it counts as having no
    gradient. With the ``reinforce_pp`` kinds this needs equal rewards in the whole batch.

    Args:
        reward_PG: [P, G] R of all groups of the batch, identical on every rank.
        length_PG: [P, G] number of tokens of each response.
        kind: One of ``config.schema.ADVANTAGES``.
        baseline_shift: For those in ``config.schema.SHIFTED``, else 0.

    Returns:
        [P, G] float32 advantages; computed in float64, rounded once. Sums over the batch are
        exact: the order of groups does not matter.

    Raises:
        ValueError: For a shape other than [P, G ≥ 2], or a reward that is not finite.
    """
    if reward_PG.dim() != 2 or reward_PG.shape[1] < 2:
        raise ValueError(
            "reward_PG must have shape [prompts, responses per prompt >= 2], got "
            f"{list(reward_PG.shape)}; group-relative advantages need siblings to compare with"
        )
    _check_rewards(reward_PG)
    group_size = reward_PG.shape[1]
    exact_PG, length_PG = reward_PG.to(torch.float64), length_PG.to(torch.float64)
    if kind == "distill":
        return torch.zeros_like(exact_PG, dtype=torch.float32)
    if kind == "reinforce_pp":
        return _whitened(exact_PG, length_PG).to(torch.float32)
    weight_PG = length_PG.clamp(min=1) if kind == "opo" else torch.ones_like(exact_PG)
    weighted_P1 = (exact_PG * weight_PG).sum(dim=1, keepdim=True)
    centred_PG = exact_PG - weighted_P1 / weight_PG.sum(dim=1, keepdim=True)
    all_equal_P1 = exact_PG.amax(dim=1, keepdim=True) == exact_PG.amin(dim=1, keepdim=True)
    centred_PG = torch.where(all_equal_P1, 0.0, centred_PG)
    if kind == "grpo":
        variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / (group_size - 1)
        advantage_PG = centred_PG / (variance_P1.sqrt() + STD_EPSILON)
    elif kind == "rloo":
        advantage_PG = centred_PG * (group_size / (group_size - 1))
    elif kind == "reinforce_pp_baseline":
        advantage_PG = _whitened(centred_PG, length_PG)
    else:
        assert kind in ("grpo_no_std", "opo")
        advantage_PG = centred_PG
    return (advantage_PG - baseline_shift).to(torch.float32)


def _whitened(value_PG: Tensor, length_PG: Tensor) -> Tensor:
    """(value − mean) / √(variance + 1e-8) over all tokens; 0 where all values are equal."""
    num_tokens = float(length_PG.sum())
    if num_tokens < 2 or bool(value_PG.amax() == value_PG.amin()):
        return torch.zeros_like(value_PG)
    mean = math.fsum((value_PG * length_PG).flatten().tolist()) / num_tokens
    square_PG = (value_PG - mean).square() * length_PG
    variance = math.fsum(square_PG.flatten().tolist()) / (num_tokens - 1)
    return (value_PG - mean) / math.sqrt(variance + VARIANCE_EPSILON)


def _check_rewards(reward_PG: Tensor) -> None:
    if not bool(torch.isfinite(reward_PG).all()):
        row, column = (int(i) for i in torch.nonzero(~torch.isfinite(reward_PG))[0])
        raise ValueError(
            f"reward_PG[{row}, {column}] is {float(reward_PG[row, column])}; rewards must be finite"
        )
