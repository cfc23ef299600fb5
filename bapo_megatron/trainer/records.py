"""What a step reports: sums over tokens, the metrics made from them, and dumps of the tokens.

A new metric is one entry in ``SUMS`` or ``COUNTS`` and one in ``QUOTIENTS`` (docs/extending.md).
Sums and counts are reduced over micro-batches and ranks first; a quotient is formed once, at the
end of the step, so that no mean of means appears. ``train.dump_tokens`` writes the tokens of whole
updates for analysis outside the run.

Shape legend: T = response tokens of a micro-batch (in a dump: of the update), S = sums, M = maxima,
U = updates of a step, E = decisions of an update, D = entries of a decision,
B = responses of the step's batch, R = those that an update computes.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.algorithm.centering import Head
from bapo_megatron.algorithm.kl import estimate_kl
from bapo_megatron.algorithm.loss import RESPONSE_UNIT
from bapo_megatron.algorithm.objective import Objective, TokenBatch
from bapo_megatron.data.token_columns import DEMONSTRATION, REFERENCE, TEACHER
from bapo_megatron.ops.logprob import LOG_RATIO_LIMIT, TokenLogprobs
from bapo_megatron.runtime.distributed import (
    ProcessGroups,
    broadcast_from_last_stage,
    fail_together,
    reduce_over,
)
from bapo_megatron.telemetry.metrics import by_name, means_by_name
from bapo_megatron.types import MicroBatch, RolloutBatch, UpdateResult

if TYPE_CHECKING:
    from bapo_megatron.trainer.loss import MicroBatchLoss

Value = Callable[["TokenView"], Tensor]


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What one micro-batch reports beside its loss; all of it on the device, without gradient."""

    sums: Tensor
    """[S] float64: ``Numbers.sum_names``."""
    maxima: Tensor
    """[M] float64: ``Numbers.max_names``."""
    decision: Tensor
    """[D] float64: the objective's decision; empty if it needs none."""
    policy: TokenLogprobs
    """[T] ℓ and H; for dumps, and to explain a failure."""
    log_weight_B: Tensor
    """[B] int64: Σ (ℓ − μ) over each response (``algorithm.loss.sum_over_responses``)."""
    statistics: Tensor | None = None
    """[K] int64: the objective's, if the loss pass was asked for them."""


Tokens = Sequence[tuple[MicroBatch, TokenReport]]
"""This rank's tokens of an update, for a dump."""


