"""What an environment wrote has no part in an update but as context.

Shape legend: N = packed tokens of a micro-batch, R = tokens of one response, what an environment
wrote included.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from bapo_megatron.data.dump import read_batch
from tests.distributed_launch import run_ranks
from tests.oracles.bound_search import Tokens, float64_search
from tests.oracles.policy_loss import policy_loss
from tests.oracles.token_batches import paper_rule
from tests.trainer.exact_policy import ExactPolicy
from tests.trainer.one_update import (
    ENTROPY_COEFFICIENT,
    Case,
    Updates,
    assert_same_gradients,
    make_updates,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.types import MicroBatch, Sample

pytestmark = pytest.mark.distributed

GSPO = "tests.algorithm.own_objectives:Gspo"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "bapo": {},
    "bapo, dual clip": {"dual_clip": 1.2, "loss_aggregation": "sequence_mean"},
    "gspo": {"objective": GSPO, "objective_options": {"low": 0.2, "high": 0.4}},
}


@pytest.fixture(scope="module", params=[0, 13], ids=["whole logits", "chunks"])
def updates(request: pytest.FixtureRequest, random_model: Path, episode_dump: Path) -> Updates:
    """One update by each objective, with the gradient of the model's output."""
    ops = {"logits_chunk_tokens": request.param}
    cases = {name: Case(a, ops=ops, watches_output=True) for name, a in ALGORITHMS.items()}
    return run_ranks(make_updates, 1, random_model, episode_dump, {}, cases)[0]


@pytest.fixture(scope="module")
def samples(episode_dump: Path) -> tuple[Sample, ...]:
    return read_batch(episode_dump).samples


def _rows(micro_batch: MicroBatch, samples: tuple[Sample, ...]) -> tuple[list[int], list[int]]:
    """Rows that predict what the policy sampled, and what an environment wrote."""
    by_tokens = {(*s.prompt.token_ids.tolist(), *s.response_token_ids.tolist()): s for s in samples}
    sampled: list[int] = []
    written: list[int] = []
    for start, end in pairwise(micro_batch.cu_seqlens.tolist()):
        sample = by_tokens[tuple(micro_batch.token_ids_N[start:end].tolist())]
        first = start + len(sample.prompt.token_ids) - 1
        written_places = {
            k for begin, length in sample.written for k in range(begin, begin + length)
        }
        for j in range(len(sample.response_token_ids)):
            (written if j in written_places else sampled).append(first + j)
    return sampled, written


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows_that_predict_written_tokens_have_a_gradient_of_zero_bits(
    updates: Updates, samples: tuple[Sample, ...], name: str
) -> None:
    num_sampled = num_written = num_moved = 0
    for micro_batch, gradient in updates[name]["outputs"]:
        gradient_N = gradient.reshape(micro_batch.num_tokens, -1)
        sampled, written = _rows(micro_batch, samples)
        assert torch.count_nonzero(gradient_N[written].view(torch.int32)) == 0
        num_moved += int(gradient_N[sampled].any(dim=1).sum())
        num_sampled += len(sampled)
        num_written += len(written)
    assert num_written == sum(sample.num_written for sample in samples) > 50
    assert num_sampled == sum(len(sample.behaviour_logprobs) for sample in samples)
    assert num_moved > 0.9 * num_sampled


@pytest.mark.parametrize("name", ["bapo", "bapo, dual clip"])
def test_an_update_is_that_of_a_loss_over_all_tokens_with_an_explicit_mask(
    updates: Updates, exact: ExactPolicy, name: str
) -> None:
    update = updates[name]
    dual_clip = ALGORITHMS[name].get("dual_clip")
    mask = torch.cat(exact.masks)
    weights = {
        "bapo": [mask_R / mask.sum() for mask_R in exact.masks],
        "bapo, dual clip": [mask_R / mask_R.sum() / len(exact.masks) for mask_R in exact.masks],
    }[name]
    advantage = torch.cat(
        [torch.full_like(m, a) for m, a in zip(exact.masks, exact.advantages, strict=True)]
    )
    logprob, behaviour = torch.cat(exact.logprobs), torch.cat(exact.behaviours)

    oracle = float64_search(
        Tokens(*(_float32(values) for values in (logprob, behaviour, advantage, mask))),
        paper_rule(target=0.38, dual_clip=dual_clip),
    )
    assert oracle.margin > 1e-6
    assert update["bounds"] == pytest.approx((oracle.clip_low, oracle.clip_high), abs=1e-7)
    loss = policy_loss(
        logprob,
        behaviour,
        advantage,
        mask,
        torch.cat(weights),
        low=oracle.clip_low,
        high=oracle.clip_high,
        dual_clip=dual_clip,
        entropy_T=torch.cat(exact.entropies),
        entropy_coefficient=ENTROPY_COEFFICIENT,
    )
    assert loss.clipped_high + loss.clipped_low > 0
    assert_same_gradients(update["gradients"], exact.gradients(loss.loss))


def _float32(values: Tensor) -> np.ndarray:
    return values.detach().numpy().astype(np.float32)
