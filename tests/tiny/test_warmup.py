from __future__ import annotations

import pytest
import torch
from rich.console import Console

from bapo_megatron.tiny.model import TinyQwen2, build_tokenizer, tiny_config
from bapo_megatron.tiny.task import SolutionMixture, all_problems
from bapo_megatron.tiny.warmup import WarmupSettings, learning_rate, pad_batch, warm_up


def test_batches_are_padded_on_the_right_and_only_responses_have_labels():
    input_ids, labels = pad_batch([([2, 9], [7, 1]), ([3], [1])], pad_id=0)
    assert input_ids.tolist() == [[2, 9, 7, 1], [3, 1, 0, 0]]
    assert labels.tolist() == [[-100, -100, 7, 1], [-100, 1, -100, -100]]


def test_learning_rate_rises_linearly_and_falls_along_a_cosine():
    settings = WarmupSettings(num_steps=5, num_rise_steps=2, peak_lr=0.8)
    rates = [learning_rate(step, settings) for step in range(5)]
    # cos(pi / 4) = 0.70711, so 0.4 * 1.70711, 0.4 * 1, 0.4 * 0.29289
    assert rates == pytest.approx([0.4, 0.8, 0.682843, 0.4, 0.117157], abs=1e-6)


def test_thirty_steps_lower_the_loss_and_the_thread_count_comes_back():
    tokenizer = build_tokenizer()
    model = TinyQwen2(tiny_config(tokenizer), seed=0)
    settings = WarmupSettings(num_steps=30, batch_size=16, num_rise_steps=5, num_threads=2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = warm_up(
            model,
            tokenizer,
            all_problems(),
            SolutionMixture(),
            settings,
            seed=0,
            console=Console(quiet=True),
        )
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    # ln(320) = 5.77 is the loss of a model that knows nothing.
    assert 0.4 < result.final_loss < 3.0
    assert result.elapsed_s > 0
    assert not model.training


@pytest.mark.parametrize(
    "change",
    [{"num_steps": 0}, {"batch_size": 0}, {"num_rise_steps": 0}, {"num_threads": 0}],
)
def test_empty_optimisation_is_refused(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        WarmupSettings(**change)


def test_negative_learning_rate_is_refused():
    with pytest.raises(ValueError, match="peak_lr must not be negative, got -1"):
        WarmupSettings(peak_lr=-1)
