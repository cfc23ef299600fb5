"""Decisions predicted from the tokens' advantages and the ratios of earlier updates."""

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.trainer.speculation import predict, remember
from tests.fakes.given_tokens import make_tokens


def _statistics(bapo: Bapo, ratio: float, positive: float, negative: float) -> Tensor:
    """A token of each sign with this ratio, whose advantages have these sizes."""
    log_ratio = torch.tensor(ratio).log().expand(2)
    advantage = torch.tensor([positive, -negative])
    return bapo.statistics(make_tokens(log_ratio - 1, torch.full((2,), -1.0), advantage))


def test_without_history_a_ratio_of_1_is_predicted() -> None:
    bapo = Bapo(BapoConfig.model_validate({"target": 0.4}), None)
    prediction = predict(bapo, _statistics(bapo, 1.0, 3.0, 1.0), None)
    assert prediction[:2].tolist() == pytest.approx([0.6, 1.2])
    assert prediction[2:].isnan().all()


def test_ratios_come_from_earlier_updates_and_weights_from_this_one() -> None:
    bapo = Bapo(BapoConfig.model_validate({"target": 0.4}), None)
    recent_K = remember(None, _statistics(bapo, 2.0, 5.0, 1.0))
    # With ratios of 2, P = 1.5 · min(2, c) and N = 3.25 · 2. The share reaches 0.4 where
    # P = 6.5 · 2/3, above 3: all candidates fail. With A = 2.9 it is c ≥ 1.494.
    known_K = _statistics(bapo, 1.0, 1.5, 3.25)
    assert predict(bapo, known_K, recent_K)[:2].tolist() == pytest.approx([0.9, 3.0])
    known_K = _statistics(bapo, 1.0, 2.9, 3.25)
    assert predict(bapo, known_K, recent_K)[:2].tolist() == pytest.approx([0.6, 1.5])


def test_newer_updates_count_more() -> None:
    bapo = Bapo(BapoConfig.model_validate({"target": 0.4}), None)
    recent_K = None
    for ratio in (*[0.7] * 3, *[2.0] * 12):
        recent_K = remember(recent_K, _statistics(bapo, ratio, 1.0, 1.0))
    known_K = _statistics(bapo, 1.0, 2.9, 3.25)
    # Three old updates of 0.75^12 … 0.75^14 beside four: a little more than 1.494 is needed.
    assert predict(bapo, known_K, recent_K)[:2].tolist() == pytest.approx([0.6, 1.5])


@pytest.mark.parametrize(("positive", "negative"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_an_update_without_one_sign_is_predicted_right(positive: float, negative: float) -> None:
    bapo = Bapo(BapoConfig(), None)
    recent_K = remember(None, _statistics(bapo, 1.3, 2.0, 1.0))
    prediction = predict(bapo, _statistics(bapo, 1.0, positive, negative), recent_K)
    decision = bapo.decide(_statistics(bapo, 1.4, positive, negative))
    assert prediction[:2].equal(decision[:2])


def test_a_sign_that_recent_updates_lacked_has_a_ratio_of_1() -> None:
    bapo = Bapo(BapoConfig(), None)
    recent_K = remember(None, _statistics(bapo, 1.3, 0.0, 1.0))
    prediction = predict(bapo, _statistics(bapo, 1.0, 1.0, 1.0), recent_K)
    # P = 1, N = 1.3: the share is 0.435.
    assert prediction[:2].tolist() == pytest.approx([0.6, 1.2])


def test_a_rescaled_table_has_the_ratios_of_one_and_the_weights_of_the_other() -> None:
    bapo = Bapo(BapoConfig.model_validate({"contribution": "gradient"}), 3.0)
    ratios, weights = _statistics(bapo, 1.7, 2.0, 0.5), _statistics(bapo, 1.0, 0.25, 3.0)
    outcome = bapo.search.path(bapo.search.rescale(ratios, weights))
    expected = bapo.search.path(_statistics(bapo, 1.7, 0.25, 3.0))
    for pair, wanted in zip(outcome.candidates, expected.candidates, strict=True):
        assert pair.positive == pytest.approx(wanted.positive, abs=2**-16)
        assert pair.negative == pytest.approx(wanted.negative, abs=2**-16)
    assert bapo.search.rescale(weights, weights).equal(weights)
