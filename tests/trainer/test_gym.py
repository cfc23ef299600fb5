"""A run on generated problems, of which a random model solves none."""

from pathlib import Path

import pytest
import yaml

from tests.reward.own_functions import EVEN_LENGTH
from tests.trainer.runs import sampling_settings, train

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
    settings = sampling_settings(
        tmp_path,
        model_dir,
        data={"train": {"gym": [SUMS], "size": 64}, "max_prompt_tokens": 128},
        rollout={"engine": "local"},
        reward={"workers": 1, "functions": [{"name": "gym", "function": "gym"}, EVEN_LENGTH]},
        log={"tensorboard": False},
    )
    settings["eval"]["functions"] = [{"name": "gym", "function": "gym"}]
    settings["eval"]["sets"] = [{"gym": [SUMS], "size": 16, "name": "sums"}]
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    rows = train(config, tmp_path / "run")
    steps = [row for row in rows if "reward/gym" in row]
    assert len(steps) == 2
    assert all(row["reward/gym/scorer_errors"] == 0 for row in steps)
    assert all(row["reward/gym/chain_sum"] == row["reward/gym"] for row in steps)
    assert [row["eval/sums/avg_at_k"] for row in rows if "eval/sums/avg_at_k" in row] == [0, 0]
