"""The CUDA kernel of the importance ratio, run by the emulator, against float64.

Shape legend: T = tokens.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.cuda_emulation.launchers import EmulatedKernels
from tests.oracles.token_batches import paper_rule, random_tokens


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 256, 257, 4097])
def test_the_ratio_is_the_float64_exponential_rounded_once(
    kernels: EmulatedKernels, num_tokens: int
) -> None:
    tokens = random_tokens(np.random.default_rng(num_tokens), num_tokens, paper_rule())
    ratio_T = kernels.importance_ratio(
        torch.from_numpy(tokens.logprob), torch.from_numpy(tokens.behaviour)
    )
    assert np.array_equal(ratio_T.numpy(), tokens.ratios())


def test_the_log_ratio_is_held_at_twenty_and_bad_tokens_are_nan(kernels: EmulatedKernels) -> None:
    logprob_T = torch.tensor([21.0, -300.0, 3e38, math.nan, math.inf, 0.0, 0.0, -math.inf, 1.0])
    behaviour_T = torch.tensor([0.0, 0.0, -3e38, 0.0, 0.0, math.nan, math.inf, -math.inf, 1.0])
    ratio_T = kernels.importance_ratio(logprob_T, behaviour_T)
    high, low = np.float32(485165195.40979028), np.float32(2.0611536224385578e-09)
    assert ratio_T[:3].tolist() == [high, low, high]
    assert ratio_T[3:8].isnan().all()
    assert ratio_T[8] == 1.0
