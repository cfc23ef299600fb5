from __future__ import annotations

import pytest
import torch

from bapo_megatron.tiny.model import build_model, build_tokenizer
from bapo_megatron.tiny.task import SolutionMixture, split_problems
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


@pytest.mark.slow
def test_thirty_steps_lower_the_loss_and_the_thread_count_comes_back():
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    problems = split_problems(2048, 512, seed=0).warmup
    settings = WarmupSettings(num_steps=30, batch_size=16, num_rise_steps=5, num_threads=2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        final_loss = warm_up(model, tokenizer, problems, SolutionMixture(), settings, 0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    # ln(320) = 5.77 is the loss of a model that knows nothing.
    assert 0.4 < final_loss < 3.0
    assert not model.training
