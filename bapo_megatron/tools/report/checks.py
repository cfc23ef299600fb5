"""Automatic checks: signs of a run going wrong, from its metrics alone.

Every finding names the steps and the likely cause, and every check says in how many steps it had
its metrics. The limits are coarse on purpose; they are meant to find defects, not to rank runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from bapo_megatron.telemetry.metrics import BEFORE_TRAINING
from bapo_megatron.tools.report.runs import FAULTS, RunRecord

Points = Sequence[tuple[float, float]]
"""Steps and values of a metric."""

_MAX_MISMATCH = 0.05
"""Mean |trainer's − engine's log-prob| of equal weights. Float32 gives 1e-6, and up to 1e-5 where
an engine takes torch's log-softmax of 50,000 columns; bfloat16 0.01 to 0.03."""
_MAX_MISMATCH_RATIO = 10.0
"""Ratio of the mismatch to its first value. An engine that computes differently does so from the
start; one whose weights stay behind disagrees more with every update."""
MIN_GROWN_MISMATCH = 0.005
"""Below it, a mismatch does not show stale weights."""
_MIN_SET_RATIO = 0.25
"""Ratio of a data set's reward to that of the best one, at the end."""
_MIN_LIVE_SET_RATIO = 0.1
"""The same where the best one has risen: nothing of what it learned helped the other."""
_AGREEMENT, _LOAD = "router/agreement_share", "router/load_mean"
_MIN_AGREEMENT_SHARE = 0.9
"""Replayed experts that the router would have chosen itself."""
_MAX_KL = 0.1
"""Nats per token between the policy and what sampled its tokens."""
_EFFECTIVE, _DOUBLED = "policy/effective_sample_share", "policy/negative_doubled_share"
_MIN_EFFECTIVE_SHARE = 0.45
"""Effective number of responses over their number. Runs that learn had 0.5 and more at a lag of
four steps, one that collapsed 0.2 to 0.45."""
_MAX_DOUBLED_SHARE = 0.007
"""Tokens with A < 0 whose ratio exceeds 2; at most 0.006 and up to 0.024 in the same runs."""
_MIN_ENTROPY_RATIO = 0.1
"""Ratio of the last entropy to the first."""
_EXHAUSTED = "bapo/exit_exhausted_share"
_MIN_EXHAUSTED_SHARE, _MIN_ENTROPY_RISE = 0.9, 1.5
"""Mean share of searches that end at both maxima in a quarter of the run, and the ratio of the
entropy in its last third to that in its first third."""
_MAX_NORM_RATIO = 10.0
"""Ratio of a gradient norm to the median of the run."""
_MIN_SPIKES = 3
"""Steps with such a norm, or such weights. Single ones are common when most groups are solved."""
_MIN_REWARD_RATIO = 0.6
"""Ratio of the last reward to the best one."""
_MAX_SAME_ANSWER = 0.5
"""Share of further solved prompts that have the most common answer; of two choices, about half."""
_MIN_STEPS = 5
"""Steps that half of a trend needs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A sign of a defect."""

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
    find: Callable[[RunRecord], Iterator[Finding]]
    metrics: tuple[str, ...]
    """It needs any of them in a step; ``*`` stands for a name, and needs two names."""
    panel: str
    rollouts: str = ""
    min_steps: int = 1
    """Steps with these metrics that it needs."""

    def result(self, run: RunRecord) -> tuple[str, str, str]:
        """Return its name, its result, and the steps in which it was measured."""
        metrics = set(self.metrics)
        for metric in self.metrics:
            start, wild, end = metric.partition("*")
            names = run.matching(start, end) if wild else []
            metrics |= {f"{start}{name}{end}" for name in names if len(names) > 1}
        num_measured = sum(
            row["step"] != BEFORE_TRAINING and not metrics.isdisjoint(row) for row in run.rows
        )
        result = "passed" if 2 * num_measured >= len(run.steps) else "passed in few steps"
        if any(self.find(run)):
            result = "found"
        elif num_measured < self.min_steps:
            result = "not measured"
        return self.name, result, f"{num_measured:,} of {len(run.steps):,}"


def findings_of(run: RunRecord) -> list[Finding]:
    """Return the findings of all checks, faults first."""
    findings = [
        replace(finding, panel=check.panel, rollouts=check.rollouts)
        for check in CHECKS
        for finding in check.find(run)
    ]
    return sorted(findings, key=lambda finding: finding.level != "fault")


