"""What a step reports of its updates: quotients of global sums, by the documented names.

Shape legend: T = tokens of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapo_megatron.algorithm.check_objective import trial_tokens
from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.telemetry.metrics import batch_metrics
from bapo_megatron.tools.report.figures import PANELS
from bapo_megatron.trainer.records import Numbers, effective_samples, update_metrics
from bapo_megatron.types import UpdateResult
from tests.telemetry.test_metrics import _batch

CPU = torch.device("cpu")


def _update(
    sums: dict[str, float], *decisions: dict[str, float], grad_norm: float = 1.0
) -> UpdateResult:
    maxima = {"rollout/staleness_max": sums.get("oldest", 0.0), "mismatch/logprob_abs_max": 0.5}
    return UpdateResult(sums, maxima, decisions, grad_norm=grad_norm, skipped=False)


def _skipped(sums: dict[str, float]) -> UpdateResult:
    return UpdateResult(sums, skipped=True)


def _sums(tokens: float, loss: float, oldest: float) -> dict[str, float]:
    return {
        "tokens": tokens,
        "positive_tokens": tokens / 4,
        "negative_tokens": tokens / 4,
        "policy_loss": loss,
        "positive_contribution": 3.0,
        "negative_contribution": 9.0,
        "positive_clipped": 1.0,
        "negative_clipped": 2.0,
        "negative_doubled": tokens / 40,
        "effective_samples": 1.5,
        "weighted_responses": tokens / 10,
        "entropy": 2 * tokens,
        "kl_behaviour": 0.5 * tokens,
        "report: clip/fraction_high": 3.0,
        "report: clip/fraction_low": 0.0,
        "report: clip/fraction_dual": 0.0,
        "staleness": tokens,
        "oldest": oldest,
        "mismatch_tokens": 0.0,
        "mismatch_abs": 0.0,
        "nonfinite_tokens": 0.0,
        "nonfinite_losses": 0.0,
        "packing_real": 6.0,
        "packing_slots": 8.0,
        "flops_mean": 4.0,
        "flops_max": 5.0,
        "positive_responses": 2.0,
        "positive_length": 10.0,
        "negative_responses": 1.0,
        "negative_length": 8.0,
    }


def test_numbers_are_quotients_of_sums_over_all_updates() -> None:
    results = [
        _update(_sums(10, -0.2, 1), grad_norm=1.0),
        _update(_sums(30, 0.4, 3), grad_norm=3.0),
        _skipped({"positive_responses": 0.0, "positive_length": 0.0}),
    ]
    values = update_metrics(results)
    expected = {
        "clip/fraction_high": 6 / 40,
        "policy/entropy": 2.0,
        "policy/kl_behaviour": 0.5,
        "rollout/staleness_mean": 1.0,
        "rollout/staleness_max": 3.0,
        "loss/policy": pytest.approx(0.1),
        "loss/positive_share": 0.25,
        "loss/positive_sum": 6.0,
        "loss/negative_sum": 18.0,
        "clip/fraction_positive": 2 / 10,
        "clip/fraction_negative": 4 / 10,
        "policy/negative_doubled_share": 1 / 10,
        "policy/effective_sample_share": 3 / 4,
        "rollout/positive_response_tokens_mean": 5.0,
        "rollout/negative_response_tokens_mean": 8.0,
        "policy/grad_norm": 2.0,
        "policy/grad_norm_max": 3.0,
        "train/updates": 2.0,
        "train/skipped_updates": 1.0,
        "train/trained_tokens": 40.0,
        "tokens/positive_share": 0.5,
        "train/packing_share": 0.75,
        "train/imbalance_ratio": 1.25,
        "mismatch/tokens": 0.0,
    }
    assert {name: values[name] for name in expected} == expected
    assert not {"mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"} & values.keys()


def test_masked_tokens_are_counted_in_skipped_updates_too() -> None:
    trained = {**_sums(6, 0.0, 0), "response_tokens": 10.0, "masked_tokens": 4.0}
    skipped = {"response_tokens": 6.0, "masked_tokens": 6.0}
    values = update_metrics([_update(trained), _skipped(skipped)])
    assert values["rollout/masked_token_share"] == 10 / 16


def test_a_step_without_an_update_reports_counts_alone() -> None:
    values = update_metrics([_skipped({"response_tokens": 6.0, "masked_tokens": 6.0})])
    assert values == {
        "train/updates": 0.0,
        "train/skipped_updates": 1.0,
        "train/trained_tokens": 0.0,
        "train/forward_only_flops": 0.0,
        "train/forward_backward_flops": 0.0,
        "train/nonfinite_tokens": 0.0,
        "mismatch/tokens": 0.0,
        "loss/positive_sum": 0.0,
        "loss/negative_sum": 0.0,
        "rollout/masked_token_share": 1.0,
    }


def test_corrections_are_reported_where_there_are_any() -> None:
    corrected = {
        "corrected_tokens": 8.0,
        "correction_weight": 6.0,
        "correction_capped": 2.0,
        "correction_masked": 1.0,
    }
    result = _update(_sums(8, 0.0, 0) | corrected)
    result = replace(result, maxima=result.maxima | {"correction/weight_max": 9.5})
    weighed, plain = (
        {name: value for name, value in update_metrics([r]).items() if "correction/" in name}
        for r in (result, _update(_sums(8, 0.0, 0)))
    )
    assert weighed == {
        "correction/weight_mean": 0.75,
        "correction/weight_max": 9.5,
        "correction/capped_share": 0.25,
        "correction/masked_share": 0.125,
    }
    assert plain == {}


SEARCHES = ((0.6, 1.2, 0.5, 0.5, 0, 0, 0, 9), (0.9, 3.0, 0.2, 0.3, 2, 0, 0, 9))
"""``BOUNDS_FIELDS`` of a search that ends at the start, and of one at the end of its path."""


def test_numbers_of_decisions_are_means_over_them() -> None:
    objective = load_objective(AlgorithmConfig()).objective
    decisions = [dict(objective.report_decision(search)) for search in SEARCHES]
    values = update_metrics([_update(_sums(1, 0, 0), *decisions)])
    expected = {
        "clip/low": 0.75,
        "clip/high": 2.1,
        "bapo/positive_share_start": 0.35,
        "bapo/positive_share": 0.4,
        "bapo/exit_start_share": 0.5,
        "bapo/exit_met_share": 0.0,
        "bapo/exit_exhausted_share": 0.5,
    }
    assert {name: values[name] for name in expected} == expected


def test_a_search_without_a_signed_token_reports_bounds_alone() -> None:
    objective = load_objective(AlgorithmConfig()).objective
    unsearched = (0.6, 1.2, math.nan, math.nan, 3, 0, 0, 0)
    assert objective.report_decision(unsearched) == {"clip/low": 0.6, "clip/high": 1.2}


def test_every_curve_of_the_figure_is_a_metric_of_a_step() -> None:
    sums = {**_sums(8, 0.1, 2), "response_tokens": 9.0, "masked_tokens": 1.0}
    sums |= {"router_load": 3.0, "router_layers": 2.0, "router_load_max": 2.0, "router_steps": 1.0}
    sums |= {"router_tokens": 4.0, "router_replayed": 3.0, "router_compared": 6.0}
    sums["router_matches"] = 3.0
    objective = load_objective(AlgorithmConfig()).objective
    updates = update_metrics([_update(sums, dict(objective.report_decision(SEARCHES[0])))])
    batch = _batch()
    batch = replace(batch, stats=replace(batch.stats, environment_errors={"error": 0}))
    values = batch_metrics(batch, {}) | updates
    drawn = {name for panel in PANELS for name in panel.metrics.values()}
    elsewhere = ("engines/", "throughput/", "weight_sync/", "mismatch/", "kl/")
    assert {name for name in drawn if not name.startswith(elsewhere)} <= values.keys()
    assert {"rollout/stale_token_share", "rollout/age_max"} <= drawn
    assert values["router/replayed_share"] == 0.75
    assert values["router/agreement_share"] == 0.5
    assert (values["router/load_mean"], values["router/load_max"]) == (1.5, 2.0)


def _view(**changes: object) -> Any:
    """Six tokens; the last two do not count: one does not train, one is not finite."""
    tokens = trial_tokens(CPU).select(slice(0, 6))
    tokens = replace(
        tokens,
        advantage=torch.tensor([1.0, 2.0, -1.0, -3.0, 0.0, 0.0]),
        logprob=torch.tensor([-1.0, -2.0, -1.0, -1.0, -1.0, -1.0]),
        behaviour_logprob=torch.tensor([-1.0, -2.5, -1.0, -1.0, -1.0, -1.0]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0]),
        ratio=torch.tensor([3.0, 1.6, 2.0, 2.1, 9.0, 9.0]),
        mask=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
    )
    counts_T = torch.tensor([True, True, True, True, False, False])
    trains_T = torch.tensor([True, True, True, True, False, True])
    values = {
        "tokens": tokens,
        "trains_T": trains_T,
        "finite_T": counts_T,
        "counts_T": counts_T,
        "loss_T": torch.tensor([-1.0, -2.5, 1.0, 3.0, 0.0, 0.0]),
        "weight_T": torch.full((6,), 0.25),
        "derivative_T": torch.tensor([-0.25, 0.0, 0.25, 0.0, 0.0, 0.0]),
        "finite_loss_T": torch.ones(6, dtype=torch.bool),
        "contribution_T": torch.tensor([1.0, 2.5, 1.0, 3.0, 7.0, 7.0]),
        "age_T": torch.tensor([0.0, 3.0, 1.0, 2.0, 90.0, 2.0]),
        "positive_T": torch.tensor([True, True, False, False, False, False]),
        "negative_T": torch.tensor([False, False, True, True, False, False]),
        "mismatch_T": torch.tensor([0.5, 0.0, 0.25, 0.0, 0.0, 0.0]),
        "same_weights_T": torch.tensor([True, False, True, False, False, False]),
        "correction_T": torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 1.0]),
        "importance_T": torch.tensor([1.0, 3.0, 9.0, 0.5, 1.0, 1.0]),
        "cap": 4.0,
    }
    return SimpleNamespace(**{**values, **changes})


def test_sums_and_maxima_of_tokens_by_hand() -> None:
    numbers = Numbers(["own/third"], {"correct"})
    report = {"own/third": torch.tensor([True, False, False, True, True, True])}
    sums, maxima = numbers.measure(_view(), report)
    named = dict(zip(numbers.sum_names, sums.tolist(), strict=True))
    assert named.pop("kl_behaviour") == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)
    assert named == {
        "tokens": 5.0,
        "positive_tokens": 2.0,
        "negative_tokens": 2.0,
        "policy_loss": 0.125,
        "positive_contribution": 3.5,
        "negative_contribution": 4.0,
        "positive_clipped": 1.0,
        "negative_clipped": 1.0,
        "negative_doubled": 1.0,
        "entropy": 10.0,
        "staleness": 8.0,
        "mismatch_tokens": 2.0,
        "mismatch_abs": 0.75,
        "nonfinite_tokens": 1.0,
        "nonfinite_losses": 0.0,
        "corrected_tokens": 5.0,
        "correction_weight": 4.5,
        "correction_capped": 1.0,
        "correction_masked": 1.0,
        "report: own/third": 2.0,
    }
    assert dict(zip(numbers.max_names, maxima.tolist(), strict=True)) == {
        "rollout/staleness_max": 3.0,
        "mismatch/logprob_abs_max": 0.5,
        "correction/weight_max": 9.0,
    }


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0, 1.0, 1.0], 3.0), ([1.0, 3.0], 1.6), ([7.0], 1.0), ([1e-300, 1e300, 1e-300], 1.0)],
)
def test_effective_samples_by_hand(weights: list[float], expected: float) -> None:
    log_weight_R = torch.tensor(weights, dtype=torch.float64).log()
    assert float(effective_samples(log_weight_R)) == pytest.approx(expected, rel=1e-12)


def test_a_loss_that_is_not_finite_is_counted() -> None:
    numbers = Numbers([], set())
    finite_T = torch.tensor([False, True, False, True, False, True])
    sums, _ = numbers.measure(_view(finite_loss_T=finite_T), {})
    assert sums[numbers.sum_names.index("nonfinite_losses")] == 2.0


def test_what_lies_under_mask_zero_never_counts() -> None:
    numbers = Numbers(["own/number"], set())
    broken_T = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan, 6.0])
    view = _view(age_T=broken_T, tokens=replace(_view().tokens, entropy=broken_T))
    sums, maxima = numbers.measure(view, {"own/number": broken_T})
    named = dict(zip(numbers.sum_names, sums.tolist(), strict=True))
    assert (named["staleness"], named["entropy"]) == (16.0, 16.0)
    assert named["report: own/number"] == 10.0
    assert maxima[numbers.max_names.index("rollout/staleness_max")] == 6.0


def test_reports_are_found_by_name() -> None:
    numbers = Numbers(["own/one", "own/two"], set())
    one_T, two_T = torch.ones(6), 2 * torch.ones(6)
    sums, _ = numbers.measure(_view(), {"own/two": two_T, "own/one": one_T})
    assert sums[-2:].tolist() == [4.0, 8.0]


def test_a_report_under_the_name_of_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="reports 'policy/entropy', a metric of the trainer"):
        Numbers(["own/one", "policy/entropy"], set())
