"""A whole run on the local engine in rounds, with tensor-parallel ranks."""

from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.data.dump import read_batch
from tests.trainer.chaos import steps
from tests.trainer.runs import assert_same_training, train, write_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.exhaustive
def test_rounds_divide_responses_over_steps_and_every_part_is_of_its_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        model_dir,
        rollout={"engine": "local", "partial_tokens": 9},
        algorithm={"updates_per_batch": 2, "centering": {"top_k": 4}},
        ops={"logits_chunk_tokens": 16},
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
        ids_QK = sample.columns["sampler_top_ids"]
        logprobs_QK = sample.columns["sampler_top_logprobs"]
        assert ids_QK.shape == logprobs_QK.shape == (sample.num_sampled, 4)
        is_token_QK = ids_QK == sample.sampled_token_ids[:, None]
        is_likely_Q = is_token_QK.any(axis=1)
        expected_Q = sample.behaviour_logprobs[is_likely_Q]
        np.testing.assert_array_equal(logprobs_QK[is_token_QK], expected_Q)
        assert (sample.behaviour_logprobs[~is_likely_Q] <= logprobs_QK[~is_likely_Q, -1]).all()
    replay = [f"replay.dumps={tmp_path / 'run' / 'rollouts'}", "parallel.tensor=2"]
    train(config, tmp_path / "replayed", *replay, ranks=2)
    names = ("loss/policy", "policy/grad_norm")
    assert [[row[name] for name in names] for row in steps(tmp_path / "replayed")] == [
        [row[name] for name in names] for row in rows
    ]


@pytest.mark.exhaustive
def test_a_rounded_sampler_shows_in_the_mismatch_and_stays_over_a_resume(
    model_dir: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        model_dir,
        rollout={"engine": "local", "local": {"sampling_bits": 4}},
        train={"steps": 2},
        checkpoint={"every_steps": 1},
        eval={"sets": []},
    )
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", "train.steps=1")
    train(config, tmp_path / "parts", "--resume")
    for row in steps(tmp_path / "whole"):
        assert row["mismatch/logprob_abs_mean"] > 0.01
    shown = (tmp_path / "whole" / "console.log").read_text()
    assert shown.count("weights rounded to 4 bits move log-probs by") == 1
    assert_same_training(tmp_path / "parts", tmp_path / "whole")
