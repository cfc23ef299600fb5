"""The line that says who stands still; ``tests/trainer/test_stub_runs.py`` has a rank stop."""

from __future__ import annotations

from bapo_megatron.telemetry.hang import Told, describe_ranks


def test_ranks_that_do_the_same_are_named_together_and_those_that_stopped_first_come_first() -> (
    None
):
    passes, pushes = "training, forward only of update 3", "weight_sync"
    before = [
        Told(7, passes, 4, 995.0),
        Told(7, passes, 2, 990.0),
        *[Told(7, passes, 4, 996.0)] * 3,
        Told(7, pushes, 0, 980.0),
        None,
        Told(7, "rollout", 9, 1000.0),
    ]
    now = [
        told and told._replace(number=7 + (rank != 5), beat_at_s=told.beat_at_s + (rank == 7) * 300)
        for rank, told in enumerate(before)
    ]
    assert describe_ranks(before, now, now_s=1300.0, hang_s=300.0) == (
        "rank 5 silent, last in weight_sync; rank 6 never told anything; "
        "rank 1 in training, forward only of update 3 after 2 signs of life for 310 s; "
        "ranks 0, 2-4 in training, forward only of update 3 after 4 signs of life for 305 s; "
        "rank 7 moving in rollout for 0 s"
    )
