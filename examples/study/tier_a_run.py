"""One run of tier A: a policy of ``task`` trained by one of the project's own objectives.

Shape legend: C = prompts, D = stages, A = actions, K = rank, B = responses, T = tokens of an
update, U = updates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bapo_megatron.algorithm.advantage import group_advantages
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.algorithm.loss import differentiate, with_sums
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.algorithm.objectives.bapo import EXIT_METRICS
from bapo_megatron.config.schema import AlgorithmConfig
from examples.study.task import LONGEST, PROMPTS, log_softmax, make_task
from examples.study.yoked import Yoked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from examples.study.task import Samples

GROUP_SIZE = 8
_BETAS, _ADAM_EPSILON, _MAX_NORM = (0.9, 0.95), 1e-8, 1.0


def _clip(low: float, high: float) -> dict[str, Any]:
    return {"objective": "clip", "fixed": {"low": low, "high": high}}


ARMS: dict[str, dict[str, Any]] = {
    "grpo": _clip(0.8, 1.2),
    "clip_higher": _clip(0.8, 1.28),
    "start": _clip(0.6, 1.2),
    "corner": _clip(0.9, 3.0),
    "bapo": {"objective": "bapo"},
    "bapo_gradient": {"objective": "bapo", "bapo": {"contribution": "gradient"}},
    "none": {"objective": "none"},
    "m2po": {"objective": "m2po"},
    "cispo": {"objective": "cispo"},
    "gspo": {"objective": "gspo"},
    "yoked": {},
}
"""Settings of ``algorithm``, by name; *yoked* is ``yoked.Yoked`` with BAPO's bounds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the study; every cell has all tasks and seeds."""

    arm: str
    lag: int = 0
    """Steps by which the sampling policy is behind."""
    updates: int = 16
    """Per step."""
    learning_rate: float = 0.1
    dual_clip: float | None = None
    target: float | None = None
    """ρ0, where it is not the default."""
    micro_batches: int = 1
    """More than one: BAPO searches each one's own bounds (``scope: micro_batch``)."""
    steps: int = 60

    def algorithm(self) -> AlgorithmConfig:
        """The section of the configuration."""
        settings = {"dual_clip": self.dual_clip} | ARMS[self.arm]
        bapo = dict(settings.get("bapo", {}))
        if self.target is not None:
            bapo["target"] = self.target
        if self.micro_batches > 1:
            bapo["scope"] = "micro_batch"
        return AlgorithmConfig.model_validate(settings | ({"bapo": bapo} if bapo else {}))


@dataclass(slots=True)
class History:
    """The curves and sums of a run; lists have an entry per step, sums cover all updates."""

    expected_reward: list[float] = field(default_factory=list)
    """Before the first step and after each."""
    entropy: list[float] = field(default_factory=list)
    """Mean over the sampled tokens, in nats, of the policy after the step."""
    gradient_norm: list[float] = field(default_factory=list)
    """Largest of the step's updates, before clipping."""
    median_gradient_norm: list[float] = field(default_factory=list)
    num_updates: int = 0
    """Including updates without a trainable token."""
    num_searches: int = 0
    """Times that the objective was differentiated: once per update that trains, and micro-batch."""
    num_tokens: int = 0
    """Tokens with A other than 0."""
    of_searches: Counter[str] = field(default_factory=Counter)
    """Sums over searches: exits, bounds, shares."""
    of_tokens: Counter[str] = field(default_factory=Counter)
    """Numbers of tokens: clipped ones, and those with large ratios."""
    bounds: list[tuple[float, float]] = field(default_factory=list)
    """(c_low, c_high) of every search."""

    def means(self) -> dict[str, float]:
        """Means over searches and shares of tokens."""
        means = {name: value / self.num_searches for name, value in self.of_searches.items()}
        return means | {name: value / self.num_tokens for name, value in self.of_tokens.items()}


class Adam:
    """The optimizer, with the gradient's norm clipped to 1."""

    def __init__(self, weight_DKA: NDArray[np.float64], learning_rate: float) -> None:
        self.weight_DKA = weight_DKA.copy()
        self._learning_rate = learning_rate
        self._first = np.zeros_like(weight_DKA)
        self._second = np.zeros_like(weight_DKA)
        self._count = 0

    def step(self, gradient_DKA: NDArray[np.float64]) -> float:
        """Descend; return the norm of the gradient."""
        norm = float(np.sqrt((gradient_DKA**2).sum()))
        gradient_DKA = gradient_DKA * min(1.0, _MAX_NORM / max(norm, 1e-12))
        first, second = _BETAS
        self._count += 1
        self._first = first * self._first + (1 - first) * gradient_DKA
        self._second = second * self._second + (1 - second) * gradient_DKA**2
        unbiased = self._second / (1 - second**self._count)
        scale = self._learning_rate / (1 - first**self._count)
        self.weight_DKA -= scale * self._first / (np.sqrt(unbiased) + _ADAM_EPSILON)
        return norm


