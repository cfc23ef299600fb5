"""Advantages: how much better a response is than the others of its group or batch.

Built-in ones are in ``algorithm.advantages``. A user's function is called once per group, with the
rewards [G] float64 and the group's samples, and returns [G], or [C] by sample, sequence and turn:

    def centred(rewards: Tensor, samples: Sequence[Sample]) -> Tensor:
        return rewards - rewards.mean()

Every rank calls it for all groups of a batch, so it must give the same values everywhere.

Shape legend: P = prompts (groups), G = responses per prompt, C = calls of a group that train.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo_megatron.algorithm.advantages import NAMED
from bapo_megatron.algorithm.user_code import UserCode, kind_of
from bapo_megatron.types import Group


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
        """Return the advantage of every sample, [P, G] float32, or of all calls, [ΣC].

        Args:
            groups: All groups of the batch, of equal size.
            reward_PG: [P, G] float64, to be used instead of the samples' own rewards.

        Raises:
            ValueError: A reward is not finite, or groups have fewer than 2 samples.
            UserCodeError: The user's function raised, or its results are not [G] or [C], or not
                finite.
        """
        if reward_PG is None:
            rewards = [[sample.reward for sample in group.samples] for group in groups]
            reward_PG = torch.tensor(rewards, dtype=torch.float64)
        if self._code is None:
            lengths = [[sample.episode_sampled for sample in group.samples] for group in groups]
            return group_advantages(reward_PG, torch.tensor(lengths), self._kind, self._shift)
        _check_rewards(reward_PG)
        pairs = zip(reward_PG, groups, strict=True)
        results = [_call(self._code, reward_G, group) for reward_G, group in pairs]
        if all(len(result) == reward_PG.shape[1] for result in results):
            return torch.stack(results)
        if sum(map(len, results)) != sum(_num_calls(group) for group in groups):
            self._code.refuse("returned a value per call for some groups only; do so for all")
        return torch.cat(results)


def _num_calls(group: Group) -> int:
    return sum(sample.episode_turns for sample in group.samples)


def _call(code: UserCode, reward_G: Tensor, group: Group) -> Tensor:
    with code.guard():
        advantages: Tensor = code.object(reward_G.clone(), group.samples)
    size, is_vector = len(reward_G), isinstance(advantages, torch.Tensor) and advantages.dim() == 1
    if not is_vector or (len(advantages) != size and len(advantages) != _num_calls(group)):
        code.refuse(
            f"returned {kind_of(advantages)} for {size} samples; return a torch tensor [{size}], "
            "or one value for each call that trains"
        )
    if not bool(advantages.isfinite().all()):
        code.refuse(
            f"returned {advantages.tolist()} for the rewards {reward_G.tolist()}; advantages "
            "must be finite"
        )
    return advantages.float()


def group_advantages(
    reward_PG: Tensor, length_PG: Tensor, kind: str, baseline_shift: float = 0.0
) -> Tensor:
    """Compute the advantage of every response.

    A group of equal rewards gets exactly 0 minus the shift; without a shift it counts as having no
    gradient. With the ``reinforce_pp`` kinds this needs equal rewards in the whole batch.

    Args:
        reward_PG: [P, G] R of all groups of the batch, identical on every rank.
        length_PG: [P, G] number of tokens of each response.
        kind: A key of ``advantages.NAMED``.
        baseline_shift: Added to the baseline of those in ``SHIFTED``, else 0; negative in AsymRE
            (arXiv 2506.20520).

    Returns:
        [P, G] float32 advantages; computed in float64, rounded once.

    Raises:
        ValueError: For a shape other than [P, G ≥ 2] (``none``: [P, G]), or a reward that is
            not finite.
    """
    if reward_PG.dim() != 2 or (reward_PG.shape[1] < 2 and kind != "none"):
        raise ValueError(
            "reward_PG must have shape [prompts, responses per prompt >= 2], got "
            f"{list(reward_PG.shape)}; group-relative advantages need siblings to compare with"
        )
    _check_rewards(reward_PG)
    advantage_PG: Tensor = NAMED[kind](reward_PG.double(), length_PG.double())
    return (advantage_PG - baseline_shift).float()


def _check_rewards(reward_PG: Tensor) -> None:
    if len(unfit := (~reward_PG.isfinite()).nonzero()):
        row, column = unfit[0].tolist()
        raise ValueError(
            f"reward_PG[{row}, {column}] is {float(reward_PG[row, column])}; rewards must be finite"
        )
