"""A task whose expected reward is known exactly, so that curves have no evaluation noise.

For each prompt a response must pass D stages. In each stage one action is *right* and leads to the
next stage, one is *sloppy*: it does too, but spoils the answer; all others change nothing. After T
actions the response is truncated. The reward is 1 for passing all stages without a sloppy action.
Wrong responses are longer than right ones on average, as in the paper: every action without effect
is another chance to be sloppy or truncated.

The policy is a softmax over logits of low rank, so that prompts share parameters as they do in a
network:  logits[c, d] = φ_c W_d.  φ is fixed, W is trained.

Shape legend: C = prompts, D = stages, A = actions, K = rank, B = responses, T = longest response.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROMPTS, STAGES, ACTIONS, RANK, LONGEST = 64, 5, 32, 20, 24
RIGHT, SLOPPY = 1, 2
"""Kinds of actions; 0 has no effect."""
_HARD_SHARE = 0.25
"""Share of stages at which the right action is not favoured at first."""
_RIGHT_LOGIT, _SLOPPY_LOGIT, _NOISE = 3.5, 2.3, 0.7
_FIT_STEPS, _FIT_RATE = 300, 4.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Responses; what comes after a response's end has no meaning."""

    prompt_B: NDArray[np.int64]
    stage_BT: NDArray[np.int64]
    action_BT: NDArray[np.int64]
    length_B: NDArray[np.int64]
    reward_B: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Task:
    """One instance: which actions are right, and the policy that training begins with."""

    features_CK: NDArray[np.float64]
    kind_CDA: NDArray[np.int64]
    start_DKA: NDArray[np.float64]

    def log_policy(self, weight_DKA: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-probabilities of all actions, [C, D, A]."""
        return log_softmax(self.features_CK @ weight_DKA).transpose(1, 0, 2)

    def expected_reward(self, log_policy_CDA: NDArray[np.float64]) -> float:
        """The mean over all prompts, exact: the chance to pass all stages in T actions, unspoilt.

        A spoilt response can only be truncated or pass with reward 0, so its mass is left out.
        """
        policy_CDA = np.exp(log_policy_CDA)
        right_CD = (policy_CDA * (self.kind_CDA == RIGHT)).sum(-1)
        stay_CD = 1 - right_CD - (policy_CDA * (self.kind_CDA == SLOPPY)).sum(-1)
        at_CD, passed_C = np.zeros_like(right_CD), np.zeros(len(right_CD))
        at_CD[:, 0] = 1
        for _ in range(LONGEST):
            moved_CD = at_CD * right_CD
            passed_C += moved_CD[:, -1]
            at_CD = at_CD * stay_CD
            at_CD[:, 1:] += moved_CD[:, :-1]
        return float(passed_C.mean())

    def sample(
        self, log_policy_CDA: NDArray[np.float64], group_size: int, rng: np.random.Generator
    ) -> Samples:
        """Draw a group of responses for every prompt, the prompts in a random order.

        The draws depend on ``rng`` alone, not on the policy, so that runs with the same seed share
        their chance.
        """
        prompt_B = np.repeat(rng.permutation(PROMPTS), group_size)
        draw_TB = rng.random((LONGEST, len(prompt_B)))
        cumulated_CDA = np.exp(log_policy_CDA).cumsum(-1)
        stage_B, is_spoilt_B = np.zeros_like(prompt_B), np.zeros(len(prompt_B), dtype=bool)
        length_B, reward_B = np.zeros_like(prompt_B), np.zeros(len(prompt_B))
        stage_BT = np.zeros((len(prompt_B), LONGEST), dtype=np.int64)
        action_BT = np.zeros_like(stage_BT)
        running = np.arange(len(prompt_B))
        for moment in range(LONGEST):
            prompt, stage = prompt_B[running], stage_B[running]
            is_below = cumulated_CDA[prompt, stage] < draw_TB[moment, running, None]
            action = np.minimum(is_below.sum(-1), ACTIONS - 1)
            stage_BT[running, moment], action_BT[running, moment] = stage, action
            length_B[running] += 1
            kind = self.kind_CDA[prompt, stage, action]
            is_spoilt_B[running] |= kind == SLOPPY
            stage_B[running] += kind > 0
            has_passed = stage_B[running] == STAGES
            reward_B[running[has_passed]] = ~is_spoilt_B[running[has_passed]]
            running = running[~has_passed]
        return Samples(prompt_B, stage_BT, action_BT, length_B, reward_B)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log-probabilities over the last dimension."""
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


@functools.lru_cache(maxsize=16)
def make_task(seed: int) -> Task:
    """The instance of a seed: random targets, and W fitted to them by cross entropy.

    In most stages the right action is the likeliest one, but sloppy ones are common; in a quarter
    of them the right action is one of many.
    """
    rng = np.random.default_rng(seed)
    features_CK = np.ones((PROMPTS, RANK))
    features_CK[:, :-1] = rng.normal(size=(PROMPTS, RANK - 1)) / np.sqrt(RANK - 1)
    order_CDA = rng.permuted(
        np.broadcast_to(np.arange(ACTIONS), (PROMPTS, STAGES, ACTIONS)), axis=-1
    )
    kind_CDA = np.where(order_CDA == 0, RIGHT, np.where(order_CDA == 1, SLOPPY, 0))
    is_hard_CD1 = rng.random((PROMPTS, STAGES, 1)) < _HARD_SHARE
    logit_CDA = rng.normal(0, _NOISE, kind_CDA.shape)
    logit_CDA += np.where((kind_CDA == RIGHT) & ~is_hard_CD1, _RIGHT_LOGIT, 0)
    logit_CDA += np.where(kind_CDA == SLOPPY, _SLOPPY_LOGIT, 0)
    target_CDA = np.exp(logit_CDA)
    target_CDA /= target_CDA.sum(-1, keepdims=True)
    task = Task(features_CK, kind_CDA, np.zeros((STAGES, RANK, ACTIONS)))
    weight_DKA = task.start_DKA
    for _ in range(_FIT_STEPS):
        error_CDA = target_CDA - np.exp(task.log_policy(weight_DKA))
        weight_DKA = weight_DKA + _FIT_RATE / PROMPTS * features_CK.T @ error_CDA.transpose(1, 0, 2)
    return Task(features_CK, kind_CDA, weight_DKA)