def _skipped_updates(run: RunRecord) -> Iterator[Finding]:
    steps = tuple(int(step) for step, value in run.points("train/updates") if value == 0)
    if steps:
        num_made = math.fsum(run.values("train/updates"))
        num_all = num_made + math.fsum(run.values("train/skipped_updates"))
        yield Finding(
            "fault",
            f"{_count(steps, run)} made no update ({num_made:,.0f} of {num_all:,.0f} in the run): "
            "every group had equal rewards, no token was trainable, or values were not finite "
            "(train/nonfinite_tokens). Check the reward function, the difficulty of the data, and "
            "the staleness of tokens.",
            steps,
        )


def _constant_reward(run: RunRecord) -> Iterator[Finding]:
    rewards = run.values("reward/mean")
    if rewards and max(rewards) == min(rewards):
        yield Finding(
            "fault",
            f"The mean reward was {rewards[0]:g} in every step, so there is nothing to learn. Read "
            "some rollouts below: the reward function or the answer column is likely wrong.",
        )


def _zero_set(run: RunRecord) -> Iterator[Finding]:
    rewards = _rewards_by_set(run)
    means = {name: _mean(points) for name, points in rewards.items()}
    best = max(means.values(), default=0.0)
    for name, mean in means.items():
        if mean == 0 < best:
            yield Finding(
                "fault",
                f"Every response to prompts of '{name}' got 0 while other sets got up to "
                f"{best:.2f}: its reward function or its answers are likely wrong.",
            )


