"""What the ranks of the trainer do in a weight sync, and when there is none."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.weight_sync.send import SyncReport, sync_metrics
from tests.distributed_launch import run_ranks
from tests.weight_sync.send_ranks import PAUSE_S, push_by_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(
    random_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each of two tensor-parallel ranks found."""
    first, second = run_ranks(push_by_script, 2, random_model, tmp_path_factory.mktemp("run"))
    return first, second


def test_weights_are_handed_over_bucket_by_bucket(ranks: tuple[dict[str, Any], ...]) -> None:
    report, error, calls = ranks[0]["first"]
    assert error == ""
    assert report.version == 0
    assert calls["take"] > 2
    assert calls == {"begin": 1, "take": calls["take"], "finish": 1, "probe": 1, "resume": 1}
    assert report.num_bytes > 100_000
    assert report.pause_s == PAUSE_S
    assert report.push_s > 0


def test_the_pushes_of_a_step_are_added_up() -> None:
    reports = [
        SyncReport(3, num_bytes=100, push_s=2.0, pause_s=0.5, difference=0.01),
        SyncReport(3, num_bytes=100, push_s=1.0, pause_s=0.25, difference=0.03),
    ]
    assert sync_metrics(reports) == {
        "weight_sync/pushes": 2.0,
        "weight_sync/bytes": 200.0,
        "weight_sync/push_s": 3.0,
        "weight_sync/pause_s": 0.75,
        "weight_sync/logprob_difference": 0.03,
    }
    assert sync_metrics([]) == {}


def test_a_version_that_the_servers_have_is_pushed_only_if_asked(
    ranks: tuple[dict[str, Any], ...],
) -> None:
    report, error, calls = ranks[0]["same version"]
    assert (report, error, calls) == (None, "", {})
    report, _, calls = ranks[0]["same version again"]
    assert report.version == 0
    assert calls["begin"] == 1


def test_after_a_failure_the_weights_go_by_disk(ranks: tuple[dict[str, Any], ...]) -> None:
    report, error, calls = ranks[0]["one fails"]
    assert error == ""
    assert report.version == 1
    assert report.num_bytes > ranks[0]["first"][0].num_bytes  # files have headers
    assert calls == {"begin": 1, "take": 3, "load": 1, "probe": 1, "resume": 1}
    assert ranks[0]["loaded"] == ["model.safetensors"]
    assert ranks[0]["weights left"] is False


@pytest.mark.parametrize(
    ("fault", "num_loads", "version"),
    [("no server sees the directory", 1, 2), ("the disk is full", 0, 3)],
)
def test_where_the_disk_fails_too_all_buckets_are_sent_again(
    ranks: tuple[dict[str, Any], ...], fault: str, num_loads: int, version: int
) -> None:
    _, _, complete = ranks[0]["first"]
    report, error, calls = ranks[0][f"one fails, and {fault}"]
    assert error == ranks[1][f"one fails, and {fault}"][1] == ""
    assert report.version == version
    expected = {"begin": 2, "take": complete["take"] + 3, "finish": 1, "probe": 1, "resume": 1}
    assert calls == Counter(expected | {"load": num_loads})


def test_if_no_server_is_left_all_ranks_raise_and_stay_in_step(
    ranks: tuple[dict[str, Any], ...],
) -> None:
    assert ranks[0]["none left"][1] == "no server left"
    assert ranks[1]["none left"][1] == "another rank: no server left"
    # The version was not pushed, so the next sync does it.
    report, error, _ = ranks[0]["after it"]
    assert error == ranks[1]["after it"][1] == ""
    assert report.version == 4
    assert ranks[0]["versions"][:9] == [0, 0, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cannot go on", "it cannot go on"),
        (
            "no shared memory",
            "rank 0 cannot hand over the weights (unable to write to file </torch_1>: No space "
            "left on device (28)); free shared memory (/dev/shm), ports or disk, lower "
            "rollout.weight_sync.bucket_mb, or change rollout.weight_sync.method; then continue "
            "with resume=true",
        ),
    ],
)
def test_what_fails_on_rank_zero_alone_is_raised_on_all_ranks(
    ranks: tuple[dict[str, Any], ...], name: str, message: str
) -> None:
    assert ranks[0][name][:2] == (None, message)
    assert ranks[1][name][:2] == (None, f"another rank: {message}")


def test_other_ranks_report_nothing(ranks: tuple[dict[str, Any], ...]) -> None:
    assert ranks[1]["first"] == (None, "", {})
