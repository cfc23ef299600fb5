"""Objectives in whole updates, a user's and those with names: their gradient, on any layout.

The expected gradients are those of transformers' model in float64, of the published formulae with
their stop-gradients, written out here with a loss mask: most responses have tokens that an
environment wrote.

Shape legend: R = tokens of one response, what an environment wrote included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed_launch import run_ranks
from tests.trainer.dumps import write_dumps
from tests.trainer.exact_policy import ExactPolicy
from tests.trainer.one_update import (
    Case,
    Updates,
    assert_same_gradients,
    make_updates_in_layouts,
)
from tests.trainer.runs import differing_weights, refusal, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OWN = "tests.algorithm.own_objectives"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "cispo": {"objective": f"{OWN}:cispo", "objective_options": {"high": 1.3}},
    "gspo": {
        "objective": f"{OWN}:Gspo",
        "objective_options": {"low": 0.2, "high": 0.4},
        "loss_aggregation": "sequence_mean",
    },
    "high entropy": {"objective": f"{OWN}:HighEntropy", "objective_options": {"share": 0.3}},
    "rank advantage": {
        "objective": "none",
        "advantage": f"{OWN}:rank_advantage",
        "loss_aggregation": "token_sum_norm",
    },
    "dcpo": {"objective": "dcpo"},
    "gmpo": {"objective": "gmpo", "gmpo": {"log_low": -0.2}, "loss_aggregation": "sequence_mean"},
    "m2po of high entropy": {
        "objective": "m2po",
        "m2po": {"budget": 0.01, "max_low": 1.0, "min_high": 1.0},
        "entropy_share": 0.3,
    },
}
LAYOUTS = {
    "one rank": (1, {}, 4096, 0),
    "TP 2": (2, {"tensor": 2}, 256, 0),
    "TP 2, chunks": (2, {"tensor": 2}, 256, 13),
    "CP 2": (2, {"context": 2}, 128, 0),
    "CP 2, chunks": (2, {"context": 2}, 128, 7),
    "PP 2": (2, {"pipeline": 2}, 128, 0),
    "DP 2": (2, {}, 128, 0),
}
"""Ranks, fields of ``ParallelConfig``, tokens of a micro-batch and of a chunk of logits."""
DIVIDED = ("cispo", "gspo", "high entropy", "gmpo", "m2po of high entropy")
"""What a layout could get wrong: a token's loss, sums over responses, and over the update."""


def _cispo(exact: ExactPolicy) -> Tensor:
    """Mean over tokens of −sg(min(r, 1.3)) A log π."""
    return exact.token_mean(
        [
            -(logprob_R - mu_R).exp().detach().clamp(max=1.3) * advantage * logprob_R
            for logprob_R, mu_R, _, advantage in exact.responses
        ]
    )


def _gspo(exact: ExactPolicy) -> Tensor:
    """Mean over responses of −min(s A, clip(s, 0.8, 1.4) A), s = (π / μ)^(1 / sampled tokens)."""
    losses = []
    for logprob_R, mu_R, mask_R, advantage in exact.responses:
        s = ((mask_R * (logprob_R - mu_R)).sum() / mask_R.sum()).exp()
        losses.append(-torch.minimum(s * advantage, s.clamp(0.8, 1.4) * advantage))
    return torch.stack(losses).mean()


def _high_entropy(exact: ExactPolicy) -> Tensor:
    """Mean of −r A over the tokens in the highest bins of entropy, at most 30 % of all."""
    bins = [(entropy_R.detach() / 0.1).long().clamp(max=63) for entropy_R in exact.entropies]
    every = torch.cat(bins)[torch.cat(exact.masks) == 1]
    threshold = next(b for b in range(65) if (every >= b).sum() <= 0.3 * len(every))
    losses = [
        (-(logprob_R - mu_R).exp() * advantage)[(bin_R >= threshold) & (mask_R == 1)]
        for bin_R, (logprob_R, mu_R, mask_R, advantage) in zip(bins, exact.responses, strict=True)
    ]
    assert 0 < len(torch.cat(losses)) < len(every)
    return torch.cat(losses).mean()


def _dcpo(exact: ExactPolicy) -> Tensor:
    """Mean over tokens of −min(r A, clip(r) A) with bounds from q = e^μ."""
    losses = []
    for logprob_R, mu_R, _, advantage in exact.responses:
        r, q = (logprob_R - mu_R).exp(), mu_R.exp()
        low = (1 + (1 - 0.64 / q).clamp(min=0).sqrt()) / 2
        high = ((1 + (1 + 0.8 / q).sqrt()) / 2).clamp(max=10)
        losses.append(-torch.minimum(r * advantage, r.clamp(low, high) * advantage))
    return exact.token_mean(losses)


def _gmpo(exact: ExactPolicy) -> Tensor:
    """Mean over responses of −A exp(mean of limited ℓ − μ)."""
    losses = []
    for logprob_R, mu_R, mask_R, advantage in exact.responses:
        x = (logprob_R - mu_R)[mask_R == 1]
        limited = x.clamp(max=0.4) if advantage > 0 else x.clamp(min=-0.2)
        losses.append(-advantage * limited.mean().exp())
    return torch.stack(losses).mean()