class TokenView:
    """The tokens of a micro-batch after their loss; [T] each, on the device, without a graph."""

    def __init__(self, loss: "MicroBatchLoss", tokens: TokenBatch, policy: TokenLogprobs) -> None:
        """Take the tokens as the objective saw them, at least one, and their ℓ and H."""
        safe, correction = loss.safe, loss.safe.config.correction
        micro_batch, context = safe.micro_batch, safe.context
        kept_T, is_negative_T = tokens.mask > 0, tokens.advantage < 0
        held_T = tokens.ratio
        if (limits := loss.objective.bounds(tokens)) is not None:
            low, high = limits
            held_T = torch.where(is_negative_T, held_T.clamp(min=low), held_T.clamp(max=high))
        version = -1 if context.rollout_version is None else context.rollout_version
        mismatch_T = (policy.logprob_T - micro_batch.rollout_logprob_T).abs_()
        self.tokens: TokenBatch = tokens
        """As the objective saw them."""
        self.trains_T: Tensor = safe.trains_T
        """bool: m = 1."""
        self.finite_T: Tensor = kept_T if micro_batch.selected_T is None else safe.finite(*policy)
        """bool: m = 1 and every value is finite."""
        self.counts_T: Tensor = kept_T & (loss.weight_T != 0)
        """bool: those of them to which objective and correction give a loss."""
        self.loss_T: Tensor = loss.loss_T
        """Loss, without its weight."""
        self.weight_T: Tensor = loss.weight_T
        """Weight of the loss: that of the aggregation, times the correction."""
        self.derivative_T: Tensor = loss.derivative_T
        """∂(weight · loss)/∂ℓ."""
        self.finite_loss_T: Tensor = loss.finite_T
        """bool: the loss and its derivatives with respect to ℓ and H are finite."""
        self.contribution_T: Tensor = tokens.advantage.abs() * held_T
        """|A| · min(r, c_high) where A > 0, |A| · max(r, c_low) where A < 0 (Eq. 8)."""
        self.age_T: Tensor = (context.num_updates - micro_batch.version_T).float()
        """Optimizer updates since the weights that sampled the token."""
        self.same_weights_T: Tensor = (micro_batch.version_T == version) & safe.trains_T
        """bool: m = 1, and sampled by the weights that the policy still has."""
        self.mismatch_T: Tensor = torch.where(self.same_weights_T, mismatch_T, 0.0)
        """|trainer's log-prob − engine's| where ``same_weights_T``, else 0."""
        self.positive_T: Tensor = (tokens.advantage > 0) & self.counts_T
        """bool: A > 0, with a loss."""
        self.negative_T: Tensor = is_negative_T & self.counts_T
        """bool: A < 0, with a loss."""
        self.correction_T: Tensor | None = safe.correction_T
        """The correction's factor on the loss; None without one."""
        self.importance_T: Tensor = micro_batch.importance_T
        """π_recomputed / π_rollout of the token or its response, which the correction limits."""
        self.cap: float = correction.cap if correction.kind in ("token", "sequence") else math.inf
        """Limit of the correction; infinite if it has none."""
        self.kl_teacher_T: Tensor | None = loss.kl_T
        """KL between teacher and policy, with a loss over the vocabulary."""
        self.imitated: Tensor = loss.imitated
        """float64, 0-d: loss of demonstrations."""
        self.head: Head | None = loss.head_T
        """What centering knows of each token."""


def _kl_behaviour(view: TokenView) -> Tensor:
    """Return k3, r − 1 − log r; computed in float64, since its terms cancel."""
    difference_T = (view.tokens.logprob - view.tokens.behaviour_logprob).double()
    log_ratio_T = difference_T.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio_T).sub_(log_ratio_T).float()


def _kl_teacher(view: TokenView) -> Tensor:
    """Return the divergence over the vocabulary, or else the k1 estimate μ − ℓ_teacher.

    Not k3: far from the teacher, a few tokens dominate its mean.
    """
    if view.kl_teacher_T is not None:
        return view.kl_teacher_T
    return view.tokens.behaviour_logprob - view.tokens.columns[TEACHER]


def _head(view: TokenView) -> Head:
    assert view.head is not None, "only measured with centering"
    return view.head


def _correction(view: TokenView) -> Tensor:
    assert view.correction_T is not None, "only measured with a correction"
    return view.correction_T


COUNTS: dict[str, Value] = {
    "tokens": lambda v: v.trains_T,
    "positive_tokens": lambda v: v.positive_T,
    "negative_tokens": lambda v: v.negative_T,
    "positive_clipped": lambda v: v.positive_T & (v.derivative_T == 0),
    "negative_clipped": lambda v: v.negative_T & (v.derivative_T == 0),
    "negative_doubled": lambda v: v.negative_T & (v.tokens.ratio > 2),
    "mismatch_tokens": lambda v: v.same_weights_T,
    "nonfinite_tokens": lambda v: ~v.finite_T,
    "nonfinite_losses": lambda v: ~v.finite_loss_T,
    "corrected_tokens": lambda v: v.trains_T,
    "correction_capped": lambda v: v.importance_T > v.cap,
    "correction_masked": lambda v: _correction(v) == 0,
    "centering_limited": lambda v: _head(v).is_limited_T,
}
"""Conditions, bool [T], by name; counted over the tokens with m = 1. Here and in ``SUMS``, names
with a prefix of ``PREFIXES`` need that feature."""

