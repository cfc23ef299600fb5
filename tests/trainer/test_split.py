"""What a batch's updates consist of: tokens too old to train, and tokens that were not sampled.

Shape legend: R = tokens of one response, T = sampled tokens of a micro-batch.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.config.settings import flat_settings, masked_reasons
from bapo_megatron.data.staleness import spans_of, token_versions
from bapo_megatron.trainer.split import SplitUpdate, ZeroAdvantage, split_step, with_advantages
from bapo_megatron.types import (
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    Sample,
    WrittenSpan,
)
from tests.config.files import run_config
from tests.data.samples import add_branch, make_episode
from tests.trainer.dumps import ONE_RANK

VERSION = 10
VERSIONS = (
    ((10, 10), (6, 6, 9, 10), (9, 9, 9)),
    ((10,), (3, 3), (8, 8, 9)),
)
"""Weights versions of the tokens of each response of two groups, in a batch of version 10."""


def _batch(versions=VERSIONS) -> RolloutBatch:
    groups = []
    for group_id, responses in enumerate(versions):
        prompt = PromptTokens(f"made:{group_id}", np.array([1, 2], np.int32))
        samples = [
            Sample(
                group_id=group_id,
                index=index,
                prompt=prompt,
                response_token_ids=np.arange(len(versions_R), dtype=np.int32),
                behaviour_logprobs=np.zeros(len(versions_R), np.float32),
                versions=spans_of(versions_R),
                finish_reason=FinishReason.STOP,
                reward=float(index == 0),
            )
            for index, versions_R in enumerate(responses)
        ]
        groups.append(Group(group_id, tuple(samples)))
    return RolloutBatch(step=0, version=VERSION, groups=tuple(groups))


def _split(
    limit: dict[str, object],
    batch: RolloutBatch | None = None,
    masked: FinishReason | None = None,
    zero_advantage: ZeroAdvantage = "trained",
    **algorithm: object,
) -> tuple[SplitUpdate, ...]:
    config = AlgorithmConfig.model_validate(algorithm)
    return split_step(
        batch or _batch(),
        Advantages(config.advantage),
        config,
        StalenessConfig(action="mask", **limit),
        ONE_RANK,
        zero_advantage=zero_advantage,
        masked_reasons={masked} - {None},
    )


def test_groups_of_different_sizes_are_refused() -> None:
    batch = _batch((((10,), (9,)), ((10,), (9,), (8,))))
    with pytest.raises(ValueError, match=r"step 0: groups have \[2, 3\] samples"):
        _split({}, batch)


def _tokens(update: SplitUpdate) -> dict[str, float]:
    """The counts of tokens and responses, without those of the packing."""
    return {n: v for n, v in update.counts.items() if not n.startswith(("packing", "f"))}


def _advantages(update: SplitUpdate) -> dict[int, float]:
    """Advantage of each computed response."""
    (micro_batch,) = update.micro_batches
    samples, advantages = micro_batch.sample_T.tolist(), micro_batch.advantage_T.tolist()
    return dict(zip(samples, advantages, strict=True))


def _second_group_equal(batch: RolloutBatch) -> RolloutBatch:
    for sample in batch.groups[1].samples:
        sample.reward = 1.0
    return batch


def _weights_by_sample(update: SplitUpdate) -> dict[int, list[float]]:
    """Loss weights of each computed response, in the order of its tokens."""
    (micro_batch,) = update.micro_batches
    weights: dict[int, list[float]] = {}
    for sample, weight, mask in zip(
        micro_batch.sample_T.tolist(),
        micro_batch.loss_weight_T.tolist(),
        micro_batch.mask_T.tolist(),
        strict=True,
    ):
        assert (weight > 0) == (mask == 1.0)
        weights.setdefault(sample, []).append(weight)
    return weights


@pytest.mark.parametrize(
    ("aggregation", "full", "partial"),
    [
        # 15 tokens, of which the two of age 4 and the two of age 7 do not train: 11 in 5 responses.
        ("token_mean", {0: 11, 2: 11, 3: 11, 5: 11}, 11),
        ("sequence_mean", {0: 10, 2: 15, 3: 5, 5: 15}, 10),
        ("token_sum_norm", {0: 20, 2: 20, 3: 20, 5: 20}, 20),
    ],
)
def test_global_denominators_count_only_tokens_that_train(
    aggregation: str, full: dict[int, int], partial: int
) -> None:
    (update,) = _split(
        {"max_age": 3, "measure": "token"},
        loss_aggregation=aggregation,
        token_sum_norm_constant=4.0,
    )
    weights = _weights_by_sample(update)
    assert sorted(weights) == [0, 1, 2, 3, 5]
    for sample, divisor in full.items():
        assert weights[sample] == pytest.approx([1 / divisor] * len(weights[sample]), rel=1e-6)
    assert weights[1] == pytest.approx([0, 0, 1 / partial, 1 / partial], rel=1e-6)
    assert (update.counts["response_tokens"], update.counts["unmasked_tokens"]) == (15, 11)
    # The first response of each group is right: 2 and 1 tokens. The others have 4, 3, 2 and 3.
    lengths = (update.counts["positive_length"], update.counts["negative_length"])
    assert lengths == (3.0, 12.0)


def test_responses_that_are_too_old_are_not_computed_and_stay_in_the_baseline() -> None:
    (update,) = _split({"max_age": 3, "measure": "oldest"}, advantage="grpo_no_std")
    assert _advantages(update) == pytest.approx({0: 2 / 3, 2: -1 / 3, 3: 2 / 3, 5: -1 / 3})
    assert update.counts["packing_real"] == 9 + 4 * 2


def test_an_update_whose_tokens_are_all_too_old_has_nothing_to_compute() -> None:
    old = ((2, 2), (2,)), ((10, 10), (9,))
    first, second = _split(
        {"max_age": 3, "measure": "token"}, _batch(versions=old), updates_per_batch=2
    )
    lengths = {
        "positive_responses": 1.0,
        "positive_length": 2.0,
        "negative_responses": 1.0,
        "negative_length": 1.0,
    }
    tokens = {"response_tokens": 3, "masked_tokens": 3, "unmasked_tokens": 0, "computed_tokens": 0}
    assert first == SplitUpdate({**tokens, **lengths}, (0, 1))  # nothing to compute
    tokens = {"response_tokens": 3, "masked_tokens": 0, "unmasked_tokens": 3, "computed_tokens": 3}
    assert _tokens(second) == {**tokens, **lengths}
    assert len(second.micro_batches) == 1


@pytest.mark.parametrize(
    ("zero_advantage", "num_computed"), [("trained", 3), ("computed", 0), ("left_out", 0)]
)
def test_an_update_without_a_gradient_has_nothing_to_compute_unless_it_trains(
    zero_advantage: ZeroAdvantage, num_computed: int
) -> None:
    # The first group has advantages but is too old, the second is young and has none.
    batch = _second_group_equal(_batch(versions=(((2, 2), (2,)), ((10, 10), (9,)))))
    limit = {"max_age": 3, "measure": "token"}
    (update,) = _split(limit, batch, zero_advantage=zero_advantage)
    assert update.counts["unmasked_tokens"] == 3
    assert update.counts["computed_tokens"] == num_computed
    assert len(update.micro_batches) == (num_computed > 0)


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    # 15 tokens of 6 responses, also where only the first three, 2 + 4 + 3 tokens, are computed.
    [("token_mean", (15, 15, 15)), ("sequence_mean", (12, 24, 18)), ("token_sum_norm", (24,) * 3)],
)
def test_responses_without_an_advantage_count_in_the_denominators_alone(
    aggregation: str, divisors: tuple[int, ...]
) -> None:
    batch = _second_group_equal(_batch())
    settings = {"loss_aggregation": aggregation, "token_sum_norm_constant": 4.0}

    (every,) = _split({}, batch, zero_advantage="computed", **settings)
    (update,) = _split({}, batch, zero_advantage="left_out", **settings)

    weights = _weights_by_sample(update)
    assert [weights[i][0] for i in range(3)] == pytest.approx([1 / d for d in divisors], rel=1e-6)
    assert weights == {i: w for i, w in _weights_by_sample(every).items() if i < 3}
    assert len(_weights_by_sample(every)) == 6
    assert (every.counts["computed_tokens"], update.counts["computed_tokens"]) == (15, 9)
    assert _tokens(update) == {**_tokens(every), "computed_tokens": 9}


WRITTEN = {1: ((1, 5), (8, 2)), 2: ((1, 3),), 5: ((2, 4),)}
"""What an environment wrote in some responses of the batch: 7, 3 and 4 tokens."""


def _episodes() -> RolloutBatch:
    """The same sampled tokens, with more between them."""
    batch = _batch()
    for number, spans in WRITTEN.items():
        sample = batch.samples[number]
        sample.written = tuple(WrittenSpan(*span) for span in spans)
        length = len(sample.behaviour_logprobs) + sum(n for _, n in spans)
        sample.response_token_ids = np.arange(length, dtype=np.int32)
    return batch


@pytest.mark.parametrize(("reason", "masked"), [("length", 1), ("turns", 2), ("environment", 5)])
def test_episodes_that_ended_for_a_masked_reason_stay_in_the_baseline(
    reason: str, masked: int
) -> None:
    batch = _episodes()
    for number, ended in {1: "length", 2: "turns", 5: "environment"}.items():
        batch.samples[number].finish_reason = FinishReason(ended)
    num_trained = 15 - {1: 4, 2: 3, 5: 3}[masked]

    (update,) = _split({}, batch, FinishReason(reason), advantage="grpo_no_std")

    weights = _weights_by_sample(update)
    assert sorted(weights) == [number for number in range(6) if number != masked]
    assert update.counts["unmasked_tokens"] == num_trained
    for number, weight_Q in weights.items():
        length = len(batch.samples[number].behaviour_logprobs)
        assert weight_Q == [pytest.approx(1 / num_trained)] * length
    right, wrong = pytest.approx(2 / 3), pytest.approx(-1 / 3)
    assert _advantages(update) == {n: right if n in (0, 3) else wrong for n in weights}


def test_a_setting_masks_episodes_whose_environment_failed() -> None:
    settings = flat_settings(run_config(Path("run"), rollout={"episodes": {"on_error": "mask"}}))
    assert masked_reasons(settings) == {FinishReason.ENVIRONMENT}


def test_an_episode_without_a_sampled_token_is_not_computed() -> None:
    batch = _batch(versions=(((10, 10), ()),))
    batch.samples[1].finish_reason = FinishReason.ENVIRONMENT

    (update,) = _split({}, batch)

    assert _weights_by_sample(update).keys() == {0}
    assert (update.counts["response_tokens"], update.counts["unmasked_tokens"]) == (2, 2)


def _branched() -> RolloutBatch:
    """The same tokens as ``_batch`` has, but that the longest responses have two sequences."""
    batch = _batch()
    for number in (1, 5):
        sample = batch.samples[number]
        versions = token_versions(sample.versions)
        branch = add_branch(sample, (len(versions) - 2,), shared_tokens=2)
        sample.response_token_ids = sample.response_token_ids[:2]
        sample.behaviour_logprobs = sample.behaviour_logprobs[:2]
        sample.versions, branch.versions = spans_of(versions[:2]), spans_of(versions[2:])
    return batch


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "token_sum_norm"])
@pytest.mark.parametrize("measure", ["token", "mean", "oldest"])
@pytest.mark.parametrize("advantage", ["grpo", "opo", "reinforce_pp"])
@pytest.mark.parametrize("batch_of", [_episodes, _branched])
def test_the_same_tokens_in_turns_or_sequences_keep_weight_length_age_and_advantage(
    batch_of: Callable[[], RolloutBatch], aggregation: str, measure: str, advantage: str
) -> None:
    algorithm = {
        "loss_aggregation": aggregation,
        "token_sum_norm_constant": 4.0,
        "advantage": advantage,
    }
    limit = {"max_age": 3, "measure": measure}
    (plain,) = _split(limit, **algorithm)
    (update,) = _split(limit, batch_of(), **algorithm)

    weights, expected = (
        {number: [w for w in weight_Q if w] for number, weight_Q in _weights_by_sample(u).items()}
        for u in (update, plain)
    )
    assert weights == expected
    assert _advantages(update) == _advantages(plain)
    assert _tokens(update) == _tokens(plain)
    assert update.responses == plain.responses


@pytest.mark.parametrize("advantage", ["grpo", "grpo_no_std", "rloo"])
@pytest.mark.parametrize(
    ("parts", "version", "num_trained"),
    [((3,), 10, 3), ((1, 2, 1), 10, 2), ((), 10, 0), ((3,), 4, 0)],
    ids=["a turn", "two turns", "dead", "too old"],
)
def test_a_branch_more_changes_no_advantage(
    advantage: str, parts: tuple[int, ...], version: int, num_trained: int
) -> None:
    batch, limit = _batch(), {"max_age": 3, "measure": "token"}
    branch = add_branch(batch.samples[1], parts, shared_tokens=2)
    branch.versions = spans_of([version] * branch.num_sampled)

    (plain,) = _split(limit, advantage=advantage)
    (update,) = _split(limit, batch, advantage=advantage)

    assert _advantages(update) == _advantages(plain)
    num_unmasked = plain.counts["unmasked_tokens"]
    assert update.counts["unmasked_tokens"] == num_unmasked + num_trained
    # The branch is sequence 2 of the batch. Sequence 5, the second response of the second group, is
    # too old.
    assert update.computed == ((0, 1, 2, 3, 4, 6) if num_trained else (0, 1, 3, 4, 6))
    assert update.responses == plain.responses


def _of_calls() -> RolloutBatch:
    """Two groups of two; first episodes have turns of 1 and 2 tokens, and of 3 in a branch."""
    groups = []
    for group_id in (0, 1):
        samples = [make_episode(2, parts, group_id, n) for n, parts in enumerate(((1, 2, 2), (2,)))]
        add_branch(samples[0], (3,), shared_tokens=1)
        rewards = ((0.0, 2.0), (-2.0,), (0.0,))
        for sequence, values in zip((*samples[0].sequences, samples[1]), rewards, strict=True):
            sequence.call_rewards = values if group_id == 0 else (0.0,) * len(values)
        groups.append(Group(group_id, tuple(samples)))
    return RolloutBatch(step=1, version=VERSION, groups=tuple(groups))


def test_the_advantage_of_a_call_is_that_of_its_tokens() -> None:
    own = "tests.algorithm.own_objectives:call_advantage"
    (update,) = _split({}, _of_calls(), advantage=own)
    (micro_batch,) = update.micro_batches
    order = np.lexsort((micro_batch.position_T, micro_batch.sample_T))
    expected = [0.0, 2, 2, -2, -2, -2, *[0.0] * (2 + 6 + 2)]
    assert micro_batch.advantage_T[order].tolist() == expected
    # The mean of 0, 2 and −2 has no sign, yet both sequences of the episode have a gradient.
    assert (update.counts["positive_responses"], update.counts["negative_responses"]) == (0, 0)
    (update,) = _split({}, _of_calls(), advantage=own, zero_advantage="left_out")
    assert update.computed == (0, 1)


def test_replaced_advantages_are_those_that_packing_gives() -> None:
    batch, advantages = _of_calls(), Advantages("grpo")
    (packed,) = updates = _split({}, batch)
    zeros = torch.zeros(2, 2)
    (replaced,) = with_advantages(
        with_advantages(updates, batch.samples, zeros),
        batch.samples,
        advantages.compute(batch.groups),
    )
    (before,), (after,) = packed.micro_batches, replaced.micro_batches
    assert torch.equal(before.advantage_T, after.advantage_T)
    assert replaced.counts == packed.counts
    assert len(before.advantage_T.unique()) == 2