def _m2po_of_high_entropy(exact: ExactPolicy) -> Tensor:
    """Mean of the clipped loss over the 30 % with the highest entropy, thresholds from a sort."""
    width, mask = 1 / 1024, torch.cat(exact.masks) == 1
    counts = [len(logprob_R) for logprob_R in exact.logprobs]
    advantage = torch.tensor(exact.advantages).double().repeat_interleave(torch.tensor(counts))
    logprob = torch.cat(exact.logprobs)[mask]
    advantage, entropy = advantage[mask], torch.cat(exact.entropies).detach()[mask]
    x = logprob - torch.cat(exact.behaviours)[mask]
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


def _rank_advantage(exact: ExactPolicy) -> Tensor:
    """Sum of −r A over 20 for each response; A is the place in the group by (reward, −length)."""
    size = exact.rewards.shape[1]
    advantages: list[float] = []
    for first, rewards in enumerate(exact.rewards):
        lengths = exact.lengths[first * size : (first + 1) * size]
        order = sorted(range(size), key=lambda i: (rewards[i], -lengths[i]))
        advantages += [order.index(i) - (size - 1) / 2 for i in range(size)]
    ratios = [(logprob_R - mu_R).exp() for logprob_R, mu_R, *_ in exact.responses]
    losses = [
        -(m * r_R).sum() * a for m, r_R, a in zip(exact.masks, ratios, advantages, strict=True)
    ]
    return torch.stack(losses).sum() / (20 * len(losses))


ORACLES = {
    "cispo": _cispo,
    "gspo": _gspo,
    "high entropy": _high_entropy,
    "rank advantage": _rank_advantage,
    "dcpo": _dcpo,
    "gmpo": _gmpo,
    "m2po of high entropy": _m2po_of_high_entropy,
}


@pytest.fixture(scope="module")
def expected(exact: ExactPolicy) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each objective."""
    losses = {name: oracle(exact) for name, oracle in ORACLES.items()}
    return {name: (loss.item(), exact.gradients(loss)) for name, loss in losses.items()}


def _layout(name: str) -> tuple[dict[str, int], dict[str, Case]]:
    num_ranks, sizes, budget, chunk_tokens = LAYOUTS[name]
    algorithms = {n: a for n, a in ALGORITHMS.items() if num_ranks == 1 or n in DIVIDED}
    ops, plain = {"logits_chunk_tokens": chunk_tokens}, {"entropy_coefficient": 0.0}
    return sizes, {n: Case(plain | a, ops=ops, budget=budget) for n, a in algorithms.items()}


@pytest.fixture(scope="module")
def updates(random_model: Path, episode_dump: Path) -> dict[str, Updates]:
    """Those of rank 0 in each layout."""
    made: dict[str, Updates] = {}
    for ranks in (1, 2):
        layouts = {name: _layout(name) for name in LAYOUTS if LAYOUTS[name][0] == ranks}
        made |= run_ranks(make_updates_in_layouts, ranks, random_model, episode_dump, layouts)[0]
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objectives_have_the_gradient_of_their_formula(
    updates: dict[str, Updates], expected: dict[str, tuple[float, dict[str, Tensor]]], layout: str
) -> None:
    for name, update in updates[layout].items():
        loss, gradients = expected[name]
        if name not in ("cispo", "gspo"):  # their values are no losses: stop-gradients
            assert update["loss"] == pytest.approx(loss, abs=1e-6)
        assert_same_gradients(update["gradients"], gradients)


def test_an_objective_that_trains_zero_advantages_is_not_skipped(
    replay_config: Path, random_model: Path, tmp_path: Path
) -> None:
    dumps = write_dumps(tmp_path / "equal", random_model, steps=1, rewards="equal")
    weights = load_file(random_model / "model.safetensors")
    for objective, num_updates in (("none", 0), (f"{OWN}:Anchor", 2)):
        run_dir = tmp_path / objective.rpartition(":")[2]
        overrides = [f"replay={dumps}", "train.steps=1", f"algorithm.objective={objective}"]
        (row,) = train(replay_config, run_dir, *overrides)
        assert row["train/updates"] == num_updates
        assert bool(differing_weights(run_dir, weights)) == (num_updates > 0)


NONFINITE = "tokens with finite values a loss or gradient that is NaN or infinite"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (f"objective={OWN}:fails_late", "the second update is too much (/"),
        (f"objective={OWN}:nan_late", NONFINITE),
        (f"objective={OWN}:NanStatistics", NONFINITE),
        (f"objective={OWN}:nan_entropy_late", NONFINITE),
        (f"objective={OWN}:TakenName", "'policy/entropy'"),
        (f"advantage={OWN}:infinite_advantage", "must be finite"),
    ],
)
def test_a_mistake_of_the_user_ends_the_run_with_one_line(
    replay_config: Path, random_model: Path, tmp_path: Path, setting: str, problem: str
) -> None:
    arguments = ["train", str(replay_config), f"run_dir={tmp_path / 'run'}", "train.steps=2"]
    if "infinite_advantage" in setting:
        dumps = write_dumps(tmp_path / "equal", random_model, steps=2, rewards="equal")
        arguments.append(f"replay={dumps}")
    _, line = refusal([*arguments, f"algorithm.{setting}"])
    assert problem in line
    assert "TakenName" in setting or setting.partition("=")[2] in line
