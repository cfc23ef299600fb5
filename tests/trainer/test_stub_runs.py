"""What a run does when its source is interrupted, fails, or lacks weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.policy.checkpoint_files import BestCheckpoint
from tests.distributed_launch import run_ranks
from tests.trainer import stub_runs
from tests.trainer.dumps import make_random_model
from tests.trainer.stub_runs import Outcome

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def outcomes(
    mixed_dumps: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """Runs a script of ``stub_runs`` once; returns its outcomes of each rank."""
    thin_model = make_random_model(tmp_path_factory.mktemp("thin"), num_hidden_layers=1)

    @functools.cache
    def run(script: Callable[..., Any], num_ranks: int = 2) -> list[Any]:
        root = tmp_path_factory.mktemp(script.__name__)
        return run_ranks(script, num_ranks, thin_model, mixed_dumps, root)

    return run


@pytest.fixture(scope="module")
def alone(outcomes: Callable[..., list[Any]]) -> dict[str, Outcome]:
    return outcomes(stub_runs.one_rank, 1)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def failed(outcomes: Callable[..., list[Any]]) -> list[dict[str, Outcome]]:
    return outcomes(stub_runs.two_ranks)


@pytest.fixture(scope="module")
def best(outcomes: Callable[..., list[Any]]) -> dict[str, Outcome]:
    return outcomes(stub_runs.best_runs, 1)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def beside(outcomes: Callable[..., list[Any]]) -> dict[str, Outcome]:
    return outcomes(stub_runs.beside_runs)[0]  # type: ignore[no-any-return]


def test_an_interrupt_during_a_rollout_asks_the_source_nothing_before_it_is_closed(
    alone: dict[str, Outcome],
) -> None:
    interrupted = alone["interrupted"]
    assert interrupted.error == "KeyboardInterrupt: "
    assert interrupted.calls[:4] == ["begin", "join", "receive", "probe"]
    # A call would wait for the rollout's end: the collector answers one after the other.
    last = len(interrupted.calls) - 1 - interrupted.calls[::-1].index("collect")
    assert set(interrupted.calls[last + 1 :]) == {"close"}


def test_all_weight_syncs_of_a_step_are_in_its_metrics(alone: dict[str, Outcome]) -> None:
    pushed = [
        {name: value for name, value in row.items() if name.startswith("weight_sync/")}
        for row in alone["weights lost"].rows
    ]
    assert [row["weight_sync/syncs"] for row in pushed] == [1.0, 2.0, 1.0]
    num_bytes = pushed[0]["weight_sync/bytes"]
    assert [row["weight_sync/bytes"] for row in pushed] == [num_bytes, 2 * num_bytes, num_bytes]
    assert [row["weight_sync/pause_s"] for row in pushed] == [0.25, 0.5, 0.25]
    assert all(row["weight_sync/sync_s"] > 0 for row in pushed)


@pytest.mark.parametrize(
    ("when", "steps", "num_samples"), [("at the start", 0, 100), ("after a save", 2, 300)]
)
def test_samples_that_came_since_the_newest_checkpoint_are_saved_when_generation_fails(
    failed: list[dict[str, Outcome]], when: str, steps: int, num_samples: int
) -> None:
    first, second = (rank[when] for rank in failed)
    assert first.error == "RolloutError: no server left"
    assert second.error == "RolloutError: no server left"
    assert first.checkpoint == f"step_{steps}"
    assert first.stacks == second.stacks == ""
    assert first.saved_state == {"num_samples": num_samples}
    assert len(first.rows) == steps


def test_weights_that_cannot_be_written_end_the_run_after_the_step_is_saved(
    failed: list[dict[str, Outcome]],
) -> None:
    first, second = (rank["disk full"] for rank in failed)
    assert first.error.startswith(("NotADirectoryError: ", "FileExistsError: "))
    assert second.error.startswith("OSError: another rank: ")
    assert first.checkpoint == "step_1"
    assert [row["step"] for row in first.rows] == [1]


FORWARD_FLOPS = 14_859_264
"""Over the 16 sequences of step 1, with 433 tokens and a sum of 12,645 of their squares.

