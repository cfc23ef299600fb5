"""Whole updates: the gradient of the published loss, on any layout and for every kind of episode.

The expected gradients are those of transformers' model in float64, of the formulae with their
stop-gradients, written out here with a loss mask. Most responses have tokens that an environment
wrote; episodes of the second dump have several sequences.

Shape legend: R = tokens of one sequence, what an environment wrote included.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bapo_megatron.data.dump import dump_path, read_batch
from bapo_megatron.data.token_columns import REFERENCE
from bapo_megatron.data.token_dump import read_token_dump, token_dump_path
from bapo_megatron.tools.report.rollouts import read_ratios
from bapo_megatron.trainer.records import TokenDump
from bapo_megatron.trainer.scorers import add_column_to_dump
from bapo_megatron.types import RolloutBatch
from tests.distributed_launch import joined, run_ranks
from tests.oracles.bound_search import Tokens, float64_search
from tests.oracles.policy_loss import policy_loss
from tests.oracles.token_batches import paper_rule
from tests.trainer.exact_policy import ExactPolicy
from tests.trainer.one_update import (
    ENTROPY_COEFFICIENT,
    Case,
    Updates,
    assert_same_gradients,
    build_trainer,
    make_updates,
    make_updates_in_layouts,
)

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "one rank": (1, {}, 4096, 0),
    "one rank, chunks": (1, {}, 4096, 13),
    "TP 2": (2, {"tensor": 2}, 256, 0),
    "TP 2, chunks": (2, {"tensor": 2}, 256, 13),
    "CP 2": (2, {"context": 2}, 128, 0),
    "CP 2, chunks": (2, {"context": 2}, 128, 7),
    "PP 2": (2, {"pipeline": 2}, 128, 0),
    "DP 2": (2, {}, 128, 0),
}
"""Ranks, fields of ``ParallelConfig``, tokens of a micro-batch and of a chunk of logits."""


def _clip(exact: ExactPolicy, mean: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Mean of −min(r A, clip(r, 0.9, 1.1) A)."""
    losses = []
    for logprob_R, mu_R, _, advantage in exact.responses:
        r = (logprob_R - mu_R).exp()
        losses.append(-torch.minimum(r * advantage, r.clamp(0.9, 1.1) * advantage))
    return mean(losses)


def _gspo(exact: ExactPolicy) -> Tensor:
    """Mean over episodes of −min(s A, clip(s, 0.98, 1.04) A), s = (π / μ)^(1 / sampled tokens)."""
    losses = []
    for log_ratio, advantage in _episodes(exact):
        s = log_ratio.mean().exp()
        losses.append(-torch.minimum(s * advantage, s.clamp(0.98, 1.04) * advantage))
    return torch.stack(losses).mean()


def _episodes(exact: ExactPolicy) -> list[tuple[Tensor, float]]:
    """ℓ − μ of all sampled tokens of each episode, with its advantage."""
    parts: dict[int, list[Tensor]] = {}
    advantages = {}
    for owner, (logprob_R, mu_R, mask_R, advantage) in zip(
        exact.owners, exact.responses, strict=True
    ):
        parts.setdefault(owner, []).append((logprob_R - mu_R)[mask_R == 1])
        advantages[owner] = advantage
    return [(torch.cat(parts[owner]), advantage) for owner, advantage in advantages.items()]


def _sequence_correction(exact: ExactPolicy) -> Tensor:
    """Mean over tokens of −w A r, r = 1; w = min(π / μ of the episode, 1.05)."""
    weights = [min(float(x.detach().sum().exp()), 1.05) for x, _ in _episodes(exact)]
    return exact.token_mean(
        [
            -weights[owner] * advantage * (logprob_R - logprob_R.detach()).exp()
            for owner, (logprob_R, _, _, advantage) in zip(
                exact.owners, exact.responses, strict=True
            )
        ]
    )


def _m2po_of_high_entropy(exact: ExactPolicy) -> Tensor:
    """Mean of the clipped loss over the 30 % with the highest entropy, thresholds from a sort."""
    width, mask = 1 / 1024, torch.cat(exact.masks) == 1
    advantage, entropy = _spread_advantages(exact)[mask], torch.cat(exact.entropies).detach()[mask]
    x = (torch.cat(exact.logprobs) - torch.cat(exact.behaviours))[mask]
    square, _ = (x.detach()[x.detach() * advantage > 0] ** 2).sort()
    above = len(square) - torch.arange(1, len(square) + 1)
    spent = square.cumsum(0) + above * square
    first = int((spent < 0.01 * len(square)).sum())
    assert 0 < first < len(square)
    left = 0.01 * len(square) - square[:first].sum()
    tau = (left / (len(square) - first)).sqrt().div(width).floor() * width
    r = x.exp()
    clipped = r.clamp((-tau).exp(), tau.exp())
    kth = entropy.sort(descending=True).values[math.ceil(0.3 * len(entropy)) - 1]
    kept = entropy >= (kth / width).floor() * width
    assert 0.3 <= kept.double().mean() < 0.35
    return -torch.minimum(r * advantage, clipped * advantage)[kept].mean()


def _spread_advantages(exact: ExactPolicy) -> Tensor:
    pairs = zip(exact.masks, exact.advantages, strict=True)
    return torch.cat([torch.full_like(mask_R, advantage) for mask_R, advantage in pairs])


