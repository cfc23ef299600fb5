"""Runs whose routers repeat the engine's choices, for responses in rounds and in several turns.

With a learning rate of 0 all weights are equal, so that engine and trainer choose alike wherever a
row of the engine is at its token: any other row would choose other experts.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from bapo_megatron.data.dump import read_batch
from tests.engine.helpers import make_model_dir
from tests.launch import REPOSITORY
from tests.trainer.chaos import steps
from tests.trainer.runs import assert_same_training, refusal, sampling_settings, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 3
MODULE = """
from bapo_megatron.environment.base import Step


class Again:
    def start(self, task):
        return 0

    def step(self, state, turn):
        if turn.number > 1:
            return Step(state, is_done=True)
        return Step(state, token_ids=[5, 6, 7, turn.token_ids[0]])
"""
EPISODES = {
    "environment": "own_world:Again",
    "episodes": {"workers": 1, "max_turns": 3},
    "max_response_tokens": 40,
    "temperature": 1.5,
}


def write_config(directory: Path, model: Path, **rollout: Any) -> Path:
    (directory / "own_world.py").write_text(MODULE)
    settings = sampling_settings(
        directory,
        model,
        rollout={"engine": "local", "partial_tokens": 9, **rollout},
        algorithm={"router_replay": "rollout", "updates_per_batch": 2},
        train={"steps": STEPS},
        checkpoint={"every_steps": 1, "keep_last": 9},
        eval={"sets": []},
        log={"tensorboard": False},
    )
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_config(tmp_path_factory.mktemp("rounds"), model)


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train(config, run_dir, "parallel.expert=2", ranks=2)
    return run_dir


@pytest.mark.exhaustive
def test_every_token_of_responses_in_rounds_has_its_experts(config: Path, tmp_path: Path) -> None:
    frozen = ("optimizer.lr=0", "parallel.expert=2")
    rows = train(config, tmp_path, *frozen, ranks=2)
    assert sum(row["rollout/resumed_samples"] for row in rows) > 10
    for row in rows:
        assert row["router/replayed_share"] == 1.0
        assert row["router/agreement_share"] > 0.999
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert 0 < row["router/entropy"] < np.log(8)
        assert 1 < row["router/load_mean"] <= row["router/load_max"] < 8


AGENT = {
    "agent": "tests.agent.agents:wanders",
    "agent_sandbox": None,
    "max_response_tokens": 40,
    "temperature": 1.5,
}


SERVERS = {
    "engine": "sglang",
    "partial_tokens": None,
    "server": {"max_total_tokens": 8192, "mem_fraction": 0.3},
}


@pytest.mark.parametrize(
    "episodes",
    [pytest.param(EPISODES, marks=pytest.mark.exhaustive), AGENT],
    ids=["environment", "agent"],
)
@pytest.mark.parametrize(
    "engine",
    [{}, pytest.param(SERVERS, marks=[pytest.mark.sglang, pytest.mark.exhaustive])],
    ids=["local", "sglang"],
)
def test_every_token_of_several_turns_has_its_experts(
    episodes: dict[str, Any], engine: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    short_turned = shutil.copytree(model, tmp_path / "model")
    ends = {"eos_token_id": [1, *range(9, 260, 16)]}  # one token in sixteen ends a turn
    (short_turned / "generation_config.json").write_text(json.dumps(ends))
    path = write_config(tmp_path, short_turned, **episodes, **engine)
    frozen = ("optimizer.lr=0", "parallel.tensor=2", "parallel.sequence=true")
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    rows = train(path, tmp_path / "run", *frozen, ranks=2, environment=environment)
    dumps = (tmp_path / "run" / "rollouts").glob("step_*.parquet")
    sequences = [sequence for dump in dumps for sequence in read_batch(dump).sequences]
    assert any(sequence.num_turns > 1 for sequence in sequences)
    assert any(sequence.number for sequence in sequences) is ("agent" in episodes)
    for row in rows:
        assert row["router/replayed_share"] == 1.0
        assert row["router/agreement_share"] > 0.999
        assert row["mismatch/logprob_abs_max"] < 1e-4


def test_a_resumed_run_equals_the_uninterrupted_one(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(finished, resumed)
    # Forget what came later, as if the run had been killed.
    (resumed / "checkpoints" / "latest").write_text("step_1\n")
    shutil.rmtree(resumed / "hf")
    train(config, resumed, "parallel.expert=2", "resume=true", ranks=2)
    assert_same_training(resumed, finished)


@pytest.mark.exhaustive
def test_a_run_that_begins_to_replay_samples_again_what_has_no_routes(
    config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(config, run_dir, "algorithm.router_replay=none", "train.steps=2")
    assert not (run_dir / "rollouts" / "routes").exists()
    (run_dir / "checkpoints" / "latest").write_text("step_1\n")
    rows = train(config, run_dir, "train.steps=2", "resume=true")
    assert rows[-1]["router/replayed_share"] == 1.0


def test_a_replay_has_the_routes_of_the_run_and_repeats_its_training(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    replayed = train(
        config, tmp_path, f"replay={finished / 'rollouts'}", "parallel.expert=2", ranks=2
    )
    for row, original in zip(replayed, steps(finished), strict=True):
        for name in ("router/agreement_share", "router/entropy", "policy/grad_norm"):
            assert row[name] == pytest.approx(original[name], rel=1e-6)


@pytest.mark.sglang
@pytest.mark.exhaustive
def test_servers_return_the_experts_of_every_token_but_those_computed_again(
    model: Path, tmp_path: Path
) -> None:
    """Responses are aborted and continued; then, retracted."""
    # Two batches ahead, a few at a time: some are unfinished when new weights come, however long
    # that takes, and train within five steps.
    server = {**SERVERS["server"], "max_running_requests": 4}
    rollout = {**SERVERS, "server": server, "async_steps": 2, "oversample_groups": 2}
    path = write_config(tmp_path, model, **rollout, max_response_tokens=60)
    frozen = ("optimizer.lr=0", "parallel.expert=2", "checkpoint.every_steps=0", "train.steps=5")
    aborted = train(path, tmp_path / "aborted", *frozen, ranks=2)
    assert sum(row["rollout/resumed_samples"] for row in aborted) > 0
    assert all(row["router/replayed_share"] == 1.0 for row in aborted)
    retract = "rollout.weight_sync.in_flight=retract"
    retracted = train(path, tmp_path / "retracted", *frozen, retract, ranks=2)
    assert 0.3 < min(row["router/replayed_share"] for row in retracted) < 1.0
    assert all(row["router/agreement_share"] > 0.999 for row in (*aborted, *retracted))
    for rows in (aborted, retracted):  # later tokens may all be of an earlier version
        assert rows[0]["mismatch/logprob_abs_mean"] < 1e-5


@pytest.mark.exhaustive
def test_under_noise_in_the_engine_s_choice_replay_takes_the_mismatch_away(
    config: Path, tmp_path: Path
) -> None:
    noisy = ("rollout.engine=examples.study.router_noise:NoisyKind", "rollout.partial_tokens=null")
    frozen = (*noisy, "optimizer.lr=0", "train.steps=2", "checkpoint.every_steps=0")
    environment = {"PYTHONPATH": str(REPOSITORY)}
    mismatch = {}
    for kind in ("rollout", "none"):
        run_dir = tmp_path / kind
        replay = f"algorithm.router_replay={kind}"
        rows = train(config, run_dir, *frozen, replay, environment=environment)
        mismatch[kind] = [row["mismatch/logprob_abs_mean"] for row in rows]
    assert max(mismatch["rollout"]) < min(mismatch["none"]) / 10
    assert min(mismatch["none"]) > 1e-3


def test_without_replay_the_mismatch_shows_it_where_choices_differ(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(finished / "rollouts", dumps)
    path = dumps / "routes" / "step_000001.safetensors"
    routes = load_file(path)["routes"]
    known = routes >= 0
    save_file({"routes": np.where(known, (routes + 3) % 8, routes).astype(np.int8)}, path)
    frozen = (f"replay={dumps}", "train.steps=1", "optimizer.lr=0")
    (other,) = train(config, tmp_path / "other", *frozen)
    (free,) = train(config, tmp_path / "free", *frozen, "algorithm.router_replay=none")
    assert other["router/agreement_share"] < 0.5
    assert other["mismatch/logprob_abs_mean"] > 0.05
    assert free["mismatch/logprob_abs_mean"] < 1e-5
    assert "router/agreement_share" not in free
    assert free["router/replayed_share"] == 0.0


def test_choices_of_the_first_pass_are_repeated_by_the_later_ones(
    config: Path, tmp_path: Path
) -> None:
    settings = ("algorithm.router_replay=behaviour", "algorithm.behaviour=recomputed")
    rows = train(config, tmp_path, *settings, "parallel.pipeline=2", ranks=2)
    assert not (tmp_path / "rollouts" / "routes").exists()
    for row in rows:
        assert row["router/replayed_share"] == 1.0
        assert 0.9 < row["router/agreement_share"] <= 1.0


def test_a_missing_file_ends_the_run_with_one_line(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(finished / "rollouts", dumps)
    (dumps / "routes" / "step_000001.safetensors").unlink()
    arguments = ["train", str(config), f"run_dir={tmp_path}/run", f"replay={dumps}"]
    status, line = refusal([*arguments, "parallel.expert=2"], ranks=2)
    assert status == 1
    assert "step_000001.safetensors: cannot be read" in line


def test_only_models_with_experts_have_routers(
    config: Path, model_dir: Path, tmp_path: Path
) -> None:
    arguments = ["train", str(config), f"run_dir={tmp_path}", f"model.path={model_dir}"]
    status, line = refusal(arguments)
    assert status == 2
    rule = "must be none for a model without experts, got rollout; set it to none"
    assert line == f"algorithm.router_replay: {rule}"
