"""Advantages by hand."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.algorithm.advantage import group_advantages as of_lengths
from bapo_megatron.algorithm.user_code import UserCodeError
from bapo_megatron.config.schema import ADVANTAGES

FLOAT32 = 4 * 2.0**-24
"""Relative, of four roundings."""


def group_advantages(reward_PG: torch.Tensor, kind: str) -> torch.Tensor:
    """With responses of one token."""
    return of_lengths(reward_PG, torch.ones_like(reward_PG), kind)


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    # mean 0.25, squared deviations 3/4 in sum, unbiased variance 1/4, std 1/2
    advantage_PG = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "grpo")
    expected = [0.75 / 0.500001] + [-0.25 / 0.500001] * 3
    assert advantage_PG.tolist()[0] == pytest.approx(expected, rel=FLOAT32)
    assert advantage_PG.dtype == torch.float32


def test_grpo_no_std_only_subtracts_the_mean() -> None:
    advantage_PG = group_advantages(
        torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 4, 6, 8]]), "grpo_no_std"
    )
    assert advantage_PG.tolist() == [[0.75, -0.25, -0.25, -0.25], [-3.0, -1.0, 1.0, 3.0]]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    advantage_PG = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), "rloo")
    # 1 − 2/3, 0 − 3/3, 0 − 3/3, 2 − 1/3
    assert advantage_PG.tolist()[0] == pytest.approx([1 / 3, -1, -1, 5 / 3], rel=FLOAT32)


def test_opo_weighs_the_baseline_by_length() -> None:
    rewards, lengths = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[2, 5, 1]])
    # (2 · 1 + 5 · 0 + 1 · 1) / 8 = 0.375
    assert of_lengths(rewards, lengths, "opo").tolist() == [[0.625, -0.375, 0.625]]
    assert of_lengths(rewards, lengths * 0, "opo").tolist()[0] == pytest.approx(
        [1 / 3, -2 / 3, 1 / 3]
    )


def test_reinforce_pp_whitens_over_the_tokens_of_the_batch() -> None:
    rewards, lengths = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1, 3], [2, 2]])
    # mean 5/8; Σ l (R − m)² = 5 · (3/8)² + 3 · (5/8)² = 1.875, over 7 tokens
    std = math.sqrt(1.875 / 7 + 1e-8)
    expected = [0.375 / std, -0.625 / std, 0.375 / std, 0.375 / std]
    found_PG = of_lengths(rewards, lengths, "reinforce_pp")
    assert found_PG.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    # Centred: ½, −½, 0, 0; mean (½ − 3/2)/8 = −1/8; Σ l d² = 0.390625 + 3 · 0.140625 + 4/64
    std = math.sqrt(0.875 / 7 + 1e-8)
    found_PG = of_lengths(rewards, lengths, "reinforce_pp_baseline")
    expected = [0.625 / std, -0.375 / std, 0.125 / std, 0.125 / std]
    assert found_PG.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_does_not_depend_on_the_order_of_groups(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, 900, (50, 4), generator=generator)
    order = torch.randperm(50, generator=generator)
    permuted = of_lengths(rewards[order], lengths[order], kind)
    assert torch.equal(permuted, of_lengths(rewards, lengths, kind)[order])


def test_a_lower_baseline_raises_every_advantage() -> None:
    rewards, lengths = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1, 3], [2, 2]])
    shifted = {kind: of_lengths(rewards, lengths, kind, -0.25) for kind in ("grpo_no_std", "opo")}
    assert shifted["grpo_no_std"].tolist() == [[0.75, -0.25], [0.25, 0.25]]
    assert shifted["opo"].tolist() == [[1.0, 0.0], [0.25, 0.25]]
    assert of_lengths(rewards, lengths, "rloo", -0.25).tolist() == [[1.25, -0.75], [0.25, 0.25]]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_of_equal_rewards_get_exactly_zero(kind: str) -> None:
    # Three times 0.1 has a float mean that is not 0.1; a tiny advantage would count as a token.
    advantage_PG = group_advantages(torch.full((2, 3), 0.1), kind)
    assert advantage_PG.tolist() == [[0.0, 0.0, 0.0]] * 2


def test_an_advantage_must_be_a_function() -> None:
    with pytest.raises(UserCodeError, match=r"NOT_CALLABLE' .*is a int; name a function$"):
        Advantages("tests.algorithm.own_objectives:NOT_CALLABLE")


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("numpy_advantage", "a numpy.ndarray for 2 samples"),
        ("bad_advantage", "a float64 tensor [] for 2 samples"),
    ],
)
def test_an_advantage_that_is_no_tensor_of_the_group_is_named(name: str, returned: str) -> None:
    group = SimpleNamespace(samples=[SimpleNamespace(reward=0.0), SimpleNamespace(reward=1.0)])
    with pytest.raises(UserCodeError, match=re.escape(f" returned {returned}")):
        Advantages(f"tests.algorithm.own_objectives:{name}").compute([group])


def test_no_groups_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0, 4), "grpo").shape == (0, 4)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (torch.zeros(3, 1), r"responses per prompt >= 2\], got \[3, 1\]"),
        (torch.zeros(3), r"got \[3\]"),
        (torch.tensor([[1.0, math.nan]]), r"reward_PG\[0, 1\] is nan"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(reward: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(reward, "grpo")