def _bapo(exact: ExactPolicy) -> Tensor:
    """Mean over responses of the dual-clipped loss less the bonus, with the bounds of a search."""
    low, high = _searched_bounds(exact)
    weights = [mask_R / mask_R.sum() / len(exact.masks) for mask_R in exact.masks]
    loss = policy_loss(
        torch.cat(exact.logprobs),
        torch.cat(exact.behaviours),
        _spread_advantages(exact),
        torch.cat(exact.masks),
        torch.cat(weights),
        low=low,
        high=high,
        dual_clip=1.2,
        entropy_T=torch.cat(exact.entropies),
        entropy_coefficient=ENTROPY_COEFFICIENT,
    )
    assert loss.clipped_high + loss.clipped_low > 0
    return loss.loss


def _searched_bounds(exact: ExactPolicy) -> tuple[float, float]:
    columns = (exact.logprobs, exact.behaviours, [_spread_advantages(exact)], exact.masks)
    values = (torch.cat(column).detach().numpy().astype(np.float32) for column in columns)
    found = float64_search(Tokens(*values), paper_rule(target=0.38, dual_clip=1.2))
    assert found.margin > 1e-6
    return found.clip_low, found.clip_high


OWN = "tests.algorithm.own_objectives"
SEQUENCE_MEAN = {"loss_aggregation": "sequence_mean"}
CLIP = {"objective": "clip", "fixed": {"low": 0.9, "high": 1.1}}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "clip": CLIP,
    "clip, mean of episodes": CLIP | SEQUENCE_MEAN,
    "gspo": {
        "objective": f"{OWN}:Gspo",
        "objective_options": {"low": 0.02, "high": 0.04},
        **SEQUENCE_MEAN,
    },
    "sequence correction": {
        **CLIP,
        "behaviour": "recomputed",
        "correction": {"kind": "sequence", "cap": 1.05},
    },
    "m2po of high entropy": {
        "objective": "m2po",
        "m2po": {"budget": 0.01, "max_low": 1.0, "min_high": 1.0},
        "entropy_share": 0.3,
    },
    "bapo": {"dual_clip": 1.2, "entropy_coefficient": ENTROPY_COEFFICIENT, **SEQUENCE_MEAN},
}
ORACLES: dict[str, Callable[[ExactPolicy], Tensor]] = {
    "clip": lambda exact: _clip(exact, exact.token_mean),
    "clip, mean of episodes": lambda exact: _clip(exact, exact.episode_mean),
    "gspo": _gspo,
    "sequence correction": _sequence_correction,
    "m2po of high entropy": _m2po_of_high_entropy,
    "bapo": _bapo,
}
OF_EPISODES = ("clip", "clip, mean of episodes", "gspo", "sequence correction")
"""What several sequences of one response could get wrong."""
OF_TOKENS = ("gspo", "m2po of high entropy", "bapo")
"""What a layout could get wrong: sums over responses, a selection of tokens, and a decision."""


def _case(name: str, **options: Any) -> Case:
    return Case({"entropy_coefficient": 0.0, **ALGORITHMS[name]}, **options)


@pytest.fixture(scope="module")
def expected(exact: ExactPolicy) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each objective, for the first dump."""
    losses = {name: ORACLES[name](exact) for name in OF_TOKENS}
    return {name: (loss.item(), exact.gradients(loss)) for name, loss in losses.items()}


@pytest.fixture(scope="module")
def updates(random_model: Path, episode_dump: Path) -> dict[str, Updates]:
    """Those of rank 0 in each layout."""
    made: dict[str, Updates] = {}
    for num_ranks in (1, 2):
        layouts = {}
        for name, (ranks, sizes, budget, chunk_tokens) in LAYOUTS.items():
            case_of = partial(_case, budget=budget, ops={"logits_chunk_tokens": chunk_tokens})
            if ranks == num_ranks:
                layouts[name] = sizes, {objective: case_of(objective) for objective in OF_TOKENS}
        made |= run_ranks(make_updates_in_layouts, num_ranks, random_model, episode_dump, layouts)[
            0
        ]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_objectives_have_the_gradient_of_their_formula(
    updates: dict[str, Updates], expected: dict[str, tuple[float, dict[str, Tensor]]], layout: str
) -> None:
    for name, update in updates[layout].items():
        loss, gradients = expected[name]
        if name not in ("gspo", "bapo"):  # values with stop-gradients, or with a bonus
            assert update["loss"] == pytest.approx(loss, abs=1e-6)
        assert_same_gradients(update["gradients"], gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_are_those_of_a_search_over_the_tokens_with_mask_1(
    updates: dict[str, Updates], exact: ExactPolicy, layout: str
) -> None:
    assert updates[layout]["bapo"]["bounds"] == pytest.approx(_searched_bounds(exact), abs=1e-7)


# --- episodes of several sequences ---


@pytest.fixture(scope="module")
def batch(branch_dump: Path) -> RolloutBatch:
    return read_batch(branch_dump)


@pytest.fixture(scope="module")
def exact_branches(random_model: Path, batch: RolloutBatch) -> ExactPolicy:
    """A forward pass over each sequence alone, by transformers in float64."""
    return ExactPolicy(random_model, batch)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "DP 2"])
def ranks(request: pytest.FixtureRequest, random_model: Path, branch_dump: Path) -> list[Updates]:
    """One update by each objective, of every rank."""
    cases = {name: _case(name) for name in OF_EPISODES}
    return run_ranks(make_updates, request.param, random_model, branch_dump, {}, cases)


@pytest.mark.parametrize("name", OF_EPISODES)
def test_the_gradient_of_branches_is_that_of_a_reference_per_call(
    ranks: list[Updates], exact_branches: ExactPolicy, name: str
) -> None:
    assert Counter(Counter(exact_branches.owners).values()) == {1: 2, 2: 2, 3: 2, 4: 2}
    expected = exact_branches.gradients(ORACLES[name](exact_branches))
    assert_same_gradients(ranks[0][name]["gradients"], expected)


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
        add_column_to_dump(root, groups, REFERENCE, splits, batch)


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
