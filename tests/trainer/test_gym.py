"""A run on generated problems, of which a random model solves none."""

from pathlib import Path

import pytest

from tests.reward.own_functions import EVEN_LENGTH
from tests.trainer.runs import train, write_run

SUMS = {
    "name": "chain_sum",
    "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_trains_on_generated_problems_and_evaluates_others(
    model_dir: Path, tmp_path: Path
) -> None:
    gym = {"name": "gym", "function": "gym"}
    config = write_run(
        tmp_path,
        model_dir,
        data={"train": {"gym": [SUMS], "size": 64}, "max_prompt_tokens": 128},
        rollout={"engine": "local"},
        reward={"workers": 1, "functions": [gym, EVEN_LENGTH]},
        eval={"functions": [gym], "sets": [{"gym": [SUMS], "size": 16, "name": "sums"}]},
    )
    rows = train(config, tmp_path / "run")
    steps = [row for row in rows if "reward/gym" in row]
    assert len(steps) == 2
    assert all(row["reward/gym/scorer_errors"] == 0 for row in steps)
    assert all(row["reward/gym/chain_sum"] == row["reward/gym"] for row in steps)
    assert [row["eval/sums/avg_at_k"] for row in rows if "eval/sums/avg_at_k" in row] == [0, 0]
