"""Random and adversarial token batches for tests of the contribution table."""

import numpy as np

from tests.oracles.bound_search import Floats, Rule, Tokens


def paper_rule(**changes: object) -> Rule:
    """The paper's grid: 37 upper and 16 lower candidates, spelled out."""
    lower = [float(np.float32(0.6 + k * 0.02)) for k in range(16)]
    upper = [float(np.float32(1.2 + k * 0.05)) for k in range(37)]
    return Rule(**{"lower": lower, "upper": upper, "target": 0.4, **changes})  # type: ignore[arg-type]


def logprob_for_ratio(ratio: float, step: int) -> np.float32:
    """A float32 log-ratio whose float32 exponential is ``ratio`` or its neighbour ``step`` away."""
    log_ratio = np.float32(np.log(np.float64(ratio)))
    for _ in range(abs(step)):
        log_ratio = np.nextafter(log_ratio, np.float32(np.inf if step > 0 else -np.inf))
    return np.float32(log_ratio)


def random_tokens(rng: np.random.Generator, num_tokens: int, rule: Rule) -> Tokens:
    """Tokens around the clip range, many of them on an edge or one float beside it."""
    behaviour = (-rng.exponential(1.0, num_tokens)).astype(np.float32)
    spread = rng.choice([0.0, 0.02, 0.3, 1.5, 8.0])
    logprob = (behaviour + rng.normal(0.0, spread, num_tokens)).astype(np.float32)
    edges = [*rule.lower, *rule.upper, *([rule.dual_clip] if rule.dual_clip else [])]
    on_edge = rng.random(num_tokens) < 0.3
    for index in np.flatnonzero(on_edge):
        behaviour[index] = 0.0
        logprob[index] = logprob_for_ratio(float(rng.choice(edges)), int(rng.integers(-2, 3)))
    shift = rng.choice([-1.5, -0.4, -0.1, 0.0, 0.3, 1.5])
    advantage = rng.normal(shift, 1.0, num_tokens).astype(np.float32)
    advantage[rng.random(num_tokens) < 0.1] = 0.0
    mask = (rng.random(num_tokens) < 0.9).astype(np.float32)
    return Tokens(logprob, behaviour, advantage, mask)


def few_values_tokens(rng: np.random.Generator, num_tokens: int) -> Tokens:
    """Tokens of two or three distinct values, as from group-normalised rewards: exact ties."""
    zeros: Floats = np.zeros(num_tokens, dtype=np.float32)
    values = np.float32(rng.choice([0.25, 0.5, 1.0, 1.5, 2.0]))
    advantage = (values * rng.choice([-1, 0, 1], num_tokens)).astype(np.float32)
    return Tokens(zeros, zeros, advantage, np.ones(num_tokens, dtype=np.float32))
