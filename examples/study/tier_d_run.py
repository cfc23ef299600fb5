"""One run of tier D: tier A's tasks, score centering, and a sampler with rounded weights.

Every arm is a weight w = f(r) on the score, r = p/q, so that with the sampler's q and the policy's
p over all actions the gradient of a token, up to the number of tokens, is

    -A · ( w_a s_a  -  centered · Σ_v q_v w_v s_v ),     s_v = ∇ log p_v = onehot(v) - p

All of it is float64 and written out here; only BAPO's bounds come from the package.

Shape legend: as in ``tier_a_run``; P = prompts of an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import with_sums
from bapo_megatron.config.schema import AlgorithmConfig
from examples.study.task import log_softmax, make_task
from examples.study.tier_a_run import GROUP_SIZE, Adam, Batch, batches, entropy, token_batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bapo_megatron.algorithm.objective import Objective

TRUNCATED_CAP = 2.0
MASKED_RANGE = (0.5, 5.0)
FIXED = {"grpo": (0.8, 1.2), "corner": (0.9, 3.0)}
"""Clipped arms with fixed bounds; ``bapo`` searches its own, ``yoked`` has those of another run."""
WEIGHTS = ("grpo", "corner", "bapo", "yoked", "reinforce", "truncated", "masked")
ARMS = (*WEIGHTS, *(f"{name}_centered" for name in ("bapo", "reinforce", "truncated", "masked")))
CURVE_STEPS = 5
"""Steps between two points of a curve."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the study; every cell has all tasks and seeds."""

    arm: str
    lag: int = 0
    """Steps by which the sampling policy is behind."""
    bits: int = 0
    """Bits of the sampler's weights; 0: those of the policy."""
    learning_rate: float = 0.03
    updates: int = 16
    """Per step."""
    steps: int = 60


@dataclass(slots=True)
class History:
    """Curves and means of a run."""

    expected_reward: list[float] = field(default_factory=list)
    """Of the policy, not of its sampler: before the first step and after every fifth."""
    entropy: list[float] = field(default_factory=list)
    """At the same steps, of the policy over the sampled tokens, in nats."""
    gradient_norm: list[float] = field(default_factory=list)
    """Of every update that trains, before clipping."""
    removed_norm: list[float] = field(default_factory=list)
    """Norm of what centering subtracts from it."""
    kl: list[float] = field(default_factory=list)
    """KL(q, p) in nats, mean over the tokens of each update."""
    bounds: list[tuple[float, float]] = field(default_factory=list)
    """(c_low, c_high) of every update that trains; empty without clipping."""

    def row(self) -> dict[str, Any]:
        """The columns of a run."""
        return {
            "expected_reward": self.expected_reward,
            "entropy": self.entropy,
            "largest_norm_ratio": float(max(self.gradient_norm) / np.median(self.gradient_norm)),
            "removed_share": float(np.sum(self.removed_norm) / np.sum(self.gradient_norm)),
            "kl": float(np.mean(self.kl)),
            "low": float(np.mean([low for low, _ in self.bounds])) if self.bounds else None,
            "high": float(np.mean([high for _, high in self.bounds])) if self.bounds else None,
        }


