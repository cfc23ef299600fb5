"""Token weights by hand, and the loss over any split into micro-batches.

Shape legend: T = response tokens, R = responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithm.loss import token_weights
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


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "token_sum_norm"])
def test_an_update_without_training_tokens_has_zero_weights(aggregation: str) -> None:
    weight_T = token_weights(torch.zeros(3), torch.zeros(3), aggregation, torch.zeros(2))
    assert weight_T.tolist() == [0.0, 0.0, 0.0]


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


def test_sequence_mean_equals_the_mean_of_response_means() -> None:
    batch = random_batch(30, seed=4)
    response_T = torch.arange(30) // 6
    batch["mask_T"][6:12] = 0  # the second response does not train
    tokens_R = torch.zeros(5).index_add(0, response_T, batch["mask_T"])
    weight_T = token_weights(batch["mask_T"], tokens_R[response_T], "sequence_mean", tokens_R)
    value_T = torch.arange(30.0)
    means = [
        value_T[(response_T == r) & (batch["mask_T"] == 1)].double().mean().item()
        for r in (0, 2, 3, 4)
    ]
    assert (weight_T * value_T).sum().item() == pytest.approx(sum(means) / 4, rel=1e-6)