def train(setting: Setting, task_seed: int, seed: int) -> History:
    """Train a policy; every random choice follows from the three arguments."""
    torch.set_num_threads(1)
    if setting.arm != "yoked":
        return _train(setting, task_seed, seed, load_objective(setting.algorithm()).objective)
    other = _train_bapo(setting, task_seed, seed + 1)
    return _train(setting, task_seed, seed, Yoked(other.bounds, seed, setting.dual_clip))


def _train_bapo(setting: Setting, task_seed: int, seed: int) -> History:
    """The run that a yoked one takes its bounds from: another seed, everything else equal."""
    return train(replace(setting, arm="bapo"), task_seed, seed)


def _train(setting: Setting, task_seed: int, seed: int, objective: Objective) -> History:
    task, run = make_task(task_seed), History()
    optimizer = Adam(task.start_DKA, setting.learning_rate)
    policies = [task.log_policy(optimizer.weight_DKA)]
    run.expected_reward.append(task.expected_reward(policies[0]))
    for step in range(setting.steps):
        rng = np.random.default_rng([task_seed, seed, step])
        behaviour_CDA = policies[0]
        samples = task.sample(behaviour_CDA, GROUP_SIZE, rng)
        norms = [
            _update(batch, objective, setting, task.features_CK, optimizer, run)
            for batch in batches(samples, behaviour_CDA, setting.updates)
        ]
        trained = [norm for norm in norms if norm is not None]
        policies = [*policies, task.log_policy(optimizer.weight_DKA)][-(setting.lag + 1) :]
        run.expected_reward.append(task.expected_reward(policies[-1]))
        run.entropy.append(entropy(policies[-1], samples))
        run.gradient_norm.append(max(trained, default=0.0))
        run.median_gradient_norm.append(float(np.median(trained)) if trained else 0.0)
    return run


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one update whose advantage is not 0, and the number of all its tokens."""

    prompts: NDArray[np.int64]
    """Those of the update."""
    prompt_T: NDArray[np.int64]
    """Index in ``prompts``."""
    stage_T: NDArray[np.int64]
    action_T: NDArray[np.int64]
    response_T: NDArray[np.int64]
    behaviour_T: NDArray[np.float64]
    advantage_T: NDArray[np.float64]
    reward_T: NDArray[np.float64]
    length_B: NDArray[np.int64]
    num_tokens: int


def batches(samples: Samples, behaviour_CDA: NDArray[np.float64], updates: int) -> Iterator[Batch]:
    """Divide whole groups among the updates."""
    reward_PG = torch.from_numpy(samples.reward_B).reshape(-1, GROUP_SIZE)
    length_PG = torch.from_numpy(samples.length_B).reshape(-1, GROUP_SIZE)
    advantage_B = group_advantages(reward_PG, length_PG, "grpo").reshape(-1).double().numpy()
    is_token_BT = np.arange(LONGEST) < samples.length_B[:, None]
    for group in np.array_split(np.arange(PROMPTS), updates):
        chosen = np.arange(group[0] * GROUP_SIZE, (group[-1] + 1) * GROUP_SIZE)
        trains = chosen[advantage_B[chosen] != 0]
        prompts = samples.prompt_B[chosen[::GROUP_SIZE]]
        row_T, column_T = np.nonzero(is_token_BT[trains])
        response_T = trains[row_T]
        stage_T = samples.stage_BT[response_T, column_T]
        action_T = samples.action_BT[response_T, column_T]
        prompt_T = samples.prompt_B[response_T]
        yield Batch(
            prompts=prompts,
            prompt_T=(response_T - chosen[0]) // GROUP_SIZE,
            stage_T=stage_T,
            action_T=action_T,
            response_T=response_T - chosen[0],
            behaviour_T=behaviour_CDA[prompt_T, stage_T, action_T],
            advantage_T=advantage_B[response_T],
            reward_T=samples.reward_B[response_T],
            length_B=samples.length_B[chosen],
            num_tokens=int(samples.length_B[chosen].sum()),
        )


def _update(
    batch: Batch,
    objective: Objective,
    setting: Setting,
    features_CK: NDArray[np.float64],
    optimizer: Adam,
    run: History,
) -> float | None:
    """Make one optimizer update; return the norm of its gradient, None where nothing trains."""
    run.num_updates += 1
    if not len(batch.response_T):
        return None
    features_PK = features_CK[batch.prompts]
    log_policy_DPA = log_softmax(features_PK @ optimizer.weight_DKA)
    logprob_T = log_policy_DPA[batch.stage_T, batch.prompt_T, batch.action_T]
    derivative_T = _derivative(batch, logprob_T, objective, setting, run)
    # ∂ℓ/∂logits = onehot − π, summed over the tokens of a prompt and stage.
    gradient_DPA = np.zeros_like(log_policy_DPA)
    np.add.at(gradient_DPA, (batch.stage_T, batch.prompt_T, batch.action_T), derivative_T)
    gradient_DPA -= gradient_DPA.sum(-1, keepdims=True) * np.exp(log_policy_DPA)
    return optimizer.step(features_PK.T @ gradient_DPA)


def _derivative(
    batch: Batch,
    logprob_T: NDArray[np.float64],
    objective: Objective,
    setting: Setting,
    run: History,
) -> NDArray[np.float64]:
    """∂loss/∂ℓ of every token by the objective, as the trainer's loss stage forms it."""
    tokens = token_batch(batch, logprob_T, run.num_updates - 1)
    weight_T = tokens.mask / batch.num_tokens
    parts = torch.arange(len(tokens)) % setting.micro_batches
    derivative_T = torch.zeros_like(tokens.logprob)
    for number in range(setting.micro_batches):
        index = torch.nonzero(parts == number)[:, 0]
        if not len(index):
            continue
        part = with_sums(objective, tokens.select(index))
        gradient = differentiate(objective, part, weight_T[index])
        derivative_T[index] = gradient.logprob_T
        _measure(objective, part, run)
    return derivative_T.double().numpy()


