"""What a reader should look at first: signs of a run that goes wrong, from its metrics alone.

Every finding names the steps and the likely cause, and every check says in how many steps it had
what it needs. The limits are coarse on purpose; they are meant to find defects, not to rank runs.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import numpy as np

from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.tools.report.runs import FAULTS, Run

Points = Sequence[tuple[float, float]]
"""Steps and values of a metric."""

_MAX_MISMATCH = 0.05
"""Mean |trainer's − engine's log-prob| of equal weights; float32 gives 1e-6, bfloat16 some 0.01."""
_MAX_MISMATCH_RATIO = 10.0
"""Ratio of the mismatch to its first value. An engine that computes differently does so from the
start; one whose weights stay behind disagrees more with every update."""
MIN_GROWN_MISMATCH = 0.005
"""Below it, a mismatch is no sign of stale weights."""
_MIN_SET_RATIO = 0.25
"""Ratio of a data set's reward to that of the best one, at the end."""
_MIN_LIVE_SET_RATIO = 0.1
"""The same where the best one has risen: nothing of what it learned helped the other."""
_MAX_KL = 0.1
"""Nats per token between the policy and what sampled its tokens."""
_MAX_YOUNG_UPDATES = 8.0
"""Updates that a sound learning rate survives without such a distance."""
_MIN_ENTROPY_RATIO = 0.1
"""Ratio of the last entropy to the first."""
_MAX_NORM_RATIO = 10.0
"""Ratio of a gradient norm to the median of the run."""
_MIN_JUMPS = 3
"""Steps with such a norm. Single ones are common when most groups are solved."""
_MIN_REWARD_RATIO = 0.6
"""Ratio of the last reward to the best one."""
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
    panel: str = ""
    """Title of the panel that shows it."""
    rollouts: str = ""
    """How to group the rollouts that show it; empty where they do not."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of defect to look for."""

    name: str
    find: Callable[[Run], Iterator[Finding]]
    metrics: tuple[str, ...]
    """What it needs in a step: any of them; ``*`` stands for a name, and needs two names."""
    panel: str
    rollouts: str = ""
    min_steps: int = 1
    """Steps with these metrics that it needs."""
    lacking: str = ""
    """What it needs where it was not measured in all steps."""

    def steps_measured(self, run: Run) -> int:
        """Count the training steps that have what it needs."""
        metrics = []
        for metric in self.metrics:
            start, wild, end = metric.partition("*")
            names = run.matching(start, end) if wild else []
            metrics += [f"{start}{name}{end}" for name in names] if len(names) > 1 else [metric]
        return sum(
            row["step"] != BEFORE_TRAINING and any(m in row for m in metrics) for row in run.rows
        )


def findings_of(run: Run) -> list[Finding]:
    """Return what all checks found, faults first."""
    found = [
        replace(finding, panel=check.panel, rollouts=check.rollouts)
        for check in CHECKS
        for finding in check.find(run)
    ]
    return sorted(found, key=lambda finding: finding.level != "fault")


def results_of(run: Run) -> list[tuple[str, str, str, str]]:
    """Return name, result, steps measured and what was lacking of every check."""
    rows = []
    for check in CHECKS:
        count, total = check.steps_measured(run), len(run.steps)
        result = "passed" if 2 * count >= total else "passed in few steps"
        if any(check.find(run)):
            result = "found"
        elif count < check.min_steps:
            result = "not measured"
        lacking = check.lacking if count < total else ""
        if result == "not measured" and count:
            lacking = " ".join(filter(None, [f"Needs {check.min_steps} steps.", lacking]))
        rows.append((check.name, result, f"{count:,} of {total:,}", lacking))
    return rows


def _no_gradient(run: Run) -> Iterator[Finding]:
    steps = _steps_where(run, "train/updates", lambda value: value == 0)
    if steps:
        made = math.fsum(run.values("train/updates"))
        skipped = math.fsum(run.values("train/skipped_updates"))
        yield Finding(
            "fault",
            f"{_count(steps, run)} made no update (the run: {made:,.0f} of {made + skipped:,.0f}): "
            "every group had equal rewards, or no token could train. Look at the reward function, "
            "the difficulty of the data, and the tokens' ages.",
            steps,
        )


