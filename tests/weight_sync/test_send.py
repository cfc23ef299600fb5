"""What the ranks of the trainer do in a weight sync, and when there is none."""

from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.weight_sync.send import SyncReport, sync_metrics
from tests.distributed_launch import run_ranks
from tests.weight_sync.send_ranks import PAUSE_S, sync_by_script

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(
    random_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What became of the weight syncs on each of two tensor-parallel ranks."""
    first, second = run_ranks(sync_by_script, 2, random_model, tmp_path_factory.mktemp("run"))
    return first, second


def test_weights_are_handed_over_bucket_by_bucket(ranks: tuple[dict[str, Any], ...]) -> None:
    report, error, calls = ranks[0]["first"]
    assert error == ""
    assert calls["receive"] > 2
    assert calls == {"begin": 1, "receive": calls["receive"], "probe": 1, "resume": 1}
    assert report.num_bytes > 100_000
    assert report.pause_s == PAUSE_S
    assert report.sync_s > 0
    assert ranks[1]["first"] == (None, "", {})


def test_the_weight_syncs_of_a_step_are_added_up() -> None:
    reports = [
        SyncReport(num_bytes=100, sync_s=2.0, pause_s=0.5, difference=0.01),
        SyncReport(num_bytes=100, sync_s=1.0, pause_s=0.25, difference=0.03),
    ]
    assert sync_metrics(reports) == {
        "weight_sync/syncs": 2.0,
        "weight_sync/bytes": 200.0,
        "weight_sync/sync_s": 3.0,
        "weight_sync/pause_s": 0.75,
        "weight_sync/logprob_difference": 0.03,
    }
    assert sync_metrics([]) == {}


def test_a_version_that_the_servers_have_is_sent_only_if_asked(
    ranks: tuple[dict[str, Any], ...],
) -> None:
    assert ranks[0]["same version"] == (None, "", {})
    assert ranks[0]["same version again"][2]["begin"] == 1
    assert [rank["exports"] for rank in ranks] == [1, 1]  # to disk, sent twice


def test_after_a_failure_all_buckets_are_sent_again(ranks: tuple[dict[str, Any], ...]) -> None:
    _, _, complete = ranks[0]["first"]
    report, error, calls = ranks[0]["one fails"]
    assert error == ranks[1]["one fails"][1] == ""
    assert report.num_bytes == ranks[0]["first"][0].num_bytes
    assert calls == {"begin": 2, "receive": complete["receive"] + 3, "probe": 1, "resume": 1}


def test_if_no_server_is_left_all_ranks_raise_and_stay_in_step(
    ranks: tuple[dict[str, Any], ...],
) -> None:
    assert ranks[0]["none left"][1] == "no server left"
    assert ranks[1]["none left"][1] == "another rank: no server left"
    after_failure = ranks[0]["none left after a failure"][1]
    assert after_failure == "no server left (before: server 1 is gone)"
    # No server has the version, so the next weight sync sends it.
    assert ranks[0]["after it"][1] == ranks[1]["after it"][1] == ""
    assert ranks[0]["versions"][:8] == [0, 0, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cannot go on", "it cannot go on"),
        ("no shared memory", "rank 0 cannot send the weights (unable to write to file <"),
    ],
)
def test_what_fails_on_rank_zero_alone_is_raised_on_all_ranks(
    ranks: tuple[dict[str, Any], ...], name: str, message: str
) -> None:
    for rank, prefix in zip(ranks, ("", "another rank: "), strict=True):
        report, error, _ = rank[name]
        assert report is None
        assert error.startswith(prefix + message)
