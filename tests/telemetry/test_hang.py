"""The line that says who is stuck; ``tests/trainer/test_stub_runs.py`` has a rank stop."""

from bapo_megatron.telemetry.hang import RankReport, describe_ranks


def test_ranks_in_one_state_are_named_together_and_those_that_stopped_first_come_first() -> None:
    passes = "training, forward only of update 3"
    before = [
        RankReport(7, passes, 4, 995.0),
        RankReport(7, passes, 2, 990.0),
        *[RankReport(7, passes, 4, 996.0)] * 3,
        RankReport(7, "weight_sync", 0, 980.0),
        None,
        RankReport(7, "rollout", 9, 1000.0),
    ]
    now = [
        last and last._replace(number=7 + (rank != 5), beat_at_s=last.beat_at_s + (rank == 7) * 300)
        for rank, last in enumerate(before)
    ]
    assert describe_ranks(before, now, now_s=1300.0, hang_s=300.0) == (
        "rank 5 not responding, last in weight_sync; rank 6 never reported; "
        "rank 1 stuck in training, forward only of update 3 for 310 s after 2 heartbeats; "
        "ranks 0, 2-4 stuck in training, forward only of update 3 for 305 s after 4 heartbeats; "
        "rank 7 progressing in rollout"
    )