def _lagging_set(run: RunRecord) -> Iterator[Finding]:
    thirds = {
        name: (points[: len(points) // 3], points[-(len(points) // 3) :])
        for name, points in _rewards_by_set(run).items()
        if len(points) >= 2 * _MIN_STEPS
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


def _mismatch(run: RunRecord) -> Iterator[Finding]:
    for metric, when in (
        ("mismatch/logprob_abs_mean", "On tokens of the same weights"),
        ("weight_sync/logprob_difference", "After a weight sync"),
    ):
        values = run.values(metric)
        first = values[0] if values else 0.0
        limit = min(max(_MAX_MISMATCH_RATIO * first, MIN_GROWN_MISMATCH), _MAX_MISMATCH)
        if steps := _steps_above(run, metric, limit):
            bits = run.settings.get("rollout.local.sampling_bits")
            cause = "it likely computes differently"
            if bits:
                cause = f"it samples with weights rounded to {bits} bits"
            elif max(values) > _MAX_MISMATCH_RATIO * first:
                cause = (
                    f"its weights are likely stale, since the first value was {first:.1g}. The "
                    "engine itself reports versions and ages of tokens"
                )
            yield Finding(
                "caution" if bits else "fault",
                f"{when}, engine and trainer differ by up to {max(values):.3g} nats per token in "
                f"{_count(steps, run)}. Check the engine: {cause}.",
                steps,
            )


def _router_agreement(run: RunRecord) -> Iterator[Finding]:
    shares = {step: v for step, v in run.points(_AGREEMENT) if v < _MIN_AGREEMENT_SHARE}
    if shares:
        steps = tuple(int(step) for step in shares)
        yield Finding(
            "caution",
            f"The trainer's routers would choose {min(shares.values()):.0%} of the experts that "
            f"they replay, in {_count(steps, run)}. The weights have moved since the tokens were "
            "sampled (see their age), or the engine computes differently (see the mismatch).",
            steps,
        )


def _expert_load(run: RunRecord) -> Iterator[Finding]:
    loads = run.points(_LOAD)
    first, last = loads[: len(loads) // 2], loads[len(loads) // 2 :]
    if len(first) >= _MIN_STEPS and _mean(last) > 2 * _mean(first):
        yield Finding(
            "caution",
            "Tokens crowd on few experts: the busiest expert of a layer had "
            f"{_mean(first):.1f} times the mean load ({_steps(first)}), then {_mean(last):.1f} "
            f"({_steps(last)}). Lower the learning rate, or set "
            "algorithm.load_balancing_coefficient (0.001).",
        )


def _high_kl(run: RunRecord) -> Iterator[Finding]:
    if steps := _steps_above(run, "policy/kl_behaviour", _MAX_KL):
        yield Finding(
            "caution",
            f"The KL from the sampling policy reached {max(run.values('policy/kl_behaviour')):.3g} "
            f"nats per token, in {_count(steps, run)}. The learning rate is too high, tokens are "
            "stale (see their age), or the engine has other weights (see the mismatch).",
            steps,
        )


def _uneven_weights(run: RunRecord) -> Iterator[Finding]:
    low = {step: v for step, v in run.points(_EFFECTIVE) if v < _MIN_EFFECTIVE_SHARE}
    high = {step: v for step, v in run.points(_DOUBLED) if v > _MAX_DOUBLED_SHARE}
    if len(low.keys() | high.keys()) < _MIN_SPIKES:
        return
    reasons = []
    if low:
        reasons.append(f"an update's responses counted as {min(low.values()):.1%} of their number")
    if high:
        reasons.append(f"{max(high.values()):.1%} of the tokens with A < 0 became twice as likely")
    steps = tuple(sorted(int(step) for step in low.keys() | high.keys()))
    yield Finding(
        "caution",
        f"The importance weights are uneven in {_count(steps, run)}: {' and '.join(reasons)}. A "
        "few responses dominate the updates, which precedes a collapse: lower the learning rate or "
        "the staleness.",
        steps,
    )


def _masked_tokens(run: RunRecord) -> Iterator[Finding]:
    if steps := _steps_above(run, "rollout/masked_token_share", 0.2):
        yield Finding(
            "caution",
            f"More than a fifth of the tokens were masked as stale in {_count(steps, run)}.",
            steps,
        )


def _growing_staleness(run: RunRecord) -> Iterator[Finding]:
    ages = run.points("rollout/age_p90")
    first, last = ages[: len(ages) // 2], ages[len(ages) // 2 :]
    if len(first) >= _MIN_STEPS and _mean(last) > max(4.0, 2 * _mean(first)) and _mean(first) > 0:
        yield Finding(
            "caution",
            "Tokens become staler: the 90th percentile of their age was "
            f"{_mean(first):.1f} updates ({_steps(first)}), then {_mean(last):.1f} "
            f"({_steps(last)}).",
        )


def _gradient_spikes(run: RunRecord) -> Iterator[Finding]:
    metric = "policy/grad_norm_max"
    norms = [value for value in run.values(metric) if value > 0]
    limit = _MAX_NORM_RATIO * median(norms) if len(norms) >= _MIN_STEPS else math.inf
    steps = _steps_above(run, metric, limit)
    if len(steps) >= _MIN_SPIKES:
        yield Finding(
            "caution",
            f"The gradient norm rose to {max(norms):.3g}, {max(norms) / median(norms):.0f} times "
            f"its median, in {_count(steps, run)}: the learning rate may be too high.",
            steps,
        )


def _entropy_collapse(run: RunRecord) -> Iterator[Finding]:
    entropy = run.points("policy/entropy")
    if len(entropy) < _MIN_STEPS:
        return
    start, last = entropy[0][1], _tail(entropy)
    if _mean(last) < _MIN_ENTROPY_RATIO * start:
        yield Finding(
            "caution",
            f"The entropy collapsed from {start:.3g} nats per token ({_steps(entropy[:1])}) to "
            f"{_mean(last):.3g} ({_steps(last)}): the policy hardly explores any more.",
        )


def _over_relaxed_bounds(run: RunRecord) -> Iterator[Finding]:
    shares = dict(run.points(_EXHAUSTED))
    entropy = [point for point in run.points("policy/entropy") if point[0] in shares]
    size = max(_TREND, len(entropy) // 4)
    for start in range(len(entropy) - size + 1):
        window = entropy[start : start + size]
        first, last = window[: size // 3], window[-(size // 3) :]
        share = fmean(shares[step] for step, _ in window)
        rise = _mean(last) / max(_mean(first), 1e-9)
        if share >= _MIN_EXHAUSTED_SHARE and rise >= _MIN_ENTROPY_RISE:
            yield Finding(
                "caution",
                f"The entropy rose from {_mean(first):.3g} nats per token ({_steps(first)}) to "
                f"{_mean(last):.3g} ({_steps(last)}) while {share:.0%} of BAPO's searches ended at "
                "both maxima: bounds that wide may no longer hold updates back. Lower "
                "algorithm.bapo.upper.max, the learning rate or the staleness.",
                tuple(int(step) for step, _ in window),
            )
            return


def _falling_reward(run: RunRecord) -> Iterator[Finding]:
    rewards = run.points("reward/mean")
    if len(rewards) < 2 * _MIN_STEPS:
        return
    last = _tail(rewards)
    windows = np.lib.stride_tricks.sliding_window_view([value for _, value in rewards], len(last))
    start = int(windows.mean(axis=1).argmax())
    best = rewards[start : start + len(last)]
    if _mean(best) > 0 and _mean(last) < _MIN_REWARD_RATIO * _mean(best):
        yield Finding(
            "fault",
            f"The reward fell from {_mean(best):.3f} ({_steps(best)}) to {_mean(last):.3f} "
            f"({_steps(last)}): training diverged. Usual causes are a learning rate that is too "
            "high and stale tokens (see their age).",
        )


def _truncated(run: RunRecord) -> Iterator[Finding]:
    last = _tail(run.points("rollout/truncated_share"))
    if last and _mean(last) > 0.2:
        text = f"{_mean(last):.0%} of the responses are truncated ({_steps(last)})."
        yield Finding("caution", text)


def _unanswered(run: RunRecord) -> Iterator[Finding]:
    last = _tail(run.points("reward/answer_found_share"))
    if last and _mean(last) < 0.5:
        text = f"Only {_mean(last):.0%} of the responses contain an answer ({_steps(last)})."
        yield Finding("caution", text)


def _same_answer(run: RunRecord) -> Iterator[Finding]:
    last = _tail(run.points("reward/same_answer_share"))
    if last and _mean(last) > _MAX_SAME_ANSWER:
        yield Finding(
            "caution",
            f"{_mean(last):.0%} of the solved prompts have one reference answer ({_steps(last)}): "
            "a constant response may earn the reward. Inspect the answers with data show, and "
            "list those that are not answers in reward.no_answers.",
        )


def _errors(run: RunRecord) -> Iterator[Finding]:
    for metric, text in FAULTS.items():
        if steps := _steps_above(run, metric, 0.0):
            sentence = text.format(math.fsum(run.values(metric)))
            yield Finding("caution", f"In {_count(steps, run)}, {sentence}.", steps)


_REWARD, _SETS, _AGE = "Reward and held-out accuracy", "Reward by data set", "Token age"
_SET_REWARDS = ("data/*/reward_mean",)
_MISMATCHES = ("mismatch/logprob_abs_mean", "weight_sync/logprob_difference")
_NORM, _ENTROPY, _KL = ("policy/grad_norm_max",), ("policy/entropy",), ("policy/kl_behaviour",)
_TRUNCATED, _ANSWERED = ("rollout/truncated_share",), ("reward/answer_found_share",)
_WEIGHTS = (_EFFECTIVE, _DOUBLED)
_TREND = 2 * _MIN_STEPS
CHECKS = (
    Check("constant reward", _constant_reward, ("reward/mean",), _REWARD, "reward"),
    Check("data set without reward", _zero_set, _SET_REWARDS, _SETS, "source"),
    Check("lagging data set", _lagging_set, _SET_REWARDS, _SETS, "source", _TREND),
    Check("engine–trainer mismatch", _mismatch, _MISMATCHES, "Engine–trainer mismatch"),
    Check("router agreement", _router_agreement, (_AGREEMENT,), "Router replay"),
    Check("load of experts", _expert_load, (_LOAD,), "Experts", "", _TREND),
    Check("falling reward", _falling_reward, ("reward/mean",), _REWARD, "step", _TREND),
    Check("steps without an update", _skipped_updates, ("train/updates",), "Outcome of groups"),
    Check("gradient norm spikes", _gradient_spikes, _NORM, "Gradient norm", "", _MIN_STEPS),
    Check("KL from the sampling policy", _high_kl, _KL, "KL from the sampling policy"),
    Check("uneven importance weights", _uneven_weights, _WEIGHTS, "Importance weights"),
    Check("tokens masked as stale", _masked_tokens, ("rollout/masked_token_share",), _AGE, "age"),
    Check("growing staleness", _growing_staleness, ("rollout/age_p90",), _AGE, "age", _TREND),
    Check("entropy collapse", _entropy_collapse, _ENTROPY, "Policy entropy", "", _MIN_STEPS),
    Check("over-relaxed bounds", _over_relaxed_bounds, (_EXHAUSTED,), "Policy entropy", "", _TREND),
    Check("truncated responses", _truncated, _TRUNCATED, "Response length", "exit"),
    Check("responses without an answer", _unanswered, _ANSWERED, _REWARD, "reward"),
    Check("one answer for many prompts", _same_answer, ("reward/same_answer_share",), _REWARD),
    Check("errors and time-outs", _errors, tuple(FAULTS), _REWARD),
)


def _rewards_by_set(run: RunRecord) -> dict[str, Points]:
    sets = run.matching("data/", "/reward_mean")
    return {name: run.points(f"data/{name}/reward_mean") for name in sets}


def _steps_above(run: RunRecord, metric: str, limit: float) -> tuple[int, ...]:
    return tuple(int(step) for step, value in run.points(metric) if value > limit)


def _count(steps: Sequence[int], run: RunRecord) -> str:
    numbers = ", ".join(f"{step:,}" for step in steps[:4]) + (" …" if len(steps) > 4 else "")
    noun = "step" if len(steps) == 1 else "steps"
    return f"{len(steps):,} of {len(run.steps):,} steps ({noun} {numbers})"


def _tail(points: Points) -> Points:
    """The last tenth, at least three."""
    return points[-max(3, len(points) // 10) :]


def _mean(points: Points) -> float:
    return fmean(value for _, value in points)


def _steps(points: Points) -> str:
    """The steps that a mean covers."""
    first, last = int(points[0][0]), int(points[-1][0])
    return f"step {first:,}" if first == last else f"mean of steps {first:,} to {last:,}"
