"""Advantages by hand."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.advantage import Advantages, group_advantages
from bapo_megatron.algorithm.user_code import UserCodeError
from bapo_megatron.config.schema import ADVANTAGES
from tests.data.samples import make_episode

FLOAT32 = 4 * 2.0**-24
"""Relative, of four roundings."""


WHITENED = math.sqrt(1.875 / 7 + 1e-8)
"""Mean 5/8; Σ l (R − m)² = 5 · (3/8)² + 3 · (5/8)² = 1.875, over 7 tokens."""
CENTRED = math.sqrt(0.875 / 7 + 1e-8)
"""½, −½, 0, 0; mean (½ − 3/2)/8 = −1/8; Σ l d² = 0.390625 + 3 · 0.140625 + 4/64."""
TWO, LENGTHS = [[1.0, 0.0], [1.0, 1.0]], [[1, 3], [2, 2]]
BY_HAND: dict[str, tuple[str, list[list[float]], list[list[int]] | None, float, Any]] = {
    # mean 0.25, squared deviations 3/4 in sum, unbiased variance 1/4, std 1/2
    "grpo": ("grpo", [[1, 0, 0, 0]], None, 0, [[0.75 / 0.500001] + [-0.25 / 0.500001] * 3]),
    "grpo_no_std": (
        *("grpo_no_std", [[1, 0, 0, 0], [2, 4, 6, 8]], None, 0),
        [[0.75, -0.25, -0.25, -0.25], [-3, -1, 1, 3]],
    ),
    # 1 − 2/3, 0 − 3/3, 0 − 3/3, 2 − 1/3
    "rloo": ("rloo", [[1, 0, 0, 2]], None, 0, [[1 / 3, -1, -1, 5 / 3]]),
    # (2 · 1 + 5 · 0 + 1 · 1) / 8 = 0.375
    "opo": ("opo", [[1, 0, 1]], [[2, 5, 1]], 0, [[0.625, -0.375, 0.625]]),
    "opo, empty": ("opo", [[1, 0, 1]], [[0, 0, 0]], 0, [[1 / 3, -2 / 3, 1 / 3]]),
    "reinforce_pp": (
        *("reinforce_pp", TWO, LENGTHS, 0),
        [[0.375 / WHITENED, -0.625 / WHITENED], [0.375 / WHITENED] * 2],
    ),
    "reinforce_pp_baseline": (
        *("reinforce_pp_baseline", TWO, LENGTHS, 0),
        [[0.625 / CENTRED, -0.375 / CENTRED], [0.125 / CENTRED] * 2],
    ),
    "grpo_no_std, lower": ("grpo_no_std", TWO, LENGTHS, -0.25, [[0.75, -0.25], [0.25, 0.25]]),
    "opo, lower": ("opo", TWO, LENGTHS, -0.25, [[1, 0], [0.25, 0.25]]),
    "rloo, lower": ("rloo", TWO, LENGTHS, -0.25, [[1.25, -0.75], [0.25, 0.25]]),
}
"""Kind, rewards, lengths (None: 1 each), the baseline's shift, and the advantages."""


@pytest.mark.parametrize("name", BY_HAND)
def test_advantages_by_hand(name: str) -> None:
    kind, rewards, lengths, shift, expected = BY_HAND[name]
    reward_PG = torch.tensor(rewards)
    length_PG = torch.ones_like(reward_PG) if lengths is None else torch.tensor(lengths)
    advantage_PG = group_advantages(reward_PG, length_PG, kind, shift)
    assert advantage_PG.dtype == torch.float32
    assert advantage_PG.tolist() == [pytest.approx(row, rel=FLOAT32) for row in expected]


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_does_not_depend_on_the_order_of_groups(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    lengths = torch.randint(0, 900, (50, 4), generator=generator)
    order = torch.randperm(50, generator=generator)
    permuted = group_advantages(rewards[order], lengths[order], kind)
    assert torch.equal(permuted, group_advantages(rewards, lengths, kind)[order])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_of_equal_rewards_get_exactly_zero(kind: str) -> None:
    # Three times 0.1 has a float mean that is not 0.1; a tiny advantage would count as a token.
    advantage_PG = group_advantages(torch.full((2, 3), 0.1), torch.ones(2, 3), kind)
    assert advantage_PG.tolist() == [[0.0, 0.0, 0.0]] * 2


def test_an_advantage_must_be_a_function() -> None:
    with pytest.raises(UserCodeError, match=r"NOT_CALLABLE' .*is a int; name a function$"):
        Advantages("tests.algorithm.own_objectives:NOT_CALLABLE")


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("numpy_advantage", "a numpy.ndarray for 2 samples"),
        ("bad_advantage", "a float64 tensor [] for 2 samples"),
        ("infinite_advantage", "[nan, nan] for the rewards [0.0, 0.0]"),
    ],
)
def test_what_is_no_finite_tensor_of_the_group_is_named(name: str, returned: str) -> None:
    group = SimpleNamespace(samples=[SimpleNamespace(reward=0.0)] * 2)
    with pytest.raises(UserCodeError, match=re.escape(f" returned {returned}")):
        Advantages(f"tests.algorithm.own_objectives:{name}").compute([group])


def test_values_per_call_must_come_for_all_groups_or_none() -> None:
    groups: Any = []
    for group_id in (0, 1):
        samples = [make_episode(2, (1, 1, 2), group_id, index) for index in (0, 1)]
        for sample in samples:
            sample.call_rewards = (1.0, 2.0)
        groups.append(SimpleNamespace(samples=samples))
    name = "tests.algorithm.own_objectives:{}call_advantage".format
    assert Advantages(name("")).compute(groups).tolist() == [1.0, 2.0] * 4
    with pytest.raises(UserCodeError, match=r"for some groups only; do so for all$"):
        Advantages(name("sometimes_")).compute(groups)


def test_no_groups_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0, 4), torch.ones(0, 4), "grpo").shape == (0, 4)


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
        group_advantages(reward, torch.ones_like(reward), "grpo")
