"""Whether a server's log-probs followed the trainer's."""

import numpy as np
import pytest

from bapo_megatron.weight_sync.verify import _Comparison

TOKENS = 512


def drawn(seed: int, scale: float) -> np.ndarray:
    return scale * np.random.default_rng(seed).standard_normal(TOKENS)


@pytest.mark.parametrize("change", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("mismatch", [0.0, 1e-6, 0.03])
def test_a_server_that_repeats_its_log_probs_while_the_trainer_s_move_has_no_new_weights(
    change: float, mismatch: float
) -> None:
    start = drawn(0, 1.0)
    server = start + drawn(1, mismatch)
    before = _Comparison(server, start)
    assert before.shows_no_change_of(_Comparison(server, start + drawn(2, change)))
    hardly = server + drawn(3, 0.05 * change)
    assert before.shows_no_change_of(_Comparison(hardly, start + drawn(2, change)))


@pytest.mark.parametrize("change", [0.0, 1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("rounding", [0.0, 1e-6, 5e-3])
def test_new_weights_raise_no_alarm_however_both_sides_round(
    change: float, rounding: float
) -> None:
    """In bfloat16 a change of weights rounds each side anew, by more than it changes them."""
    start, moved = drawn(0, 1.0), drawn(0, 1.0) + drawn(1, change)
    before = _Comparison(start + drawn(2, rounding), start + drawn(3, rounding))
    after = _Comparison(moved + drawn(4, rounding), moved + drawn(5, rounding))
    assert not before.shows_no_change_of(after)


def test_a_trainer_that_does_not_move_shows_nothing() -> None:
    start = drawn(0, 1.0)
    before = _Comparison(start + drawn(1, 0.01), start)
    assert not before.shows_no_change_of(before)
    assert not before.shows_no_change_of(_Comparison(before.server, start + drawn(2, 1e-6)))
