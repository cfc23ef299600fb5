"""The CUDA kernels of the policy loss, run by the emulator, against autograd in float64.

Shape legend: T = tokens.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cuda_emulation import launchers
from tests.cuda_emulation.launchers import EmulatedKernels
from tests.oracles.policy_loss import policy_loss as oracle_policy_loss
from tests.oracles.token_batches import paper_rule, random_tokens

EDGE_TOKENS = (0, 1, 31, 32, 33)
ORDERS = (0, 1, 7)


@pytest.fixture
def kernels() -> EmulatedKernels:
    emulated = launchers.emulated_kernels()
    emulated.set_order(0)
    return emulated


def bounds_tensor(low: float, high: float) -> Tensor:
    return torch.tensor([low, high, *[math.nan] * 6], dtype=torch.float64)


def loss_batch(num_tokens: int) -> tuple[Tensor, ...]:
    """Log-prob, entropy, behaviour, advantage, mask and weight."""
    rng = np.random.default_rng(num_tokens)
    tokens = random_tokens(rng, num_tokens, paper_rule())
    logprob_T, behaviour_T, advantage_T, mask_T = map(torch.from_numpy, tokens.arrays())
    entropy_T = torch.from_numpy(rng.random(num_tokens, dtype=np.float32))
    weight_T = torch.from_numpy(rng.random(num_tokens, dtype=np.float32))
    return logprob_T, entropy_T, behaviour_T, advantage_T, mask_T, weight_T


class TestPolicyLoss:
    # 2.99 is no candidate, so that no ratio equals it: there autograd would give half a gradient.
    @pytest.mark.parametrize("num_tokens", [*EDGE_TOKENS, 257, 4097, 9000])
    @pytest.mark.parametrize("dual_clip", [None, 2.99])
    def test_sums_and_coefficients_match_autograd_in_float64(
        self, kernels: EmulatedKernels, num_tokens: int, dual_clip: float | None
    ) -> None:
        batch = loss_batch(num_tokens)
        logprob_T, entropy_T, behaviour_T, advantage_T, mask_T, weight_T = batch
        bounds = bounds_tensor(float(np.float32(0.8)), float(np.float32(1.25)))
        sums, coefficient_T = kernels.policy_loss(*batch, bounds, dual_clip)

        leaf_T = logprob_T.clone().requires_grad_()
        oracle = oracle_policy_loss(
            leaf_T,
            behaviour_T,
            advantage_T,
            mask_T,
            weight_T,
            low=0.8,
            high=1.25,
            dual_clip=dual_clip,
        )
        if num_tokens > 0:
            oracle.loss.backward()
            torch.testing.assert_close(coefficient_T, leaf_T.grad, rtol=2e-7, atol=1e-12)
        keep_T = mask_T > 0
        ratio_T = (logprob_T - behaviour_T)[keep_T].double().clamp(-20, 20)
        expected = [
            int(keep_T.sum()),
            int((advantage_T[keep_T] > 0).sum()),
            int((advantage_T[keep_T] != 0).sum()),
            float(oracle.loss.detach()),
            float((weight_T.double() * entropy_T.double())[keep_T].sum()),
            float(entropy_T[keep_T].double().sum()),
            float((ratio_T.expm1() - ratio_T).sum()),
            oracle.clipped_high,
            oracle.clipped_low,
            oracle.clipped_dual,
            0,
        ]
        assert sums.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)

    @pytest.mark.parametrize(
        ("advantage", "low", "high", "dual_clip"),
        [(2.0, 0.5, 1.0, None), (-2.0, 1.0, 2.0, None), (-2.0, 0.5, 2.0, 1.0)],
    )
    def test_the_gradient_passes_at_a_ratio_equal_to_a_limit(
        self,
        kernels: EmulatedKernels,
        advantage: float,
        low: float,
        high: float,
        dual_clip: float | None,
    ) -> None:
        one_T = torch.ones(1)
        sums, coefficient_T = kernels.policy_loss(
            one_T,
            None,
            one_T,
            one_T * advantage,
            one_T,
            one_T * 0.25,
            bounds_tensor(low, high),
            dual_clip,
        )
        assert coefficient_T.tolist() == [-0.25 * advantage]
        assert sums[7:10].tolist() == [0.0, 0.0, 0.0]

    def test_bad_tokens_are_counted_and_give_nothing(self, kernels: EmulatedKernels) -> None:
        batch = loss_batch(200)
        logprob_T, _, behaviour_T, advantage_T, mask_T, _ = batch
        mask_T.fill_(1.0)
        bad = torch.tensor([3, 40, 41, 100])
        clean = [value_T.clone() for value_T in batch]
        clean[4][bad] = 0.0
        logprob_T[3] = math.nan
        behaviour_T[40] = -math.inf
        advantage_T[41] = math.inf
        advantage_T[100] = math.nan
        bounds = bounds_tensor(0.8, 1.25)
        sums, coefficient_T = kernels.policy_loss(*batch, bounds, None)
        clean_sums, clean_coefficient_T = kernels.policy_loss(*clean, bounds, None)
        assert torch.equal(coefficient_T, clean_coefficient_T)
        assert sums[10] == 4
        assert sums[0] == clean_sums[0] + 4
        assert torch.equal(sums[1:10], clean_sums[1:10])

    def test_masked_tokens_are_skipped_whatever_they_hold(self, kernels: EmulatedKernels) -> None:
        nan_T = torch.full((40,), math.nan)
        batch = (nan_T, nan_T, nan_T, nan_T, torch.zeros(40), nan_T)
        sums, coefficient_T = kernels.policy_loss(*batch, bounds_tensor(0.8, 1.2), 3.0)
        assert torch.equal(sums, torch.zeros(11, dtype=torch.float64))
        assert torch.equal(coefficient_T, torch.zeros(40))

    def test_without_entropies_their_sums_are_zero(self, kernels: EmulatedKernels) -> None:
        logprob_T, _, *rest = loss_batch(64)
        sums, _ = kernels.policy_loss(logprob_T, None, *rest, bounds_tensor(0.8, 1.2), None)
        assert sums[4:6].tolist() == [0.0, 0.0]

    def test_infinite_bounds_of_a_refused_search_clip_nothing(
        self, kernels: EmulatedKernels
    ) -> None:
        batch = loss_batch(300)
        sums, coefficient_T = kernels.policy_loss(*batch, bounds_tensor(0.0, math.inf), None)
        assert sums[7:10].tolist() == [0.0, 0.0, 0.0]
        assert bool(coefficient_T.isfinite().all())

    @pytest.mark.parametrize("order", ORDERS)
    def test_the_order_of_threads_does_not_change_a_bit(
        self, kernels: EmulatedKernels, order: int
    ) -> None:
        batch = loss_batch(3000)
        expected, _ = kernels.policy_loss(*batch, bounds_tensor(0.8, 1.25), 3.0)
        kernels.set_order(order)
        sums, _ = kernels.policy_loss(*batch, bounds_tensor(0.8, 1.25), 3.0)
        assert torch.equal(sums, expected)