def rounded(weight_DKA: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Weights of a sampler with integers of ``bits`` bits: symmetric, a scale per output."""
    if not bits:
        return weight_DKA
    largest = 2 ** (bits - 1) - 1
    scale_D1A = np.abs(weight_DKA).max(1, keepdims=True) / largest
    scale_D1A[scale_D1A == 0] = 1
    rounded_DKA: NDArray[np.float64] = np.rint(weight_DKA / scale_D1A) * scale_D1A
    return rounded_DKA


def score_weight(
    name: str,
    ratio: NDArray[np.float64],
    is_positive: NDArray[np.bool_] | bool,
    bounds: tuple[float, float] | None,
) -> NDArray[np.float64]:
    """f(r) of an uncentered arm; clipping stops a token by the sign of its advantage."""
    if name == "reinforce":
        return np.ones_like(ratio)
    if name == "truncated":
        return np.minimum(ratio, TRUNCATED_CAP)
    if name == "masked":
        low, high = MASKED_RANGE
        return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    assert bounds is not None
    low, high = bounds
    return np.where(np.where(is_positive, ratio < high, ratio > low), ratio, 0.0)


def train(setting: Setting, task_seed: int, seed: int) -> History:
    """Train a policy; every random choice follows from the three arguments."""
    torch.set_num_threads(1)
    name = setting.arm.removesuffix("_centered")
    task, run = make_task(task_seed), History()
    optimizer = Adam(task.start_DKA, setting.learning_rate)
    weights = [task.start_DKA]
    run.expected_reward.append(task.expected_reward(task.log_policy(task.start_DKA)))
    choose = _bounds_of(setting, name, task_seed, seed)
    for step in range(1, setting.steps + 1):
        rng = np.random.default_rng([task_seed, seed, step - 1])
        sampler_CDA = task.log_policy(rounded(weights[0], setting.bits))
        samples = task.sample(sampler_CDA, GROUP_SIZE, rng)
        for batch in batches(samples, sampler_CDA, setting.updates):
            if len(batch.response_T):
                _update(batch, setting.arm, choose, task.features_CK, sampler_CDA, optimizer, run)
        weights = [*weights, optimizer.weight_DKA.copy()][-(setting.lag + 1) :]
        if step % CURVE_STEPS == 0 or step == setting.steps:
            policy_CDA = task.log_policy(weights[-1])
            run.expected_reward.append(task.expected_reward(policy_CDA))
            run.entropy.append(entropy(policy_CDA, samples))
    return run


class _Fixed:
    """Bounds that are known beforehand, in a cycle."""

    def __init__(self, bounds: list[tuple[float, float]]) -> None:
        self._bounds = bounds

    def __call__(
        self, batch: Batch, logprob_T: NDArray[np.float64], update: int
    ) -> tuple[float, float] | None:
        return self._bounds[update % len(self._bounds)] if self._bounds else None


class _Search:
    """BAPO's own, by the package."""

    def __init__(self) -> None:
        config = AlgorithmConfig.model_validate({"objective": "bapo"})
        self._objective: Objective = load_objective(config).objective

    def __call__(
        self, batch: Batch, logprob_T: NDArray[np.float64], update: int
    ) -> tuple[float, float] | None:
        tokens = with_sums(self._objective, token_batch(batch, logprob_T, update))
        limits = self._objective.bounds(tokens)
        assert limits is not None
        return float(limits[0]), float(limits[1])


def _bounds_of(setting: Setting, name: str, task_seed: int, seed: int) -> _Fixed | _Search:
    if name == "bapo":
        return _Search()
    if name != "yoked":
        return _Fixed([FIXED[name]] if name in FIXED else [])
    other = train(replace(setting, arm="bapo"), task_seed, seed + 1).bounds
    order = np.random.default_rng(seed).permutation(len(other))
    return _Fixed([other[number] for number in order])


def gradient_of(
    batch: Batch,
    arm: str,
    bounds: tuple[float, float] | None,
    log_policy_DPA: NDArray[np.float64],
    sampler_DPA: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """∂loss/∂logits before centering and what centering adds to it, both [D, P, A].

    The second is 0 for arms without centering.
    """
    name = arm.removesuffix("_centered")
    where_T = (batch.stage_T, batch.prompt_T, batch.action_T)
    advantage_T = batch.advantage_T / batch.num_tokens
    ratio_T = np.exp(log_policy_DPA[where_T] - batch.behaviour_T)
    weight_T = score_weight(name, ratio_T, advantage_T > 0, bounds)
    plain_DPA = np.zeros_like(log_policy_DPA)
    np.add.at(plain_DPA, where_T, -advantage_T * weight_T)
    policy_DPA, drift_DPA = np.exp(log_policy_DPA), np.zeros_like(plain_DPA)
    if name != arm:
        ratio_DPA = np.exp(log_policy_DPA - sampler_DPA)
        for is_positive in (True, False):
            sum_DP = np.zeros(plain_DPA.shape[:2])
            chosen_T = (advantage_T > 0) == is_positive
            np.add.at(
                sum_DP, (batch.stage_T[chosen_T], batch.prompt_T[chosen_T]), advantage_T[chosen_T]
            )
            weight_DPA = score_weight(name, ratio_DPA, is_positive, bounds)
            drift_DPA += sum_DP[..., None] * np.exp(sampler_DPA) * weight_DPA
    # Σ_j c_j s_j over logits: c - p · Σ c.
    plain_DPA -= plain_DPA.sum(-1, keepdims=True) * policy_DPA
    drift_DPA -= drift_DPA.sum(-1, keepdims=True) * policy_DPA
    return plain_DPA, drift_DPA


def _update(
    batch: Batch,
    arm: str,
    choose: _Fixed | _Search,
    features_CK: NDArray[np.float64],
    sampler_CDA: NDArray[np.float64],
    optimizer: Adam,
    run: History,
) -> None:
    features_PK = features_CK[batch.prompts]
    log_policy_DPA = log_softmax(features_PK @ optimizer.weight_DKA)
    sampler_DPA = sampler_CDA[batch.prompts].transpose(1, 0, 2)
    logprob_T = log_policy_DPA[batch.stage_T, batch.prompt_T, batch.action_T]
    bounds = choose(batch, logprob_T, len(run.gradient_norm))
    if bounds is not None:
        run.bounds.append(bounds)
    plain_DPA, drift_DPA = gradient_of(batch, arm, bounds, log_policy_DPA, sampler_DPA)
    drift_DKA = features_PK.T @ drift_DPA
    run.removed_norm.append(float(np.sqrt((drift_DKA**2).sum())))
    kl_DP = (np.exp(sampler_DPA) * (sampler_DPA - log_policy_DPA)).sum(-1)
    run.kl.append(float(kl_DP[batch.stage_T, batch.prompt_T].mean()))
    run.gradient_norm.append(optimizer.step(features_PK.T @ plain_DPA + drift_DKA))
