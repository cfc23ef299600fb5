"""Whole runs of models whose config.json has fields that few have, on two tensor-parallel ranks."""

import json
from pathlib import Path

import pytest
import yaml

from tests.engine.helpers import make_model_dir
from tests.policy.convert_models import assert_same, run_convert, weights
from tests.trainer.chaos import steps
from tests.trainer.runs import sampling_settings, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("family", ["mistral", "llama"], ids=["Mistral, YaRN", "attention biases"])
def test_a_model_trains_and_becomes_the_one_that_its_checkpoint_holds(
    tmp_path: Path, family: str
) -> None:
    model, run_dir = make_model_dir(tmp_path / "model", family), tmp_path / "run"
    settings = sampling_settings(
        tmp_path,
        model,
        rollout={"engine": "local"},
        eval={"sets": []},
        checkpoint={"every_steps": 2},
        log={"tensorboard": False},
    )
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    train(config, run_dir, "parallel.tensor=2", ranks=2)
    rows = steps(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # the second one samples with weights that were sent
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-4
    run_convert(run_dir / "checkpoints" / "step_2", tmp_path / "hf")
    assert_same(weights(tmp_path / "hf"), weights(run_dir / "hf"))
    source, exported = (
        json.loads((path / "config.json").read_text()) for path in (model, run_dir / "hf")
    )
    assert exported == source