A layer of 32·32 + 32·16 + 32·16 + 32·32 + 3·32·48 = 7,680 weights and a head of 267·32 make
2·16,224 operations per token; causal attention of 32 channels makes 2·32 per square.
"""


def test_operations_of_passes_without_and_with_gradients_are_counted_by_themselves(
    failed: list[dict[str, Outcome]],
) -> None:
    searched, recomputed = (failed[0][run].rows[0] for run in ("after a save", "disk full"))
    # A search before each update. Or one pass for the behaviour policy, and two epochs.
    assert searched["train/forward_only_flops"] == FORWARD_FLOPS
    assert searched["train/forward_backward_flops"] == 3 * FORWARD_FLOPS
    assert recomputed["train/forward_only_flops"] == FORWARD_FLOPS
    assert recomputed["train/forward_backward_flops"] == 6 * FORWARD_FLOPS
    assert searched["train/trained_tokens"] == 433 - 16 * 6
    assert recomputed["train/trained_tokens"] == 2 * (433 - 16 * 6)


def test_mfu_is_over_the_time_of_the_slowest_of_all_ranks(failed: list[dict[str, Outcome]]) -> None:
    row = failed[0]["after a save"].rows[0]
    peak = 2 * 1e6
    training_s = row["ranks/training_s_max"]
    assert row["throughput/mfu_share"] == pytest.approx(4 * FORWARD_FLOPS / (peak * training_s))
    assert row["throughput/trained_tokens_per_s"] == pytest.approx(337 / training_s)
    for name in ("rollout_s", "training_s", "weight_sync_s", "host_bytes"):
        low, mean, high = (row[f"ranks/{name}_{how}"] for how in ("min", "mean", "max"))
        assert 0 < low <= mean <= high
        assert mean == pytest.approx((low + high) / 2)
    assert "throughput/mfu_share" not in failed[0]["disk full"].rows[0]


def test_a_hang_is_told_with_the_rank_that_all_wait_for(outcomes: Callable[..., Any]) -> None:
    first, second = outcomes(stub_runs.stand_still)
    # Rank 1 stood until rank 0 had said ``stub_runs.STOPPED``; then the run went on to its end.
    assert (first.error, second.error, len(first.rows)) == ("", "", 2)
    assert "in wait_for\n" in second.stacks
    assert "in train\n" in first.stacks
    assert "in wait_for\n" not in first.stacks
    for collectives in (first.collectives, second.collectives):
        assert {"gloo:all_reduce", "gloo:broadcast"} <= collectives


def test_the_best_checkpoint_is_saved_where_none_is_due_and_stays(best: dict[str, Outcome]) -> None:
    assert best["first"].kept == ["best", "latest", "step_2", "step_4"]
    assert best["first"].best == BestCheckpoint("step_2", "eval/sums/avg_at_k", 0.5)


def test_a_resumed_run_knows_the_best_checkpoint(best: dict[str, Outcome]) -> None:
    assert best["resumed"].kept == ["best", "latest", "step_2", "step_5"]
    assert best["resumed"].best == best["first"].best
    # Also where a kill came before the file; then the sixth step is better.
    assert best["better"].kept == ["best", "latest", "step_2", "step_5", "step_6"]
    assert best["better"].best == BestCheckpoint("step_6", "eval/sums/avg_at_k", 0.75)


def test_going_back_forgets_what_was_better_later(best: dict[str, Outcome]) -> None:
    assert best["again"].checkpoint == "step_6"
    assert best["again"].best == BestCheckpoint("step_6", "eval/sums/avg_at_k", 0.625)
    assert best["again"].kept == ["abandoned_1", "best", "latest", "step_6"]


def test_an_evaluation_beside_the_next_step_ends_before_new_weights_are_pushed(
    beside: dict[str, Outcome],
) -> None:
    calls = [call for call in beside["whole"].calls if call in ("begin", "collect") or " " in call]
    assert calls == [
        *("begin", "collect", "begin", "begin evaluation 1"),
        *("collect", "evaluate 1", "begin", "begin evaluation 2"),
        *("collect", "evaluate 2", "begin", "begin evaluation 3"),
        *("collect", "evaluate 3", "begin", "evaluate 4"),  # that of the last step runs alone
    ]


def test_late_results_are_in_the_row_of_their_step_and_name_the_best_checkpoint(
    beside: dict[str, Outcome],
) -> None:
    whole = beside["whole"]
    assert [row["step"] for row in whole.rows] == [1, 2, 3, 4]
    scores = [row.get("eval/sums/avg_at_k") for row in whole.rows]
    assert scores == [0.25, 0.75, None, 0.375]  # all servers lost the weights of the third step
    assert all("reward/mean" in row for row in whole.rows)
    assert whole.best == BestCheckpoint("step_2", "eval/sums/avg_at_k", 0.75)
    assert whole.kept == ["best", "latest", "step_2", "step_4"]


def test_an_evaluation_that_a_failure_interrupted_is_made_after_the_resume(
    beside: dict[str, Outcome],
) -> None:
    failed, resumed = beside["failed"], beside["resumed"]
    assert failed.error == "RolloutError: no server left"
    assert "evaluate 2" not in failed.calls
    assert [row.get("eval/sums/avg_at_k") for row in failed.rows] == [0.25, None]
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4]
    scores = [row["eval/sums/avg_at_k"] for row in resumed.rows]
    assert scores == [0.25, 0.75, 0.5, 0.375]
    assert resumed.best == BestCheckpoint("step_2", "eval/sums/avg_at_k", 0.75)
