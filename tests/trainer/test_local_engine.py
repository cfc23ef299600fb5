"""A whole run on the local engine in rounds, with tensor-parallel ranks."""

from pathlib import Path

import pytest

from bapo_megatron.data.dump import read_batch
from tests.trainer.chaos import steps
from tests.trainer.runs import train, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_rounds_divide_responses_over_steps_and_every_part_is_of_its_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        model_dir,
        rollout={"engine": "local", "partial_tokens": 9},
        algorithm={"updates_per_batch": 2},
        train={"steps": 4},
        eval={"sets": []},
    )
    train(config, tmp_path / "run", "parallel.tensor=2", ranks=2)
    rows = steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["rollout/resumed_samples"] > 0 for row in rows)
    assert any(row["rollout/age_max"] >= 2 for row in rows)
    for row in rows:  # tokens of the newest weights, also where older ones began the response
        assert row["mismatch/tokens"] > 0
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4
    dumps = sorted((tmp_path / "run" / "rollouts").glob("step_*.parquet"))
    samples = [sample for dump in dumps for sample in read_batch(dump).samples]
    assert max(sample.num_sampled for sample in samples) == 24  # 9 + 9 + 6
    assert max(len(sample.versions) for sample in samples) >= 2
    for sample in samples:  # other weights sample only from where a round has ended
        ends = [sum(span.num_tokens for span in sample.versions[:n]) for n in range(1, 3)]
        assert all(end in (9, 18, sample.num_sampled) for end in ends)
