"""The learning-rate schedule, in updates counted from 0."""

from __future__ import annotations

import pytest

from bapo_megatron.config.megatron import OptimizerConfig
from bapo_megatron.policy.optimizer import learning_rate


def rates(total: int, updates: range, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 0.8, **settings})
    return [learning_rate(config, update, total) for update in updates]


def test_constant_stays_also_beyond_the_end() -> None:
    assert rates(3, range(5)) == [0.8] * 5


def test_warm_up_rises_from_its_first_update_to_the_peak() -> None:
    assert rates(9, range(6), warmup_updates=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_linear_decay_reaches_the_minimum_at_the_end_and_stays() -> None:
    assert rates(4, range(6), schedule="linear", min_lr=0.4) == pytest.approx(
        [0.8, 0.7, 0.6, 0.5, 0.4, 0.4]
    )


def test_cosine_decay_is_half_way_down_in_the_middle() -> None:
    # Quarter points of a half cosine: (1 + √½) / 2 and (1 − √½) / 2 of the way.
    assert rates(4, range(5), schedule="cosine") == pytest.approx(
        [0.8, 0.682842712, 0.4, 0.117157288, 0.0]
    )


def test_decay_begins_after_the_warm_up() -> None:
    assert rates(6, range(7), schedule="linear", warmup_updates=2) == pytest.approx(
        [0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0]
    )


def test_a_warm_up_longer_than_the_run_never_decays() -> None:
    assert rates(2, range(2), schedule="cosine", warmup_updates=4) == pytest.approx([0.2, 0.4])


def test_rate_0_stays_0() -> None:
    assert rates(4, range(4), lr=0.0, schedule="cosine", warmup_updates=2) == [0.0] * 4
