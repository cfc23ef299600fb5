from __future__ import annotations

from itertools import combinations

import pytest

from bapo_megatron.reward.scoring import avg_at_k, pass_at_k, pass_at_k_estimate


def test_avg_at_k_is_the_mean_of_the_prompts_means():
    assert avg_at_k([[1, 0, 0, 0], [1, 1]]) == 0.625


def test_pass_at_k_by_hand():
    # 1 − C(3, 2) / C(4, 2) = 1 − 3/6 and 0, over two prompts.
    assert pass_at_k([[1, 0, 0, 0], [0, 0.5, 0, 0]], k=2) == 0.25
    assert pass_at_k([[1, 0], [0, 0]], k=2) == 0.5


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_the_estimate_is_the_share_of_subsets_with_a_right_sample(num_right, k):
    samples = [1] * num_right + [0] * (5 - num_right)
    subsets = list(combinations(samples, k))

    wanted = sum(any(subset) for subset in subsets) / len(subsets)

    assert pass_at_k_estimate(5, num_right, k) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("k", [0, 3])
def test_a_k_beyond_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=rf"needs 1 <= k <= 2 samples, got k = {k}"):
        pass_at_k([[1, 0]], k=k)
