"""Updates with episodes of several sequences: a reference per call, and every token once.

Shape legend: R = response tokens of one sequence, what an environment wrote included.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from bapo_megatron.data.dump import dump_path, encode_batch, read_batch, read_encoded
from bapo_megatron.data.token_columns import REFERENCE
from bapo_megatron.data.token_dump import read_token_dump, token_dump_path
from bapo_megatron.tools.report.rollouts import read_ratios
from bapo_megatron.trainer.records import TokenDump
from bapo_megatron.trainer.scorers import ScoredDump
from tests.distributed_launch import joined, run_ranks
from tests.trainer.exact_policy import ExactPolicy
from tests.trainer.one_update import (
    Case,
    Updates,
    assert_same_gradients,
    build_trainer,
    make_updates,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from bapo_megatron.types import RolloutBatch

pytestmark = pytest.mark.distributed

CLIP = {"objective": "clip", "fixed": {"low": 0.9, "high": 1.1}, "entropy_coefficient": 0.0}
GSPO = {
    "objective": "tests.algorithm.own_objectives:Gspo",
    "objective_options": {"low": 0.02, "high": 0.02},
    "entropy_coefficient": 0.0,
}
CORRECTED = {
    **CLIP,
    "behaviour": "recomputed",
    "correction": {"kind": "sequence", "cap": 1.05},
}
CASES = {
    "token_mean": Case(CLIP, watches_output=True),
    "sequence_mean": Case({**CLIP, "loss_aggregation": "sequence_mean"}),
    "gspo": Case({**GSPO, "loss_aggregation": "sequence_mean"}),
    "sequence correction": Case(CORRECTED),
}


@pytest.fixture(scope="module")
def batch(branch_dump: Path) -> RolloutBatch:
    return read_batch(branch_dump)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "DP 2"])
def ranks(request: pytest.FixtureRequest, random_model: Path, branch_dump: Path) -> list[Updates]:
    """One update by each objective, of every rank."""
    return run_ranks(make_updates, request.param, random_model, branch_dump, {}, CASES)


def test_every_sampled_token_trains_once_wherever_its_sequence_is(
    ranks: list[Updates], batch: RolloutBatch
) -> None:
    trained = Counter[tuple[int, int, int]]()
    ranks_of: dict[int, set[int]] = {}
    for rank, updates in enumerate(ranks):
        for micro_batch, _ in updates["token_mean"]["outputs"]:
            columns = (micro_batch.sample_T, micro_batch.position_T, micro_batch.target_T)
            trained.update(zip(*(values.tolist() for values in columns), strict=True))
            assert micro_batch.mask_T.all()
            for number in micro_batch.sample_T.tolist():
                ranks_of.setdefault(number, set()).add(rank)
    expected = []
    for number, sample in enumerate(batch.samples):
        position = 0
        for sequence in sample.sequences:
            for token, is_sampled in zip(
                sequence.response_token_ids.tolist(), sequence.loss_mask.tolist(), strict=True
            ):
                expected += [(number, position, token)] if is_sampled else []
                position += 1
    assert sorted(trained) == sorted(expected)
    assert set(trained.values()) == {1}
    assert len(expected) > 150
    if len(ranks) == 2:
        assert sum(len(where) == 2 for where in ranks_of.values()) >= 3


def _losses(exact: ExactPolicy, name: str) -> list[Tensor]:
    """Token losses [R] of each sequence; ratios, means and products run over its episode."""
    owners = np.array(exact.owners)
    losses = []
    for number, (logprob_R, behaviour_R, mask_R, advantage) in enumerate(exact.responses):
        episode = np.flatnonzero(owners == owners[number])
        log_ratio = sum(
            ((exact.logprobs[i] - exact.behaviours[i]) * exact.masks[i]).sum().detach()
            for i in episode
        )
        num_tokens = sum(exact.masks[i].sum() for i in episode)
        low, high, factor = 0.9, 1.1, 1.0
        if name == "gspo":
            low, high = 0.98, 1.02
            ratio_R = torch.exp(log_ratio / num_tokens + logprob_R - logprob_R.detach())
        elif name == "sequence correction":
            ratio_R = torch.exp(logprob_R - logprob_R.detach())
            factor = min(float(torch.exp(torch.as_tensor(log_ratio))), 1.05)
        else:
            ratio_R = torch.exp(logprob_R - behaviour_R)
        clipped_R = ratio_R.clamp(low, high)
        loss_R = -torch.minimum(ratio_R * advantage, clipped_R * advantage)
        losses.append(torch.where(mask_R == 1, factor * loss_R, 0.0))
    return losses


def _episode_means(exact: ExactPolicy, losses: Sequence[Tensor]) -> Tensor:
    """The mean over episodes of their tokens' mean."""
    owners = np.array(exact.owners)
    means = []
    for owner in range(owners.max() + 1):
        episode = np.flatnonzero(owners == owner)
        num_tokens = sum(exact.masks[i].sum() for i in episode)
        means.append(sum(losses[i].sum() for i in episode) / num_tokens)
    return torch.stack(means).mean()


@pytest.fixture(scope="module")
def exact(random_model: Path, batch: RolloutBatch) -> ExactPolicy:
    """A forward pass over each sequence alone, by transformers in float64."""
    return ExactPolicy(random_model, batch)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_a_reference_per_call(
    ranks: list[Updates], exact: ExactPolicy, name: str
) -> None:
    assert Counter(Counter(exact.owners).values()) == {1: 2, 2: 2, 3: 2, 4: 2}
    losses = _losses(exact, name)
    by_episode = CASES[name].algorithm.get("loss_aggregation") == "sequence_mean"
    loss = _episode_means(exact, losses) if by_episode else exact.token_mean(losses)
    assert_same_gradients(ranks[0][name]["gradients"], exact.gradients(loss))


def _dump_tokens(model_dir: Path, dump: Path, root: Path) -> None:
    """Writes the tokens of an update, and a column by the trainer into a copy of the dump."""
    with joined() as groups:
        batch = read_batch(dump)
        trainer = build_trainer(
            model_dir, groups, Case(CLIP), sizes={}, optimizer={"lr": 0.0}, dump=TokenDump(root, 1)
        )
        trainer.train(batch)
        _, splits = trainer._split(batch)
        for split in splits:
            for mb in split.micro_batches:
                mb.columns[REFERENCE] = mb.behaviour_logprob_T  # type: ignore[index]
        ScoredDump(root, groups).add(REFERENCE, splits, batch)


def test_dumps_of_tokens_and_of_columns_name_the_tokens_of_every_sequence(
    random_model: Path, branch_dump: Path, batch: RolloutBatch, tmp_path: Path
) -> None:
    run_ranks(_dump_tokens, 2, random_model, branch_dump, tmp_path)
    for sequence in read_batch(dump_path(tmp_path, batch.step)).sequences:
        assert sequence.columns[REFERENCE].tolist() == sequence.behaviour_logprobs.tolist()
    columns = read_token_dump(token_dump_path(tmp_path, batch.step, 0))
    logprobs = [sequence.behaviour_logprobs for sequence in batch.sequences]
    assert columns["behaviour_logprob"].tolist() == np.concatenate(logprobs).tolist()
    lengths = {key: len(ratio_Q) for key, ratio_Q in read_ratios(tmp_path, batch.step).items()}
    assert lengths == {(s.group_id, s.index): s.episode_sampled for s in batch.samples}


def test_a_dump_of_branches_is_the_same_when_written_again(
    branch_dump: Path, batch: RolloutBatch
) -> None:
    assert encode_batch(batch) == read_encoded(branch_dump).content