def _constant_reward(run: Run) -> Iterator[Finding]:
    rewards = run.values("reward/mean")
    if rewards and max(rewards) == min(rewards):
        yield Finding(
            "fault",
            f"The mean reward was {rewards[0]:g} in every step: nothing can be learned from it. "
            "Read some rollouts and their answers below; the reward function or the answer column "
            "is likely wrong.",
        )


def _zero_set(run: Run) -> Iterator[Finding]:
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
    points = {name: run.points(f"data/{name}/reward_mean") for name in sets}
    thirds = {
        name: (own[: len(own) // 3], own[-(len(own) // 3) :])
        for name, own in points.items()
        if len(own) >= 2 * _MIN_STEPS
    }
    means = {name: (_mean(first), _mean(last)) for name, (first, last) in thirds.items()}
    best = max(means, key=lambda name: means[name][1], default="")
    for name, (start, end) in means.items():
        best_start, best_end = means[best]
        if 0 < end < _MIN_SET_RATIO * best_end and end < 2 * start:
            first, last = thirds[name]
            is_dead = end < _MIN_LIVE_SET_RATIO * best_end and best_start < best_end
            yield Finding(
                "fault" if is_dead else "caution",
                f"The reward of '{name}' stays low, {start:.2f} ({_steps(first)}) and {end:.2f} "
                f"({_steps(last)}), while that of '{best}' goes from {best_start:.2f} to "
                f"{best_end:.2f}: its answers or its reward function "
                f"{'are likely' if is_dead else 'may be'} wrong, or it is much harder. Group the "
                "rollouts by data set, and compare extracted answers with the references.",
            )


def _unequal_weights(run: Run) -> Iterator[Finding]:
    for metric, what in (
        ("mismatch/logprob_abs_mean", "Engine and trainer disagree on tokens of the same weights"),
        ("weight_sync/logprob_difference", "After weight sync, engine and trainer disagree"),
    ):
        values = run.values(metric)
        first = next(iter(values), 0.0)
        grown = max(_MAX_MISMATCH_RATIO * first, MIN_GROWN_MISMATCH)
        limit = min(grown, _MAX_MISMATCH)
        steps = _steps_where(run, metric, partial(operator.lt, limit))
        if steps:
            cause = "it likely computes differently"
            if max(values) > _MAX_MISMATCH_RATIO * first:
                cause = (
                    f"its weights are likely stale, since the first value was {first:.1g}. "
                    f"{_same_scores(run)}Versions and ages are what the engine claims"
                )
            yield Finding(
                "fault",
                f"{what} by up to {max(values):.3g} nats per token in {_count(steps, run)}. Look "
                f"at the engine: {cause}.",
                steps,
            )


def _silent_updates(run: Run) -> Iterator[Finding]:
    silent = [
        int(row["step"])
        for row in run.rows
        if row.get("train/updates", 0.0) > 0 and row.get("weight_sync/syncs") == 0.0
    ]
    if silent:
        yield Finding(
            "caution",
            f"{_count(silent, run)} trained without a weight sync.",
            tuple(silent),
        )


def _same_scores(run: Run) -> str:
    """Say which evaluations came out identical: their scores and the lengths of responses."""
    text = ""
    for name in run.eval_sets:
        scores = run.points(f"eval/{name}/avg_at_k")
        lengths = run.values(f"eval/{name}/response_tokens_mean")
        if len(scores) > 1 and len({score for _, score in scores}) == len(set(lengths)) == 1:
            text += f"All {len(scores)} evaluations on '{name}' are identical. "
    return text


def _far_policy(run: Run) -> Iterator[Finding]:
    steps = _steps_where(run, "policy/kl_behaviour", lambda value: value > _MAX_KL)
    if steps:
        largest = max(run.values("policy/kl_behaviour"))
        yield Finding(
            "caution",
            f"The policy was up to {largest:.3g} nats per token away from what sampled its tokens, "
            f"in {_count(steps, run)}. {_why_far(run, steps)}",
            steps,
        )


def _masked_tokens(run: Run) -> Iterator[Finding]:
    stale = _steps_where(run, "rollout/masked_token_share", lambda value: value > 0.2)
    if stale:
        yield Finding(
            "caution",
            f"More than a fifth of the tokens were masked for their age in {_count(stale, run)}.",
            stale,
        )


def _ageing_tokens(run: Run) -> Iterator[Finding]:
    ages = run.points("rollout/age_p90")
    first, last = ages[: len(ages) // 2], ages[len(ages) // 2 :]
    if len(first) >= _MIN_STEPS and _mean(last) > max(4.0, 2 * _mean(first)) and _mean(first) > 0:
        yield Finding(
            "caution",
            "Tokens grow older: the 90th percentile of their age was "
            f"{_mean(first):.1f} updates ({_steps(first)}), then {_mean(last):.1f} "
            f"({_steps(last)}).",
        )


def _why_far(run: Run, steps: Sequence[int]) -> str:
    """Name the causes that no step so far away rules out, and what rules out the others."""
    causes, reasons = ["the learning rate is too high"], []
    age, step = _smallest(run, "rollout/age_max", steps)
    if age <= _MAX_YOUNG_UPDATES:
        reasons.append(f"the batch of step {step} held no token older than {age:.0f} updates")
    else:
        causes.append("tokens are old")
    difference, step = _smallest(run, "mismatch/logprob_abs_mean", steps)
    if difference <= MIN_GROWN_MISMATCH:
        reasons.append(f"engine and trainer agreed to {difference:.1g} nats in step {step}")
    else:
        causes.append("the engine has other weights")
    return f"Likely {', or '.join(causes)}" + (f": {', and '.join(reasons)}." if reasons else ".")


def _smallest(run: Run, metric: str, steps: Sequence[int]) -> tuple[float, int]:
    """The smallest value at these steps, and its step; infinity where there is none."""
    found = [(value, int(step)) for step, value in run.points(metric) if step in steps]
    return min(found, default=(math.inf, 0))


def _gradients(run: Run) -> Iterator[Finding]:
    norms = [value for value in run.values("policy/grad_norm_max") if value > 0]
    if len(norms) >= _MIN_STEPS:
        usual = median(norms)
        steps = _steps_where(
            run, "policy/grad_norm_max", lambda value: value > _MAX_NORM_RATIO * usual
        )
        if len(steps) >= _MIN_JUMPS:
            yield Finding(
                "caution",
                f"The gradient norm rose to {max(norms):.3g}, {max(norms) / usual:.0f} times its "
                f"median, in {_count(steps, run)}: the learning rate may be too high.",
                steps,
            )


def _entropy(run: Run) -> Iterator[Finding]:
    entropy = run.points("policy/entropy")
    if len(entropy) >= _MIN_STEPS and entropy[0][1] > 0:
        last = _tail(entropy)
        if _mean(last) < _MIN_ENTROPY_RATIO * entropy[0][1]:
            yield Finding(
                "caution",
                f"The entropy collapsed from {entropy[0][1]:.3g} nats per token "
                f"({_steps(entropy[:1])}) to {_mean(last):.3g} ({_steps(last)}): the policy hardly "
                "explores any more.",
            )


def _fallen_reward(run: Run) -> Iterator[Finding]:
    rewards = run.points("reward/mean")
    if len(rewards) < 2 * _MIN_STEPS:
        return
    last = _tail(rewards)
    width = len(last)
    windows = np.lib.stride_tricks.sliding_window_view([value for _, value in rewards], width)
    start = int(windows.mean(axis=1).argmax())
    best = rewards[start : start + width]
    if _mean(best) > 0 and _mean(last) < _MIN_REWARD_RATIO * _mean(best):
        oldest = max(run.values("rollout/age_max"), default=math.inf)
        causes = "A learning rate too high or old tokens are the usual causes."
        if oldest <= _MAX_YOUNG_UPDATES:
            causes = (
                "A learning rate too high is the usual cause; no token was older than "
                f"{oldest:.0f} updates."
            )
        yield Finding(
            "fault",
            f"The reward fell from {_mean(best):.3f} ({_steps(best)}) to {_mean(last):.3f} "
            f"({_steps(last)}): training diverged. {causes}",
        )


def _truncated(run: Run) -> Iterator[Finding]:
    truncated = _tail(run.points("rollout/truncated_share"))
    if truncated and _mean(truncated) > _MAX_TRUNCATED:
        yield Finding(
            "caution",
            f"{_mean(truncated):.0%} of the responses are truncated ({_steps(truncated)}).",
        )


def _unanswered(run: Run) -> Iterator[Finding]:
    answered = _tail(run.points("reward/answer_found_share"))
    if answered and _mean(answered) < _MIN_ANSWERED:
        yield Finding(
            "caution",
            f"An answer was found in only {_mean(answered):.0%} of the responses "
            f"({_steps(answered)}).",
        )


def _faults(run: Run) -> Iterator[Finding]:
    for metric, text in FAULTS.items():
        steps = _steps_where(run, metric, lambda value: value > 0)
        if steps:
            sentence = text.format(math.fsum(run.values(metric)))
            yield Finding("caution", f"In {_count(steps, run)}, {sentence}.", steps)


_SETS, _SET_REWARDS = "Reward by data set", ("data/*/reward_mean",)
_REWARD, _AGE = "Reward and held-out accuracy", "Age of the tokens in a batch"
_TWO_SETS, _UPDATED = "Needs two data sets.", "Needs steps with an update."
_SAME_WEIGHTS = (
    "The other steps trained no token of the current weights; rollout.weight_sync.verify: every "
    "would compare after each weight sync."
)
CHECKS = (
    Check("constant reward", _constant_reward, ("reward/mean",), _REWARD, "reward"),
    Check("data set without reward", _zero_set, _SET_REWARDS, _SETS, "source", lacking=_TWO_SETS),
    Check(
        "data set that stays behind",
        _weak_set,
        _SET_REWARDS,
        _SETS,
        "source",
        min_steps=2 * _MIN_STEPS,
        lacking=_TWO_SETS,
    ),
    Check(
        "engine against trainer",
        _unequal_weights,
        ("mismatch/logprob_abs_mean", "weight_sync/logprob_difference"),
        "Engine against trainer",
        lacking=_SAME_WEIGHTS,
    ),
    Check("updates without a weight sync", _silent_updates, ("weight_sync/syncs",), _REWARD),
    Check("falling reward", _fallen_reward, ("reward/mean",), _REWARD, "step", 2 * _MIN_STEPS),
    Check("steps without an update", _no_gradient, ("train/updates",), "Outcome of groups"),
    Check(
        "jumps of the gradient norm",
        _gradients,
        ("policy/grad_norm_max",),
        "Gradient norm before clipping",
        min_steps=_MIN_STEPS,
        lacking=_UPDATED,
    ),
    Check(
        "distance from the sampling policy",
        _far_policy,
        ("policy/kl_behaviour",),
        "Distance from the sampling policy",
        lacking=_UPDATED,
    ),
    Check("masked tokens", _masked_tokens, ("rollout/masked_token_share",), _AGE, "age"),
    Check("ageing tokens", _ageing_tokens, ("rollout/age_p90",), _AGE, "age", 2 * _MIN_STEPS),
    Check(
        "collapse of the entropy",
        _entropy,
        ("policy/entropy",),
        "Entropy of the policy",
        min_steps=_MIN_STEPS,
        lacking=_UPDATED,
    ),
    Check(
        *("truncated responses", _truncated, ("rollout/truncated_share",)),
        *("Response length", "exit"),
    ),
    Check(
        *("responses without an answer", _unanswered, ("reward/answer_found_share",)),
        *(_REWARD, "reward"),
    ),
    Check("errors and time-outs", _faults, tuple(FAULTS), _REWARD),
)


def _steps_where(run: Run, metric: str, holds: Callable[[float], bool]) -> tuple[int, ...]:
    return tuple(int(step) for step, value in run.points(metric) if holds(value))


def _count(steps: Sequence[int], run: Run) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:4]) + (" …" if len(steps) > 4 else "")
    noun = "step" if len(steps) == 1 else "steps"
    return f"{len(steps):,} of {len(run.steps):,} steps ({noun} {shown})"


def _tail(points: Points) -> Points:
    """The last tenth, at least three."""
    return points[-max(3, len(points) // 10) :]


def _mean(points: Points) -> float:
    return fmean(value for _, value in points)


def _steps(points: Points) -> str:
    """Say which steps a mean is of."""
    first, last = int(points[0][0]), int(points[-1][0])
    return f"step {first:,}" if first == last else f"mean of steps {first:,} to {last:,}"
