"""Algorithm 1 and the released recipe's loop, literally, token by token and pair by pair.

``exact_search`` uses integers and fractions on the quantised tokens: the extension must agree
always. ``float64_search`` uses real values in float64: it must agree wherever no visited pair is
within a margin of the target. Shape legend: T = tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
UNIT = 2**24


@dataclass(frozen=True)
class Tokens:
    """One batch; every array is [T] float32."""

    logprob: Floats
    behaviour: Floats
    advantage: Floats
    mask: Floats

    def __len__(self) -> int:
        return len(self.logprob)

    def arrays(self) -> tuple[Floats, Floats, Floats, Floats]:
        return self.logprob, self.behaviour, self.advantage, self.mask

    def ratios(self) -> Floats:
        """r in float32, from a float64 exponential."""
        clamped = np.clip(self.logprob - self.behaviour, np.float32(-20), np.float32(20))
        return np.exp(clamped.astype(np.float64)).astype(np.float32)

    def weighted_advantages(self, weight: str) -> npt.NDArray[np.float64]:
        """w·A in float64, 0 where the mask is 0."""
        factor = np.exp(self.behaviour.astype(np.float64)) if weight == "behaviour_prob" else 1.0
        return np.where(self.mask == 1, factor * self.advantage.astype(np.float64), 0.0)


@dataclass(frozen=True)
class Rule:
    """The settings of one search, with the candidates already formed."""

    lower: list[float]
    upper: list[float]
    target: float
    order: str = "upper_first"
    contribution: str = "surrogate"
    measure: str = "share"
    weight: str = "uniform"
    dual_clip: float | None = None


@dataclass(frozen=True)
class Found:
    """The chosen pair, how the search ended, and the smallest distance to the target on its way."""

    clip_low: float
    clip_high: float
    exit: str
    margin: float = math.nan


def exact_sums(tokens: Tokens, rule: Rule, clip_low: float, clip_high: float) -> tuple[int, int]:
    """P and N in units of 2^-48: float32 r is compared, rounded r and |w·A| are summed."""
    low, high = int(Fraction(clip_low) * UNIT), int(Fraction(clip_high) * UNIT)
    positive = negative = 0
    dual = math.inf if rule.dual_clip is None else rule.dual_clip
    for r, weighted in zip(
        tokens.ratios().tolist(), tokens.weighted_advantages(rule.weight).tolist(), strict=True
    ):
        q = round(Fraction(r) * UNIT)
        a = round(abs(Fraction(weighted)) * UNIT)
        if rule.contribution == "surrogate":
            if weighted > 0:
                positive += a * min(q, high)
            else:
                negative += a * max(q, low)
        elif weighted > 0:
            positive += a * q if r < clip_high else 0
        else:
            negative += a * q if clip_low < r <= dual else 0
    return positive, negative


def exact_table(tokens: Tokens, rule: Rule) -> list[int]:
    """The contribution table, slot by slot as csrc/README.md describes it."""
    lower = [*rule.lower, *([] if rule.dual_clip is None else [float(np.float32(rule.dual_clip))])]
    bins = [[0] * 4 for _ in range(len(rule.upper) + 1 + len(lower) + 1)]
    nonfinite = out_of_range = positive = negative = 0
    for logprob, behaviour, advantage, mask in zip(*tokens.arrays(), strict=True):
        if mask == 0:
            continue
        if not np.isfinite([logprob, behaviour, advantage, mask]).all():
            nonfinite += 1
            continue
        positive += int(advantage > 0)
        negative += int(advantage < 0)
        factor = math.exp(behaviour) if rule.weight == "behaviour_prob" else 1.0
        a = round(abs(Fraction(factor * float(advantage))) * UNIT)
        if mask != 1 or a >= 2**32:
            out_of_range += 1
            continue
        with np.errstate(over="ignore"):
            log_ratio = np.clip(logprob - behaviour, np.float32(-20), np.float32(20))
        r = float(np.float32(math.exp(log_ratio)))
        product = a * round(Fraction(r) * UNIT)
        if advantage > 0:
            limbs = bins[sum(edge <= r for edge in rule.upper)]
        else:
            limbs = bins[len(rule.upper) + 1 + sum(edge < r for edge in lower)]
        limbs[0] += a
        for limb in range(3):
            limbs[limb + 1] += (product >> (32 * limb)) & 0xFFFFFFFF
    return [slot for one_bin in bins for slot in one_bin] + [
        nonfinite,
        out_of_range,
        positive,
        negative,
    ]


def exact_search(tokens: Tokens, rule: Rule) -> Found:
    """Walk the path with exact arithmetic; the target is the nearest multiple of 2^-24."""
    target = Fraction(round(Fraction(rule.target) * UNIT), UNIT)

    def reaches(clip_low: float, clip_high: float) -> bool:
        positive, negative = exact_sums(tokens, rule, clip_low, clip_high)
        if rule.measure == "ratio":
            return positive >= target * negative
        return positive + negative == 0 or Fraction(positive, positive + negative) >= target

    return _walk(rule, reaches)


def float64_search(tokens: Tokens, rule: Rule) -> Found:
    """Walk the path by shares in float64, nothing rounded but r itself.

    The margin is the least |ρ − ρ0| of a visited pair.
    """
    assert (rule.contribution, rule.measure) == ("surrogate", "share")
    ratio = tokens.ratios().astype(np.float64)
    weighted = tokens.weighted_advantages(rule.weight)
    margins = [math.inf]

    def reaches(clip_low: float, clip_high: float) -> bool:
        up, down = np.minimum(ratio, clip_high), np.maximum(ratio, clip_low)
        positive = math.fsum((weighted * up)[weighted > 0].tolist())
        negative = math.fsum((-weighted * down)[weighted < 0].tolist())
        share = positive / (positive + negative)
        margins.append(abs(share - rule.target))
        return share >= rule.target

    result = _walk(rule, reaches)
    return Found(result.clip_low, result.clip_high, result.exit, min(margins))


def _walk(rule: Rule, reaches: Callable[[float, float], bool]) -> Found:
    """Algorithm 1 as a while loop: move the first bound to its end, then the other one."""
    low = high = 0
    steps = 0
    while not reaches(rule.lower[low], rule.upper[high]):
        can_raise = high + 1 < len(rule.upper)
        can_lift = low + 1 < len(rule.lower)
        if can_raise and (rule.order == "upper_first" or not can_lift):
            high += 1
        elif can_lift:
            low += 1
        else:
            return Found(rule.lower[low], rule.upper[high], "exhausted")
        steps += 1
    return Found(rule.lower[low], rule.upper[high], "met" if steps else "start")


def released_recipe_search(
    tokens: Tokens,
    *,
    lower: tuple[float, float, float],
    upper: tuple[float, float, float],
    target: float,
) -> Found:
    """The released code's two loops (start, max, step), its sums in float64 and without eps."""
    ratio = tokens.ratios().astype(np.float64)
    advantage = tokens.advantage.astype(np.float64)
    margins = [math.inf]

    def balance(clip_low: float, clip_high: float) -> float:
        low, high = float(np.float32(clip_low)), float(np.float32(clip_high))
        effective = np.where(advantage >= 0, np.minimum(ratio, high), np.maximum(ratio, low))
        effective = effective * advantage * tokens.mask
        positive = math.fsum(effective[effective > 0].tolist())
        negative = -math.fsum(effective[effective < 0].tolist())
        if negative <= 0:
            return math.inf
        margins.append(abs(positive - target * negative) / (positive + target * negative))
        return positive / negative

    low, high = lower[0], upper[0]
    current = balance(low, high)
    exit_name = "start" if current >= target else "met"
    while current < target and low < lower[1]:
        low = min(low + lower[2], lower[1])
        current = balance(low, high)
    while current < target and high < upper[1]:
        high = min(high + upper[2], upper[1])
        current = balance(low, high)
    if current < target:
        exit_name = "exhausted"
    return Found(float(np.float32(low)), float(np.float32(high)), exit_name, min(margins))
