"""The benchmark beside TRL, without TRL, which is in an environment of its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import read_batch
from tests.benchmarks import bench_trl
from tests.benchmarks.bench_trl import Contender, Running, take_turns
from tests.benchmarks.trl_loads import (
    TINY,
    Load,
    make_tiny_model,
    padded_share,
    training_order,
    write_rollouts,
)
from tests.engine.helpers import reference_logprobs

SMALL = Load("small", 4, 2, 2, 4, 3, 9, (1,), 4096)


def test_a_rank_of_trl_gets_its_part_of_every_update() -> None:
    # 8 groups, 2 updates, 2 ranks: update 0 is groups 0 to 3, of which rank 0 has 0 and 1.
    load = dataclasses.replace(SMALL, groups=8)
    names = training_order(load, ranks=2, batches=2)
    assert [int(name.partition(":")[2]) for name in names] == [
        *[0, 1, 4, 5, 2, 3, 6, 7],
        *[8, 9, 12, 13, 10, 11, 14, 15],
    ]
    assert (names[0], names[8]) == ("step_000001:0", "step_000002:8")


def test_updates_have_equally_many_tokens_groups_both_rewards_and_log_probs_are_the_model_s(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path / "model")
    tokens = write_rollouts(tmp_path / "dumps", tmp_path / "model", SMALL, batches=2)
    lengths = []
    for number in (1, 2):
        batch = read_batch(tmp_path / f"dumps/step_00000{number}.parquet")
        lengths += [len(sample.response_token_ids) for sample in batch.samples]
        for sample in batch.samples:
            pair = sample.prompt.token_ids.tolist(), sample.response_token_ids.tolist()
            expected = reference_logprobs(tmp_path / "model", *pair)
            np.testing.assert_allclose(sample.behaviour_logprobs, expected, rtol=0, atol=1e-5)
        for group in batch.groups:
            assert {sample.reward for sample in group.samples} == {0.0, 1.0}
    updates = [
        sorted(update) for update in (lengths[start : start + 4] for start in range(0, 16, 4))
    ]
    assert updates == [[3, 5, 7, 9]] * 4
    assert tokens == 48
    # 8 rows of 4 + 9 positions, of which 48 + 32 are real.
    assert padded_share(SMALL, tokens) == pytest.approx(24 / 104)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_train_a_batch_at_each_turn(tmp_path: Path) -> None:
    model, dumps, scratch = (tmp_path / name for name in ("model", "dumps", "scratch"))
    make_tiny_model(model)
    scratch.mkdir()
    tokens = write_rollouts(dumps, model, SMALL, batches=2)
    trainers = bench_trl.contenders(SMALL, 1, model, dumps, scratch, 2, "no TRL here")
    same, shipped = (contender for contender in trainers if contender.module == "replay_ranks")
    configs = [
        load_config(Path(trainer.spec["config"]), [f"run_dir={tmp_path}/run"])
        for trainer in (same, shipped)
    ]
    assert [config.algorithm.behaviour for config in configs] == ["recomputed", "rollout"]
    replies = take_turns([same], scratch, warmup=1, rounds=1)
    row = bench_trl.summarize(replies[same.name], warmup=1, tokens=tokens, updates=2)
    assert len(row["grad_norms"]) == len(row["losses"]) == 4
    assert len(row["seconds"]) == 1
    assert row["peak_mb"] > 50  # an interpreter with torch


def test_a_rank_that_ends_is_an_error_with_its_output(tmp_path: Path) -> None:
    contender = Contender("broken", "replay_ranks", sys.executable, 1, 1, {"cores": [0]})
    broken = dataclasses.replace(contender, module="not_there")
    running = Running(broken, tmp_path / "scratch")
    try:
        with pytest.raises(RuntimeError, match=r"broken: a rank ended(.|\n)*not_there"):
            running.wait()
    finally:
        running.close()


def reply(seconds: float, norms: list[float], peak_bytes: int = 10**8) -> dict[str, Any]:
    return {"seconds": seconds, "peak_bytes": peak_bytes, "grad_norms": norms, "losses": norms}


def test_a_report_has_ratios_to_the_fastest_of_trl_and_the_agreement() -> None:
    trainers = {
        "TRL, 8": [[reply(9.0, [2.0])], [reply(4.0, [1.0])]],
        "TRL, 4": [[reply(9.0, [2.0])], [reply(3.0, [1.0])]],
        # Of two ranks the slower counts, and memory is added up.
        bench_trl.SAME_WORK: [
            [reply(9.0, [2.00002]), reply(9.0, [2.00002])],
            [reply(1.0, [1.001]), reply(2.0, [1.001])],
        ],
    }
    rows = {
        name: bench_trl.summarize(replies, warmup=1, tokens=120, updates=1)
        for name, replies in trainers.items()
    }
    agreement = bench_trl.compare(rows)
    assert agreement["fastest"] == "TRL, 4"
    assert agreement["first_norm_difference"] == pytest.approx(1e-5, rel=1e-3)
    assert agreement["max_norm_difference"] == pytest.approx(1e-3, rel=1e-2)
    section = {
        "load": dataclasses.asdict(TINY),
        "parameters": 115_000,
        "cores": 2,
        "tokens": 120,
        "padded_share": 0.25,
        "rows": rows,
        "agreement": agreement,
    }
    text = "\n".join(bench_trl._section(section))
    assert "| **TRL, 4** | 3,000 ms | 3,000 – 3,000 | 40 | 1.00 | 100 MB | 1.00 |" in text
    assert "| TRL, 8 | 4,000 ms | 4,000 – 4,000 | 30 | 0.75 | 100 MB | 1.00 |" in text
    assert "| this project | 2,000 ms | 2,000 – 2,000 | 60 | 1.50 | 200 MB | 2.00 |" in text


def test_a_missing_environment_is_an_error_with_the_commands_that_make_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"build/trl/bin/pip install .* trl=="):
        bench_trl.trl_versions(tmp_path / "python")
