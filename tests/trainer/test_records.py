"""What a step reports of its updates: quotients of global sums, by the documented names.

``test_loss.py`` has the sums of tokens.
"""

import math
from dataclasses import replace

import pytest
import torch

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.schema import AlgorithmConfig
from bapo_megatron.telemetry.metrics import batch_metrics
from bapo_megatron.tools.report.figures import PANELS
from bapo_megatron.trainer.records import Numbers, effective_samples, update_metrics
from bapo_megatron.types import UpdateResult
from tests.telemetry.test_metrics import _batch


def _update(
    sums: dict[str, float], *decisions: dict[str, float], grad_norm: float = 1.0, **maxima: float
) -> UpdateResult:
    named = {
        "rollout/staleness_max": maxima.get("oldest", 0.0),
        "mismatch/logprob_abs_max": 0.5,
        "correction/weight_max": maxima.get("heaviest", 0.0),
    }
    return UpdateResult(sums, named, decisions, grad_norm=grad_norm, skipped=False)


def _skipped(sums: dict[str, float]) -> UpdateResult:
    return UpdateResult(sums, skipped=True)


def _sums(tokens: float, loss: float) -> dict[str, float]:
    return {
        "tokens": tokens,
        "response_tokens": tokens + 5,
        "masked_tokens": 5.0,
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
        "mismatch_tokens": 0.0,
        "mismatch_abs": 0.0,
        "corrected_tokens": tokens,
        "correction_weight": tokens / 2,
        "correction_capped": tokens / 4,
        "correction_masked": tokens / 8,
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
        _update(_sums(10, -0.2), grad_norm=1.0, oldest=1.0, heaviest=9.5),
        _update(_sums(30, 0.4), grad_norm=3.0, oldest=3.0, heaviest=2.0),
        _skipped(
            {
                "positive_responses": 0.0,
                "positive_length": 0.0,
                "response_tokens": 10.0,
                "masked_tokens": 10.0,
            }
        ),
    ]
    values = update_metrics(results)
    expected = {
        "clip/fraction_high": 6 / 40,
        "policy/entropy": 2.0,
        "policy/kl_behaviour": 0.5,
        "rollout/staleness_mean": 1.0,
        "rollout/staleness_max": 3.0,
        "rollout/masked_token_share": 20 / 60,  # with those of the skipped update
        "loss/policy": pytest.approx(0.1),
        "loss/positive_share": 0.25,
        "loss/positive_sum": 6.0,
        "loss/negative_sum": 18.0,
        "clip/fraction_positive": 2 / 10,
        "clip/fraction_negative": 4 / 10,
        "policy/negative_doubled_share": 1 / 10,
        "policy/effective_sample_share": 3 / 4,
        "correction/weight_mean": 0.5,
        "correction/weight_max": 9.5,
        "correction/capped_share": 0.25,
        "correction/masked_share": 0.125,
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


SEARCHES = ((0.6, 1.2, 0.5, 0.5, 0, 0, 0, 9), (0.9, 3.0, 0.2, 0.3, 2, 0, 0, 9))
"""``BOUNDS_FIELDS`` of a search that ends at the start, and of one at the end of its path."""
UNSEARCHED = (0.6, 1.2, math.nan, math.nan, 3, 0, 0, 0)
"""Those of tokens of which none has a sign."""


def test_numbers_of_decisions_are_means_over_those_that_searched() -> None:
    objective = load_objective(AlgorithmConfig()).objective
    decisions = [dict(objective.report_decision(search)) for search in (*SEARCHES, UNSEARCHED)]
    values = update_metrics([_update(_sums(1, 0), *decisions)])
    expected = {
        "clip/low": pytest.approx(0.7),
        "clip/high": pytest.approx(1.8),
        "bapo/positive_share_start": 0.35,
        "bapo/positive_share": 0.4,
        "bapo/exit_start_share": 0.5,
        "bapo/exit_met_share": 0.0,
        "bapo/exit_exhausted_share": 0.5,
    }
    assert {name: values[name] for name in expected} == expected


def test_every_curve_of_the_figure_is_a_metric_of_a_step() -> None:
    sums = _sums(8, 0.1)
    sums |= {"router_load": 3.0, "router_layers": 2.0, "router_load_max": 2.0, "router_steps": 1.0}
    sums |= {"router_tokens": 4.0, "router_replayed": 3.0, "router_compared": 6.0}
    sums["router_matches"] = 3.0
    objective = load_objective(AlgorithmConfig()).objective
    updates = update_metrics([_update(sums, dict(objective.report_decision(SEARCHES[0])))])
    batch = _batch()
    batch = replace(batch, stats=replace(batch.stats, environment_errors={"error": 0}))
    values = batch_metrics(batch, {}) | updates
    drawn = {name for panel in PANELS for name in panel.metrics.values()}
    elsewhere = ("engines/", "throughput/", "weight_sync/", "mismatch/", "kl/", "centering/")
    elsewhere += ("lora/", "loss/demonstrations")
    assert {name for name in drawn if not name.startswith(elsewhere)} <= values.keys()
    assert {"rollout/stale_token_share", "rollout/age_max"} <= drawn
    assert values["router/replayed_share"] == 0.75
    assert values["router/agreement_share"] == 0.5
    assert (values["router/load_mean"], values["router/load_max"]) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0, 1.0, 1.0], 3.0), ([1.0, 3.0], 1.6), ([7.0], 1.0), ([1e-300, 1e300, 1e-300], 1.0)],
)
def test_effective_samples_by_hand(weights: list[float], expected: float) -> None:
    log_weight_R = torch.tensor(weights, dtype=torch.float64).log()
    assert float(effective_samples(log_weight_R)) == pytest.approx(expected, rel=1e-12)


def test_a_report_under_the_name_of_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="reports 'policy/entropy', a metric of the trainer"):
        Numbers(["own/one", "policy/entropy"], set())