def token_batch(batch: Batch, logprob_T: NDArray[np.float64], update: int) -> TokenBatch:
    """Return the batch as the trainer's objectives read it, in float32."""
    logprob = torch.from_numpy(logprob_T).float()
    behaviour = torch.from_numpy(batch.behaviour_T).float()
    zero = torch.zeros_like(logprob)
    return TokenBatch(
        logprob=logprob,
        behaviour_logprob=behaviour,
        rollout_logprob=behaviour,
        ratio=torch.ops.bapo.importance_ratio(logprob, behaviour),
        advantage=torch.from_numpy(batch.advantage_T).float(),
        reward=torch.from_numpy(batch.reward_T).float(),
        mask=zero + 1,
        entropy=zero,
        collected_entropy=zero,
        response=torch.from_numpy(batch.response_T),
        response_tokens=torch.from_numpy(batch.length_B[batch.response_T]).float(),
        response_sums=None,
        decision=None,
        update=update,
    )


def _measure(objective: Objective, tokens: TokenBatch, run: History) -> None:
    """Add up bounds, shares of positive tokens, clipped tokens and the effective sample size."""
    ratio_T = tokens.ratio
    run.num_searches += 1
    run.num_tokens += len(tokens)
    numbers = {"positive_share_before": _positive_share(tokens.advantage * ratio_T)}
    limits = objective.bounds(tokens)
    if limits is not None:
        is_positive_T = tokens.advantage > 0
        ratio_T = torch.where(is_positive_T, ratio_T.clamp(max=limits[1]), ratio_T.clamp(limits[0]))
        low, high = float(limits[0]), float(limits[1])
        run.bounds.append((low, high))
        numbers |= {"low": low, "high": high}
    numbers["positive_share"] = _positive_share(tokens.advantage * ratio_T)
    ratio_T = tokens.ratio
    numbers["effective_share"] = float(ratio_T.sum().square() / ratio_T.square().sum()) / len(
        tokens
    )
    if tokens.decision is not None:
        reported = objective.report_decision(tokens.decision.tolist())
        numbers |= {name: reported.get(name, 0.0) for name in EXIT_METRICS.values()}
    run.of_searches.update(numbers)
    for name, value_T in objective.report(tokens).items():
        run.of_tokens[name] += float(value_T.float().sum())
    run.of_tokens["ratio_above_1.2"] += float((ratio_T > 1.2).sum())


def _positive_share(contribution_T: torch.Tensor) -> float:
    positive = float(contribution_T.clamp(min=0).sum())
    total = float(contribution_T.abs().sum())
    return positive / total if total > 0 else 1.0


def entropy(log_policy_CDA: NDArray[np.float64], samples: Samples) -> float:
    """Mean over the tokens of the batch."""
    entropy_CD = -(np.exp(log_policy_CDA) * log_policy_CDA).sum(-1)
    is_token_BT = np.arange(LONGEST) < samples.length_B[:, None]
    entropy_BT = entropy_CD[samples.prompt_B[:, None], samples.stage_BT]
    return float(entropy_BT[is_token_BT].mean())
