"""Token weights, corrections and sums by hand and in float64, and the loss over any split.

Shape legend: T = response tokens, R = responses, B = samples.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.loss import (
    LOG_RATIO_LIMIT,
    RESPONSE_UNIT,
    first_nonfinite,
    is_finite,
    limit_weights,
    log_weights,
    response_sums,
    sum_over_responses,
    token_weights,
)
from bapo_megatron.algorithm.objective import LOG_RATIO_LIMIT as OBJECTIVE_LIMIT
from bapo_megatron.config.schema import CorrectionConfig
from bapo_megatron.ops.logprob import TokenLogprobs
from bapo_megatron.runtime.distributed import ProcessGroups
from tests.algorithm.batches import CLIP, DUAL_CLIP, random_batch
from tests.fakes.given_tokens import CONTEXT, make_micro_batch, make_stage, one_rank

CLIPPED = CLIP | {"dual_clip": DUAL_CLIP}


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroups]:
    with one_rank() as groups:
        yield groups


# Three responses with 2, 0 and 1 training tokens out of 3, 1 and 2.
RESPONSE_MASK_T = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
RESPONSE_TOKENS_T = torch.tensor([2.0, 2.0, 2.0, 0.0, 1.0, 1.0])
RESPONSE_TOKENS_R = torch.tensor([2, 0, 1])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 3, 1 / 3, 0, 0, 1 / 3, 0]),
        ("sequence_mean", [1 / 4, 1 / 4, 0, 0, 1 / 2, 0]),
        ("token_sum_norm", [1 / 20, 1 / 20, 0, 0, 1 / 20, 0]),
    ],
)
def test_token_weights_by_hand(aggregation: str, expected: list[float]) -> None:
    weight_T = token_weights(
        RESPONSE_MASK_T, RESPONSE_TOKENS_T, aggregation, RESPONSE_TOKENS_R, constant=10.0
    )
    assert weight_T.tolist() == pytest.approx(expected, rel=1e-6)
    assert weight_T.dtype == torch.float32
    without_T = token_weights(torch.zeros(3), torch.zeros(3), aggregation, torch.zeros(2))
    assert without_T.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "token_sum_norm"])
@pytest.mark.parametrize("num_parts", [2, 5, 40])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    groups: ProcessGroups, aggregation: str, num_parts: int
) -> None:
    stage = make_stage(groups, CLIPPED)
    batch = random_batch(240, seed=3)
    logprob_T, entropy_T = batch.pop("logprob_T"), batch.pop("entropy_T")
    response_T = torch.arange(240) // 7
    tokens_R = torch.zeros(int(response_T.max()) + 1).index_add(0, response_T, batch["mask_T"])
    batch["loss_weight_T"] = token_weights(
        batch["mask_T"], tokens_R[response_T], aggregation, tokens_R, 32.0
    )

    def loss_of(leaf_T: Tensor, part: Any) -> tuple[float, Tensor]:
        policy: Any = TokenLogprobs(leaf_T[part], entropy_T[part])
        piece = make_micro_batch(**{name: value[part] for name, value in batch.items()})
        loss, report = stage.loss(policy, piece, decision=None, context=CONTEXT)
        loss.backward()
        return loss.item(), report.sums

    whole_T = logprob_T.clone().requires_grad_()
    whole_loss, whole_sums = loss_of(whole_T, slice(None))

    split_T = logprob_T.clone().requires_grad_()
    permutation = torch.randperm(240, generator=torch.Generator().manual_seed(1))
    total, sums = 0.0, torch.zeros_like(whole_sums)
    for part in permutation.chunk(num_parts):
        loss, part_sums = loss_of(split_T, part)
        total += loss
        sums += part_sums
    assert total == pytest.approx(whole_loss, abs=1e-6)
    assert whole_T.grad is not None
    assert split_T.grad is not None
    assert torch.count_nonzero(whole_T.grad) > 0
    assert torch.allclose(split_T.grad, whole_T.grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sums, whole_sums, rtol=1e-12, atol=0)


def _tokens(num_tokens: int = 400, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout_T = -3 * torch.rand(num_tokens, generator=generator)
    return {
        "recomputed_T": rollout_T + 0.6 * torch.randn(num_tokens, generator=generator),
        "rollout_T": rollout_T,
        "mask_T": (torch.rand(num_tokens, generator=generator) < 0.8).float(),
        "sample_T": torch.sort(torch.randint(9, (num_tokens,), generator=generator)).values,
    }


def _oracle(tokens: dict[str, Tensor], config: CorrectionConfig) -> np.ndarray:
    """The factor of every token with mask 1, by the definition, in float64."""
    recomputed, rollout = (tokens[n].double().numpy() for n in ("recomputed_T", "rollout_T"))
    mask, sample = tokens["mask_T"].numpy(), tokens["sample_T"].numpy()
    log_w = np.clip(recomputed - rollout, -20, 20)
    if config.kind == "sequence":
        sums = {b: log_w[(sample == b) & (mask == 1)].sum() for b in set(sample.tolist())}
        log_w = np.clip([sums[b] for b in sample.tolist()], -20, 20)
    w = np.exp(log_w)
    if config.kind == "icepop":
        return np.where((w < config.low) | (w > config.high), 0.0, w)
    return np.minimum(w, config.cap)


def _computed(
    tokens: dict[str, Tensor], config: CorrectionConfig, order: Tensor, num_parts: int
) -> Tensor:
    """The same by the package, over tokens in ``order`` in so many parts."""
    log_weight_T = log_weights(tokens["recomputed_T"], tokens["rollout_T"], tokens["mask_T"])
    if config.kind == "sequence":
        sample_T = tokens["sample_T"]
        parts = [(log_weight_T[part], sample_T[part]) for part in order.chunk(num_parts)]
        sum_B = sum_over_responses(parts, 9, log_weight_T.device)
        log_weight_T = (
            response_sums(sum_B, sample_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).float()
        )
    return limit_weights(log_weight_T.exp(), config)


@pytest.mark.parametrize(
    "config",
    [
        CorrectionConfig(kind="token", cap=1.3),
        CorrectionConfig(kind="sequence", cap=2.0),
        CorrectionConfig(kind="sequence", cap=1e9),
        CorrectionConfig(kind="icepop", low=0.7, high=1.5),
    ],
    ids=lambda config: f"{config.kind} {config.cap:g}",
)
@pytest.mark.parametrize("seed", range(3))
def test_weights_equal_their_definition_in_float64(config: CorrectionConfig, seed: int) -> None:
    tokens = _tokens(seed=seed)
    factor_T = _computed(tokens, config, torch.arange(400), 1)
    trains_T = tokens["mask_T"].bool().numpy()
    expected_T = _oracle(tokens, config)
    assert factor_T.numpy()[trains_T] == pytest.approx(expected_T[trains_T], rel=2e-6)
    limited = {round(float(x), 6) for x in factor_T[trains_T]}
    assert len(limited) > 1


def test_the_limits_of_icepop_belong_to_what_is_kept() -> None:
    weight_T = torch.tensor([0.5, 5.0, 0.4999, 5.001])
    limits = CorrectionConfig(kind="icepop", low=0.5, high=5.0)
    assert limit_weights(weight_T, limits).tolist() == [0.5, 5.0, 0.0, 0.0]


def test_sequence_weights_have_the_same_bits_for_any_order_and_split() -> None:
    tokens = _tokens(seed=5)
    config = CorrectionConfig(kind="sequence", cap=1e9)
    expected_T = _computed(tokens, config, torch.arange(400), 1)
    generator = torch.Generator().manual_seed(1)
    for num_parts in (2, 7, 400):
        order = torch.randperm(400, generator=generator)
        assert _computed(tokens, config, order, num_parts).equal(expected_T)


def test_logs_are_clamped_and_sums_do_not_overflow() -> None:
    assert OBJECTIVE_LIMIT == LOG_RATIO_LIMIT
    num_tokens = 1 << 20
    log_weight_T = log_weights(
        torch.zeros(num_tokens), torch.full((num_tokens,), -1e30), torch.ones(num_tokens)
    )
    assert log_weight_T[0] == 20.0
    response_T = torch.zeros(num_tokens, dtype=torch.int64)
    sum_B = sum_over_responses([(log_weight_T, response_T)], 1, response_T.device)
    assert sum_B.tolist() == [num_tokens * 20 * round(1 / RESPONSE_UNIT)]
    sum_T = response_sums(sum_B, torch.tensor([0])).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    assert sum_T.tolist() == [20.0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_tokens_without_a_finite_log_prob_have_no_part_in_a_response(broken: float) -> None:
    log_weight_T = log_weights(
        torch.tensor([-1.0, -1.0]), torch.tensor([broken, -2.0]), torch.ones(2)
    )
    assert log_weight_T.tolist() == [0.0, 1.0]


def test_nan_and_infinity_are_not_finite() -> None:
    values = torch.tensor([0.0, -3e38, math.nan, math.inf, -math.inf, 1e-45])
    assert is_finite(values).tolist() == [True, True, False, False, False, True]


@pytest.mark.parametrize(
    ("values", "mask", "index"),
    [
        ([-3e38, 1e-45, math.nan, math.inf], [1, 1, 1, 1], 2),
        ([1.0, math.nan, -math.inf], [1, 0, 1], 2),
        ([1.0, math.nan], [1, 0], None),
        ([], [], None),
    ],
)
def test_the_first_nonfinite_value_under_mask_one_is_found(
    values: list[float], mask: list[float], index: int | None
) -> None:
    assert first_nonfinite(torch.tensor(values), torch.tensor(mask)) == index
