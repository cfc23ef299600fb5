"""What a reader should look at first: signs of a run that goes wrong, from its metrics alone.

Every check names the steps and the likely cause. The limits are coarse on purpose; they are meant
to find defects, not to rank runs.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from bapo_megatron.report.runs import FAULTS, Run

_MAX_MISMATCH = 0.05
"""Mean |trainer's − engine's log-prob| of equal weights; float32 gives 1e-6, bfloat16 some 0.01."""
_MISMATCH_GROWTH = 10.0
"""Over its first value. An engine that computes differently does so from the start; one whose
weights stay behind disagrees more with every update."""
_MIN_GROWN_MISMATCH = 0.005
_SET_LEFT = 0.25
"""Reward of a data set over that of the best one, at the end."""
_MAX_KL = 0.1
"""Nats per token between the policy and what sampled its tokens."""
_MAX_YOUNG = 8.0
"""Updates that a sound learning rate survives without such a distance."""
_ENTROPY_LEFT = 0.1
"""Share of the first entropy."""
_NORM_JUMP = 10.0
"""Gradient norm over the median of the run."""
_MIN_JUMPS = 3
"""Steps with such a norm. Single ones are common when most groups are solved."""
_REWARD_LEFT = 0.6
"""Share of the best reward that a run may fall to."""
_MAX_TRUNCATED = 0.2
_MIN_ANSWERED = 0.5
_MIN_STEPS = 5
"""Trends need as many."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    level: str
    """``fault``: a defect is likely; ``caution``: worth a look."""
    text: str
    steps: tuple[int, ...] = ()


Check = Callable[[Run], Iterator[Finding]]


def findings_of(run: Run) -> list[Finding]:
    """Return what all checks found, faults first."""
    found = [finding for check in _CHECKS for finding in check(run)]
    return sorted(found, key=lambda finding: finding.level != "fault")


def _no_gradient(run: Run) -> Iterator[Finding]:
    steps = _steps_where(run, "train/updates", lambda value: value == 0)
    if steps:
        yield Finding(
            "fault",
            f"{_count(steps, run)} made no update: every group had equal rewards, or no token "
            "could train. Look at the reward function, the difficulty of the data, and the tokens' "
            "ages.",
            steps,
        )


def _zero_reward(run: Run) -> Iterator[Finding]:
    rewards = run.values("reward/mean")
    if rewards and max(rewards) == min(rewards):
        yield Finding(
            "fault",
            f"The mean reward was {rewards[0]:g} in every step: nothing can be learned from it. "
            "Read some rollouts and their answers below; the reward function or the answer column "
            "is likely wrong.",
        )
        return
    sources = run.matching("data/", "/reward_mean")
    means = {name: fmean(run.values(f"data/{name}/reward_mean")) for name in sources}
    for name, mean in means.items():
        if mean == 0 and max(means.values()) > 0:
            yield Finding(
                "fault",
                f"Every response to prompts of '{name}' got 0 while other sets got up to "
                f"{max(means.values()):.2f}: its reward function or its answers are likely wrong.",
            )