SUMS: dict[str, Value] = {
    "policy_loss": lambda v: torch.where(v.counts_T, v.weight_T * v.loss_T, 0.0),
    "positive_contribution": lambda v: v.contribution_T * v.positive_T,
    "negative_contribution": lambda v: v.contribution_T * v.negative_T,
    "entropy": lambda v: v.tokens.entropy,
    "kl_behaviour": _kl_behaviour,
    "staleness": lambda v: v.age_T,
    "mismatch_abs": lambda v: v.mismatch_T,
    "correction_weight": _correction,
    "reference_kl": lambda v: (
        estimate_kl("k3", v.tokens.logprob, v.tokens.columns[REFERENCE]).value_T
    ),
    "teacher_kl": _kl_teacher,
    "centering_policy_mass": lambda v: _head(v).policy_mass_T,
    "centering_sampler_mass": lambda v: _head(v).sampler_mass_T,
    "centering_removed": lambda v: (
        (v.weight_T * v.tokens.advantage).abs() * _head(v).coefficient_TK[:, 0]
    ),
    "centering_whole": lambda v: v.derivative_T.abs(),
}
"""Values, float32 [T], by name; summed over the tokens with m = 1."""

MAXIMA: dict[str, tuple[Value, str]] = {
    "rollout/staleness_max": (lambda v: v.age_T, "tokens"),
    "mismatch/logprob_abs_max": (lambda v: v.mismatch_T, "mismatch_tokens"),
    "correction/weight_max": (lambda v: v.importance_T, "corrected_tokens"),
}
"""Metric → values [T] ≥ 0, whose largest among tokens with m = 1 is reported; and the sum that
counts them: if it is 0, nothing is reported."""

QUOTIENTS: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "policy/entropy": ("entropy", "tokens"),
    "policy/kl_behaviour": ("kl_behaviour", "tokens"),
    "kl/reference": ("reference_kl", "tokens"),
    "kl/teacher": ("teacher_kl", "tokens"),
    "rollout/staleness_mean": ("staleness", "tokens"),
    "rollout/masked_token_share": ("masked_tokens", "response_tokens"),
    "rollout/positive_response_tokens_mean": ("positive_length", "positive_responses"),
    "rollout/negative_response_tokens_mean": ("negative_length", "negative_responses"),
    "tokens/positive_share": ("positive_tokens", ("positive_tokens", "negative_tokens")),
    "loss/positive_share": (
        "positive_contribution",
        ("positive_contribution", "negative_contribution"),
    ),
    "clip/fraction_positive": ("positive_clipped", "positive_tokens"),
    "clip/fraction_negative": ("negative_clipped", "negative_tokens"),
    "policy/negative_doubled_share": ("negative_doubled", "negative_tokens"),
    "policy/effective_sample_share": ("effective_samples", "weighted_responses"),
    "mismatch/logprob_abs_mean": ("mismatch_abs", "mismatch_tokens"),
    "correction/weight_mean": ("correction_weight", "corrected_tokens"),
    "correction/capped_share": ("correction_capped", "corrected_tokens"),
    "correction/masked_share": ("correction_masked", "corrected_tokens"),
    "centering/policy_mass_mean": ("centering_policy_mass", "tokens"),
    "centering/sampler_mass_mean": ("centering_sampler_mass", "tokens"),
    "centering/removed_ratio": ("centering_removed", "centering_whole"),
    "centering/limited_share": ("centering_limited", "tokens"),
    "train/computed_token_share": ("computed_tokens", "unmasked_tokens"),
    "router/entropy": ("router_entropy", "router_tokens"),
    "router/load_mean": ("router_load", "router_layers"),
    "router/load_max": ("router_load_max", "router_steps"),
    "router/replayed_share": ("router_replayed", "router_tokens"),
    "router/agreement_share": ("router_matches", "router_compared"),
    "train/packing_share": ("packing_real", "packing_slots"),
    "train/imbalance_ratio": ("flops_max", "flops_mean"),
    "train/prediction_hit_share": ("hits", "predictions"),
    "train/prediction_used_share": ("relied", "predictions"),
}
"""Metric → a sum and its divisor; not reported if that is 0."""

