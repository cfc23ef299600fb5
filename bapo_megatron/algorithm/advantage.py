"""Group-relative advantages: how much better one response is than its siblings.

A user's function is called once per group, with the rewards [G] float64 and the group's samples,
and returns [G]:

    def centred(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
        return rewards - rewards.mean()

Every rank calls it for all groups of a batch, so it must give the same values everywhere.

Shape legend: P = prompts (groups), G = responses per prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algorithm.user_code import UserCode
from bapo_megatron.types import Group

STD_EPSILON = 1e-6
"""Added to the standard deviation of ``grpo``."""


class Advantages:
    """The estimator that ``algorithm.advantage`` names."""

    def __init__(self, kind: str) -> None:
        """Import a user's function.

        Args:
            kind: ``grpo``, ``grpo_no_std``, ``rloo`` or ``package.module:function``.

        Raises:
            UserCodeError: The function cannot be imported.
        """
        self._kind = kind
        self._code = UserCode("algorithm.advantage", kind) if ":" in kind else None
        if self._code is not None and not callable(self._code.object):
            self._code.refuse(f"is a {type(self._code.object).__name__}; name a function")

    def compute(self, groups: Sequence[Group]) -> Tensor:
        """Return the advantage of every sample, [P, G] float32.

        Args:
            groups: Of equal size.

        Raises:
            ValueError: The rewards do not fit ``group_advantages``.
            UserCodeError: The user's function raised, or returned what is not [G] and finite.
        """
        rewards = [[sample.reward for sample in group.samples] for group in groups]
        reward_PG = torch.tensor(rewards, dtype=torch.float64)
        if self._code is None:
            return group_advantages(reward_PG, self._kind)
        _check_rewards(reward_PG)
        return torch.stack(
            [
                _call(self._code, reward_G, group)
                for reward_G, group in zip(reward_PG, groups, strict=True)
            ]
        )


def _call(code: UserCode, reward_G: Tensor, group: Group) -> Tensor:
    with code.guard():
        advantage_G = code.object(reward_G.clone(), group.samples)
    if not isinstance(advantage_G, Tensor) or advantage_G.shape != reward_G.shape:
        shape = getattr(advantage_G, "shape", None)
        found = type(advantage_G).__name__ if shape is None else f"shape {list(shape)}"
        code.refuse(f"returned {found} for {len(group.samples)} samples; return a tensor [G]")
    if not bool(torch.isfinite(advantage_G).all()):
        code.refuse(
            f"returned {advantage_G.tolist()} for the rewards {reward_G.tolist()}; advantages "
            "must be finite"
        )
    return advantage_G.to(torch.float32)


def group_advantages(reward_PG: Tensor, kind: str) -> Tensor:
    """Compute the advantage of every response relative to its group.

    - ``grpo``: (R − mean) / (std + 1e-6), with the unbiased standard deviation;
    - ``grpo_no_std``: R − mean (Dr. GRPO);
    - ``rloo``: R − mean of the other G − 1 responses = (R − mean) · G / (G − 1).

    A group whose rewards are all equal gets exactly 0, so that it counts as having no gradient.

    Returns:
        [P, G] float32 advantages; formed in float64 and rounded once.

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
    exact_PG = reward_PG.to(torch.float64)
    centred_PG = exact_PG - exact_PG.mean(dim=1, keepdim=True)
    if kind == "grpo":
        variance_P1 = centred_PG.square().sum(dim=1, keepdim=True) / (group_size - 1)
        advantage_PG = centred_PG / (variance_P1.sqrt() + STD_EPSILON)
    elif kind == "grpo_no_std":
        advantage_PG = centred_PG
    else:
        assert kind == "rloo"
        advantage_PG = centred_PG * (group_size / (group_size - 1))
    all_equal_P1 = exact_PG.amax(dim=1, keepdim=True) == exact_PG.amin(dim=1, keepdim=True)
    return torch.where(all_equal_P1, 0.0, advantage_PG).to(torch.float32)


def _check_rewards(reward_PG: Tensor) -> None:
    if not bool(torch.isfinite(reward_PG).all()):
        row, column = (int(i) for i in torch.nonzero(~torch.isfinite(reward_PG))[0])
        raise ValueError(
            f"reward_PG[{row}, {column}] is {float(reward_PG[row, column])}; rewards must be finite"
        )