def _weak_set(run: Run) -> Iterator[Finding]:
    sets = run.matching("data/", "/reward_mean")
    rewards = {name: run.values(f"data/{name}/reward_mean") for name in sets}
    rewards = {name: values for name, values in rewards.items() if len(values) >= 2 * _MIN_STEPS}
    ends = {name: fmean(values[-(len(values) // 3) :]) for name, values in rewards.items()}
    best = max(ends, key=ends.__getitem__, default="")
    for name, end in ends.items():
        start = fmean(rewards[name][: len(rewards[name]) // 3])
        if 0 < end < _SET_LEFT * ends[best] and end < 2 * start:
            yield Finding(
                "caution",
                f"'{name}' stays at a reward of {end:.2f} while '{best}' reaches {ends[best]:.2f}: "
                "its answers or its reward function may be wrong, or it is much harder. Group the "
                "rollouts by data set, and compare extracted answers with the references.",
            )


def _unequal_weights(run: Run) -> Iterator[Finding]:
    for metric, what in (
        ("mismatch/logprob_abs_mean", "Engine and trainer disagree on tokens of the same weights"),
        ("weight_sync/logprob_difference", "After a push, engine and trainer disagree"),
    ):
        first = next(iter(run.values(metric)), 0.0)
        grown = max(_MISMATCH_GROWTH * first, _MIN_GROWN_MISMATCH)
        limit = min(grown, _MAX_MISMATCH)
        steps = _steps_where(run, metric, partial(operator.lt, limit))
        if steps:
            largest = max(run.values(metric))
            cause = "it likely computes differently"
            if largest > _MISMATCH_GROWTH * first:
                cause = f"its weights are likely stale, since the first value was {first:.1g}"
            yield Finding(
                "fault",
                f"{what} by up to {largest:.3g} nats per token in {_count(steps, run)}. Look at "
                f"the engine: {cause}.",
                steps,
            )
    silent = [
        int(row["step"])
        for row in run.rows
        if row.get("train/updates", 0.0) > 0 and row.get("weight_sync/pushes") == 0.0
    ]
    if silent:
        yield Finding(
            "caution", f"{_count(silent, run)} updated the policy without a push.", tuple(silent)
        )


def _far_policy(run: Run) -> Iterator[Finding]:
    steps = _steps_where(run, "policy/kl_behaviour", lambda value: value > _MAX_KL)
    if steps:
        largest = max(run.values("policy/kl_behaviour"))
        yield Finding(
            "caution",
            f"The policy was up to {largest:.3g} nats per token away from what sampled its tokens "
            f"({_count(steps, run)}): {_why_far(run, steps)}.",
            steps,
        )
    stale = _steps_where(run, "rollout/masked_token_share", lambda value: value > 0.2)
    if stale:
        yield Finding(
            "caution",
            f"More than a fifth of the tokens were masked for their age in {_count(stale, run)}.",
            stale,
        )
    ages = run.points("rollout/age_p90")
    first, last = _halves([age for _, age in ages])
    if last > max(4.0, 2 * first) and first > 0:
        yield Finding(
            "caution",
            f"Tokens grow older: the 90th percentile of their age was {first:.1f} updates in the "
            f"first half and {last:.1f} in the second.",
        )


def _why_far(run: Run, steps: Sequence[int]) -> str:
    """What may be the cause, where not all tokens were young."""
    ages = {int(step): age for step, age in run.points("rollout/age_max") if int(step) in steps}
    step = min(ages, key=ages.__getitem__, default=0)
    if ages.get(step, math.inf) > _MAX_YOUNG:
        return "tokens are old, the learning rate is high, or the engine has other weights"
    return (
        "the learning rate is likely too high, or the engine has other weights, since the batch of "
        f"step {step} held no token older than {ages[step]:.0f} updates"
    )


def _gradients(run: Run) -> Iterator[Finding]:
    norms = [value for value in run.values("policy/grad_norm_max") if value > 0]
    if len(norms) >= _MIN_STEPS:
        usual = median(norms)
        steps = _steps_where(run, "policy/grad_norm_max", lambda value: value > _NORM_JUMP * usual)
        if len(steps) >= _MIN_JUMPS:
            yield Finding(
                "caution",
                f"The gradient norm rose to {max(norms):.3g}, {max(norms) / usual:.0f} times its "
                f"median, in {_count(steps, run)}: the learning rate may be too high.",
                steps,
            )


def _entropy(run: Run) -> Iterator[Finding]:
    values = run.values("policy/entropy")
    if len(values) >= _MIN_STEPS and values[0] > 0:
        last = fmean(_tail(values))
        if last < _ENTROPY_LEFT * values[0]:
            yield Finding(
                "caution",
                f"The entropy collapsed from {values[0]:.3g} to {last:.3g} nats per token: the "
                "policy hardly explores any more.",
            )


def _fallen_reward(run: Run) -> Iterator[Finding]:
    rewards = run.values("reward/mean")
    if len(rewards) < 2 * _MIN_STEPS:
        return
    width = max(3, len(rewards) // 10)
    smooth = [fmean(rewards[start : start + width]) for start in range(len(rewards) - width + 1)]
    best = max(smooth)
    if best > 0 and smooth[-1] < _REWARD_LEFT * best:
        yield Finding(
            "fault",
            f"The reward fell from {best:.3f} (around step "
            f"{int(run.points('reward/mean')[smooth.index(best)][0])}) to {smooth[-1]:.3f}: "
            "training diverged. A learning rate too high or old tokens are the usual causes.",
        )


def _responses(run: Run) -> Iterator[Finding]:
    truncated = _tail(run.values("rollout/truncated_share"))
    if truncated and fmean(truncated) > _MAX_TRUNCATED:
        yield Finding(
            "caution", f"At the end {fmean(truncated):.0%} of the responses are truncated."
        )
    answered = _tail(run.values("reward/answer_found_share"))
    if answered and fmean(answered) < _MIN_ANSWERED:
        text = f"At the end an answer was found in only {fmean(answered):.0%} of the responses."
        yield Finding("caution", text)


def _faults(run: Run) -> Iterator[Finding]:
    for metric, text in FAULTS.items():
        steps = _steps_where(run, metric, lambda value: value > 0)
        if steps:
            sentence = text.format(math.fsum(run.values(metric)))
            yield Finding("caution", f"In {_count(steps, run)}, {sentence}.", steps)


_CHECKS: tuple[Check, ...] = (
    *(_zero_reward, _weak_set, _unequal_weights, _fallen_reward, _no_gradient, _gradients),
    *(_far_policy, _entropy, _responses, _faults),
)


def _steps_where(run: Run, metric: str, holds: Callable[[float], bool]) -> tuple[int, ...]:
    return tuple(int(step) for step, value in run.points(metric) if holds(value))


def _count(steps: Sequence[int], run: Run) -> str:
    shown = ", ".join(map(str, steps[:4])) + (" …" if len(steps) > 4 else "")
    noun = "step" if len(steps) == 1 else "steps"
    return f"{len(steps)} of {len(run.steps)} steps ({noun} {shown})"


def _tail(values: Sequence[float]) -> Sequence[float]:
    """The last tenth, at least three."""
    return values[-max(3, len(values) // 10) :]


def _halves(values: Sequence[float]) -> tuple[float, float]:
    middle = len(values) // 2
    if middle < _MIN_STEPS:
        return 0.0, 0.0
    return fmean(values[:middle]), fmean(values[middle:])