TOTALS = {
    "train/trained_tokens": "tokens",
    "train/forward_only_flops": "forward_only_flops",
    "train/forward_backward_flops": "forward_backward_flops",
    "train/nonfinite_tokens": "nonfinite_tokens",
    "mismatch/tokens": "mismatch_tokens",
    "loss/positive_sum": "positive_contribution",
    "loss/negative_sum": "negative_contribution",
}
"""Metric → the sum that it reports, 0 without updates."""

PREFIXES = ("correct", "reference", "teacher", "centering")
"""Prefixes of names that need ``algorithm.correction``, ``kl``, ``distillation`` or ``centering``,
in order."""
_REPORT = "report: "
"""Prefix of the sums that the objective reports; they are divided by ``tokens``."""


class Numbers:
    """Which sums and maxima a run has, in order."""

    def __init__(self, report_names: Sequence[str], features: Set[str]) -> None:
        """Choose them by what the objective reports and which of ``PREFIXES`` the run uses.

        Raises:
            ValueError: The objective reports a metric of this module.
        """
        clashes = set(report_names) & (QUOTIENTS.keys() | TOTALS.keys() | MAXIMA.keys())
        if clashes:
            raise ValueError(
                f"algorithm.objective: reports '{min(clashes)}', a metric of the trainer; choose "
                "another name"
            )

        absent = tuple(prefix for prefix in PREFIXES if prefix not in features)

        def measured(values: dict[str, Value]) -> dict[str, Value]:
            return {n: v for n, v in values.items() if not n.startswith(absent)}

        self._counts, self._sums = measured(COUNTS), measured(SUMS)
        self._maxima = {m: v for m, (v, count) in MAXIMA.items() if count in self._counts}
        self._report_names = tuple(report_names)
        reports = (f"{_REPORT}{name}" for name in report_names)
        imitated = ("demonstration_loss",) if "demonstration" in features else ()
        self.sum_names = (*self._counts, *self._sums, *reports, *imitated)
        """[S]."""
        self.max_names = tuple(self._maxima)
        """[M]."""
        first = self.sum_names.index("nonfinite_tokens")
        self.faults = slice(first, self.sum_names.index("nonfinite_losses") + 1)
        """The two adjacent sums that must be 0 before an optimizer step."""
        assert self.faults.stop - self.faults.start == 2, "both are read as one slice"

    def zeros(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sums [S] and maxima [M] over no tokens."""
        sizes = len(self.sum_names), len(self.max_names)
        sums, maxima = (torch.zeros(n, dtype=torch.float64, device=device) for n in sizes)
        return sums, maxima

    def add(self, reports: Sequence[TokenReport], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sums [S] and maxima [M] of all reports; there may be none."""
        if not reports:
            return self.zeros(device)
        sums = torch.stack([report.sums for report in reports]).sum(dim=0)
        return sums, torch.stack([report.maxima for report in reports]).amax(dim=0)

    def measure(self, view: TokenView, report: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sums [S] and maxima [M] over at least one token, float64 on the device."""
        # One operation for all values of a kind: the cost is kernel launches.
        counts = _stack([value(view) for value in self._counts.values()]) & view.trains_T
        sums = _stack([value(view) for value in self._sums.values()])
        maxima = _stack([value(view) for value in self._maxima.values()])
        parts = [
            counts.sum(dim=1, dtype=torch.float64),
            torch.where(view.trains_T, sums, 0.0).sum(dim=1, dtype=torch.float64),
        ]
        if self._report_names:
            reported = _stack([report[name] for name in self._report_names])
            counted = torch.where(view.counts_T, reported, 0.0)
            parts.append(counted.sum(dim=1, dtype=torch.float64))
        if "demonstration_loss" in self.sum_names:
            parts.append(view.imitated[None])
        return torch.cat(parts), torch.where(view.trains_T, maxima, 0.0).amax(dim=1).double()


def _stack(values: list[Tensor]) -> Tensor:
    """Return values [T] as rows: bool if all of them are, else float32."""
    if any(value_T.dtype != torch.bool for value_T in values):
        values = [value_T.float() for value_T in values]
    return torch.stack(values)


@dataclass(frozen=True, slots=True)
class MeasuredUpdate:
    """An update until the end of its step: this rank's tensors, zeros before the last stage."""

    counts: dict[str, float]
    """Sums known to the host."""
    sums: Tensor
    """[S] float64."""
    maxima: Tensor
    """[M] float64."""
    decisions: Tensor
    """[E, D] float64, equal on the ranks of the last stage."""
    log_weight_B: Tensor
    """[B] int64: Σ (ℓ − μ) over each response (``algorithm.loss.sum_over_responses``)."""
    grad_norm: float
    computed: Sequence[int]
    """Indices of the responses that were computed, over all ranks."""


def read_measurements(
    updates: Sequence[MeasuredUpdate | UpdateResult],
    numbers: Numbers,
    objective: Objective,
    groups: ProcessGroups,
) -> list[UpdateResult]:
    """Reduce the updates of a step over data-parallel ranks and copy them to the host at once.

    Those that were skipped are results already. A collective unless all of them were: three
    all-reduces on the last stage, one broadcast.
    """
    applied = [update for update in updates if isinstance(update, MeasuredUpdate)]
    values = iter(_reduced(applied, groups) if applied else ())

    def named(names: Sequence[str]) -> dict[str, float]:
        return dict(zip(names, values, strict=False))

    results = []
    for update in updates:
        if isinstance(update, MeasuredUpdate):
            sums, maxima = named(numbers.sum_names), named(numbers.max_names)
            sums |= named(["effective_samples"])
            sums["weighted_responses"] = float(len(update.computed))
            num_decisions, size = update.decisions.shape
            decisions = [list(islice(values, size)) for _ in range(num_decisions)]
            update = UpdateResult(
                sums | update.counts,
                maxima,
                tuple(dict(objective.report_decision(decision)) for decision in decisions),
                grad_norm=update.grad_norm,
                skipped=False,
            )
        results.append(update)
    return results


def _reduced(updates: Sequence[MeasuredUpdate], groups: ProcessGroups) -> list[float]:
    sums_US = torch.stack([update.sums for update in updates])
    maxima_UM = torch.stack([update.maxima for update in updates])
    log_weight_UB = torch.stack([update.log_weight_B for update in updates])
    if groups.is_last_stage:
        reduce_over(groups.data, sums_US)
        reduce_over(groups.data, maxima_UM, dist.ReduceOp.MAX)
        reduce_over(groups.data, log_weight_UB)
    decisions = (update.decisions.flatten() for update in updates)
    effective = (
        effective_samples(log_weight_B.double()[list(update.computed)] * RESPONSE_UNIT)[None]
        for log_weight_B, update in zip(log_weight_UB, updates, strict=True)
    )
    parts = zip(sums_US, maxima_UM, effective, decisions, strict=True)
    packed = torch.cat(list(chain.from_iterable(parts)))
    broadcast_from_last_stage(packed, groups)
    values: list[float] = packed.tolist()
    return values


def effective_samples(log_weight_R: Tensor) -> Tensor:
    """Return (Σ w)² / Σ w² of an update's responses, 0-d: Kish's effective sample size.

    Args:
        log_weight_R: [R] log w, of π / π_behaviour over the whole response (arXiv 2602.17616).
    """
    if not len(log_weight_R):
        return log_weight_R.new_zeros(())
    weight_R = (log_weight_R - log_weight_R.max()).exp()
    return weight_R.sum().square() / weight_R.square().sum()


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Return the metrics of a step's updates, which are reduced over all ranks."""
    stepped = [result for result in results if not result.skipped]
    sums = {n: reduce(add, v) for n, v in by_name(result.sums for result in results).items()}
    maxima = {n: max(v) for n, v in by_name(result.maxima for result in results).items()}
    values = {
        "train/updates": float(len(stepped)),
        "train/skipped_updates": float(len(results) - len(stepped)),
    }
    values |= {metric: sums.get(name, 0.0) for metric, name in TOTALS.items()}
    if stepped:
        values["loss/policy"] = sums["policy_loss"] / len(stepped)
        if "demonstration_loss" in sums:
            values["loss/demonstrations"] = sums["demonstration_loss"] / len(stepped)
        values["policy/grad_norm"] = math.fsum(r.grad_norm for r in stepped) / len(stepped)
        values["policy/grad_norm_max"] = max(result.grad_norm for result in stepped)
    reported = [name for name in sums if name.startswith(_REPORT)]
    reports = {name.removeprefix(_REPORT): (name, "tokens") for name in reported}
    for metric, (numerator, divisors) in (QUOTIENTS | reports).items():
        names = (divisors,) if isinstance(divisors, str) else divisors
        divisor = math.fsum(sums.get(name, 0.0) for name in names)
        if divisor > 0 and numerator in sums:
            values[metric] = sums[numerator] / divisor
    values |= {m: maxima[m] for m, (_, count) in MAXIMA.items() if sums.get(count, 0.0) > 0}
    return values | means_by_name(decision for result in results for decision in result.decisions)


@dataclass(frozen=True, slots=True)
class TokenDump:
    """Writes the tokens of updates, those of all ranks in one file (``data.token_dump``)."""

    run_dir: Path
    every_steps: int
    """0: no step is due."""

    def write_if_due(
        self, tokens: Tokens, batch: RolloutBatch, update: int, groups: ProcessGroups
    ) -> None:
        """Write an update's tokens in every N-th step; a collective of all ranks.

        The first rank of the last stage writes: with a pipeline over several nodes, ``run_dir``
        must be on a shared file system.

        Raises:
            OSError: The file cannot be written; on all ranks.
        """
        if self.every_steps == 0 or batch.step % self.every_steps:
            return
        from bapo_megatron.data.token_dump import token_dump_path, write_token_dump  # pyarrow

        path = token_dump_path(self.run_dir, batch.step, update)
        with fail_together(groups):
            if not groups.is_last_stage:
                return
            tokens = [pair for pair in tokens if DEMONSTRATION not in pair[0].columns]
            parts = [_columns(micro_batch, report) for micro_batch, report in tokens]
            gathered: list[Any] = [None] * dist.get_world_size(groups.data)
            dist.all_gather_object(gathered, parts, group=groups.data)
            if dist.get_rank(groups.data) > 0 or dist.get_rank(groups.tensor) > 0:
                return
            if not tokens:
                path.unlink(missing_ok=True)  # of the same step before a resume
                return
            parts = list(chain.from_iterable(gathered))
            whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            order_T = np.lexsort((whole["position"], whole["sample"]))  # as in the batch
            whole = {name: value_T[order_T] for name, value_T in whole.items()}
            names = np.array([(sample.group_id, sample.index) for sample in batch.samples])
            whole["group_id"], whole["index"] = names[whole["sample"]].T
            write_token_dump(path, whole)


def _columns(micro_batch: MicroBatch, report: TokenReport) -> dict[str, np.ndarray]:
    columns = {
        "sample": micro_batch.sample_T,
        "position": micro_batch.position_T,
        "logprob": report.policy.logprob_T,
        "behaviour_logprob": micro_batch.behaviour_logprob_T,
        "advantage": micro_batch.advantage_T,
        "entropy": report.policy.entropy_T,
        "mask": micro_batch.mask_T,
    }
    return {name: value_T.cpu().numpy() for name, value_T in columns.items()}
