"""Runs that train adapters: they continue, the base is the reference, lost weights are noticed."""

import asyncio
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import read_batch
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.evaluation.samples import read_samples
from bapo_megatron.telemetry.sinks import read_metrics
from tests.engine.helpers import make_model_dir
from tests.engine.sglang.servers import KEYS, SERVER, adapter_versions, environment_of, running
from tests.launch import run
from tests.tolerances import assert_within, sum_bound
from tests.trainer.runs import (
    assert_same_training,
    differing_weights,
    exported_weights,
    refusal,
    repeatable_rows,
    train,
    write_run,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ENGINE = "tests.trainer.losing_engine:LosingKind"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_run(
        tmp_path_factory.mktemp("lora"),
        model,
        model={"lora": {"rank": 4, "alpha": 8.0}},
        rollout={"engine": "local", "weight_sync": {"verify": "every", "method": "disk"}},
        algorithm={"updates_per_batch": 2, "kl": {"measure": True}},
        optimizer={"lr": 1e-2},
        train={"steps": 3},
        checkpoint={"every_steps": 1, "keep_last": 9},
        eval={"sets": []},
    )


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train(config, run_dir, "parallel.tensor=2", ranks=2)
    return run_dir


def test_a_resumed_run_equals_the_uninterrupted_one(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(finished, resumed)
    # Forget what came later, as if the run had been killed.
    (resumed / "checkpoints" / "latest").write_text("step_1\n")
    shutil.rmtree(resumed / "hf")
    shutil.rmtree(resumed / "adapter")
    train(config, resumed, "parallel.tensor=2", "resume=true", ranks=2)
    assert_same_training(resumed, finished)
    adapters = [load_file(r / "adapter" / "adapter_model.safetensors") for r in (resumed, finished)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], value) for name, value in adapters[1].items())


@pytest.mark.exhaustive
def test_merged_weights_train_alike_and_are_more_bytes(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    merged = "rollout.weight_sync.adapters=merged"
    train(config, tmp_path, "parallel.tensor=2", merged, ranks=2)
    for sent, row in assert_equal_but_for_bytes(finished, tmp_path):
        assert sent["weight_sync/bytes"] < 0.2 * row["weight_sync/bytes"]
        assert sent["weight_sync/logprob_difference"] < 1e-5


@pytest.mark.exhaustive
def test_a_run_that_is_killed_while_its_engine_takes_an_adapter_equals_another_one(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    layout = ("parallel.tensor=2", "rollout.weight_sync.method=broadcast")
    engine = "rollout.engine=tests.trainer.losing_engine:KillingKind"
    adapters = "rollout.weight_sync.adapters=adapter"
    killed = run(["train", str(config), f"run_dir={tmp_path}", *layout, engine, adapters], ranks=2)
    assert killed.returncode != 0
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    train(config, tmp_path, *layout, "--resume", ranks=2)
    assert_equal_but_for_bytes(tmp_path, finished)


@pytest.mark.exhaustive
@pytest.mark.sglang
def test_servers_sample_with_adapters_as_the_trainer_computes_after_it_was_killed_in_a_switch(
    tmp_path: Path,
) -> None:
    model = make_model_dir(tmp_path / "model", intermediate_size=64)  # SGLang's CPU pads others
    sync = {"adapters": "adapter", "method": "tensor", "verify": "every"}
    config = write_run(
        tmp_path,
        model,
        model={"lora": {"rank": 4, "alpha": 8.0}},
        rollout={"server": SERVER, "weight_sync": sync, "async_steps": 1},
        optimizer={"lr": 1e-2},
        train={"steps": 3},
        eval={"sets": []},
        checkpoint={"every_steps": 1},
    )
    arguments = [str(config), f"run_dir={tmp_path / 'run'}"]
    settings = load_config(config, [f"run_dir={tmp_path / 'server'}"])
    server = SglangServer(settings, "cpu", KEYS, awaits_weights=True)
    environment = environment_of(KEYS)
    with running(server):
        servers = f"rollout.servers=['{server.address}']"
        engine = "rollout.engine=tests.trainer.losing_engine:KillingSglangKind"
        killed = run(["train", *arguments, servers, engine], environment=environment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        rows = train(config, tmp_path / "run", servers, "--resume", environment=environment)
        assert [row["weight_sync/bytes"] for row in rows] == [16384.0] * 3
        assert all(row["weight_sync/logprob_difference"] < 1e-5 for row in rows)
        # Of batches that only the weights before their step sampled.
        mismatches = [row.get("mismatch/logprob_abs_max") for row in rows]
        assert mismatches[0] is not None
        assert all(mismatch is None or mismatch < 1e-5 for mismatch in mismatches)
        sums = write_sums(tmp_path)
        adapter = f"model.lora.path={tmp_path / 'run' / 'adapter'}"
        evaluated = run(
            ["eval", str(config), f"run_dir={tmp_path / 'eval'}", servers, sums, adapter],
            environment=environment,
        )
        assert evaluated.returncode == 0, evaluated.stderr
        assert asyncio.run(adapter_versions(server)) == ["0"]


def write_sums(directory: Path) -> str:
    """Write an evaluation set; returns the override that names it."""
    path = directory / "sums.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=?", "answer": "{n + 1}"}}\n' for n in range(4)))
    return f"eval={{sets: [{{path: {path}}}], samples_per_prompt: 4, max_response_tokens: 9}}"


@pytest.mark.exhaustive
def test_an_adapter_is_evaluated_and_samples_as_the_merged_model(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    sums, samples = write_sums(tmp_path), []
    adapter = [f"model.lora.path={finished / 'adapter'}"]
    merged = ["model.lora={}", f"model.path={finished / 'hf'}"]
    for name, model in (("adapter", adapter), ("merged", merged)):
        run_dir = tmp_path / name
        result = run(["eval", str(config), f"run_dir={run_dir}", sums, *model])
        assert result.returncode == 0, result.stderr
        groups = read_samples(run_dir / "eval" / "sums.jsonl")
        samples.append({(s.prompt_id, s.index): s.response for group in groups for s in group})
        generated = run(["generate", str(config), f"run_dir={run_dir}_generated", *model])
        assert generated.returncode == 0, generated.stderr
    assert samples[0] == samples[1]
    tokens = [
        read_batch(dump).samples for dump in sorted(tmp_path.glob("*_generated/rollouts/*.parquet"))
    ]
    for sample, other in zip(*tokens, strict=True):
        assert (sample.response_token_ids == other.response_token_ids).all()
        assert (sample.behaviour_logprobs == other.behaviour_logprobs).all()
    _, line = refusal(["eval", str(config), sums, *adapter, "rollout.weight_sync.adapters=merged"])
    assert line.startswith("model.lora.path: must be left out without training with rollout."), line
    _, line = refusal(["generate", str(config), *adapter, "model.lora.alpha=9"])
    assert line.startswith("model.lora.alpha: must be 8, that of '"), line


Row = dict[str, float]


def assert_equal_but_for_bytes(run_dir: Path, other: Path) -> list[tuple[Row, Row]]:
    """Weights arrived another way; returns the metrics of each step of both runs."""
    rows, others = (repeatable_rows(directory) for directory in (run_dir, other))
    name = "weight_sync/bytes"
    assert [row | {name: 0} for row in rows] == [row | {name: 0} for row in others]
    assert not differing_weights(run_dir, exported_weights(other))
    return list(zip(rows, others, strict=True))


def test_another_layout_continues_with_the_same_weights(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(finished, resumed)
    train(config, resumed, "parallel.pipeline=2", "train.steps=3", "resume=true", ranks=2)
    assert_same_merged(exported_weights(resumed), exported_weights(finished))  # no step was left


def assert_same_merged(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """w + s Σ b a over rank 4 twice, each in an order of its own."""
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        bound = sum_bound(4 * 2 * (4 + 2), weight.abs().max())
        assert_within((weight - others[name]).abs().max(), bound, name)


def test_checkpoints_hold_adapters_alone_and_convert_to_the_merged_model(
    finished: Path, model: Path, tmp_path: Path
) -> None:
    state = json.loads((finished / "checkpoints" / "step_3" / "state.json").read_text())
    assert {name: state["lora"][name] for name in ("rank", "alpha")} == {"rank": 4, "alpha": 8.0}
    target = tmp_path / "converted"
    result = run(["convert", str(finished / "checkpoints" / "step_3"), str(target)])
    assert result.returncode == 0, result.stderr
    converted, merged = load_file(target / "model.safetensors"), exported_weights(finished)
    assert_same_merged(converted, merged)
    base = load_file(model / "model.safetensors")
    changed = {name for name, weight in merged.items() if not torch.equal(weight, base[name])}
    assert changed == {name for name, w in base.items() if ".layers." in name and w.dim() == 2}


@pytest.mark.exhaustive
def test_adapters_of_another_base_or_rank_are_refused_on_one_line(
    config: Path, finished: Path, model: Path, tmp_path: Path
) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(finished, run_dir)
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    arguments = ["train", str(config), f"run_dir={run_dir}", "resume=true", "train.steps=4"]
    for override, rule in (
        (f"model.path={other}", r"saved with another model.path, "),
        ("model.lora.rank=0", "holds adapters of rank 4, but model.lora.rank is 0; resume with"),
        ("model.lora.rank=2", "saved with another model.lora.rank, 4, got 2; resume with that one"),
        ("model.lora.targets=[q_proj]", "saved with another model.lora.targets, "),
    ):
        _, line = refusal([*arguments, override])
        assert rule in line, line


def test_the_reference_is_the_base_at_no_cost(
    config: Path, finished: Path, model: Path, tmp_path: Path
) -> None:
    explicit = f"algorithm.kl.reference.path={model}"
    rows = train(config, tmp_path / "explicit", "parallel.tensor=2", explicit, ranks=2)
    free = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["kl/reference"] for row in free] == [row["kl/reference"] for row in rows]
    assert 0 < free[0]["kl/reference"] < free[-1]["kl/reference"]


def test_a_run_continues_from_the_adapter_that_another_one_wrote(
    config: Path, finished: Path, tmp_path: Path
) -> None:
    adapter = f"model.lora.path={finished / 'adapter'}"
    train(config, tmp_path / "run", adapter, "train.steps=1", "optimizer.lr=0")
    expected = exported_weights(finished)
    for name, weight in exported_weights(tmp_path / "run").items():
        assert (weight - expected[name]).abs().max() <= 1e-7, name
    _, line = refusal(
        ["train", str(config), f"run_dir={tmp_path / 'x'}", adapter, "model.lora.alpha=9"]
    )
    assert line.startswith("model.lora.alpha: must be 8, that of '"), line


@pytest.mark.exhaustive
def test_adapters_that_peft_cannot_load_are_named_and_continued(
    config: Path, tmp_path: Path
) -> None:
    model = make_model_dir(tmp_path / "model", "qwen3_moe")
    one_step = (f"model.path={model}", "train.steps=1", "model.lora.targets=[gate_proj,down_proj]")
    first, second = tmp_path / "first", tmp_path / "second"
    result = run(["train", str(config), f"run_dir={first}", *one_step])
    assert result.returncode == 0, result.stderr
    assert (
        f"PEFT cannot load {first}/adapter: it adapts gate_proj and up_proj of experts only "
        "together; use hf/, which is merged\n"
    ) in result.stderr
    train(config, second, f"model.lora.path={first / 'adapter'}", *one_step, "optimizer.lr=0")
    expected = exported_weights(first)
    for name, weight in exported_weights(second).items():
        assert (weight - expected[name]).abs().max() <= 1e-7, name
    others = ["model.lora.targets=[o_proj]", f"model.lora.path={first / 'adapter'}"]
    _, line = refusal(["train", str(config), f"run_dir={tmp_path / 'x'}", *one_step, *others])
    assert "'target_parameters' must be null with these model.lora.targets, got " in line


def test_weights_that_did_not_arrive_are_noticed_in_the_same_step(
    config: Path, tmp_path: Path
) -> None:
    arguments = [
        "train",
        str(config),
        f"run_dir={tmp_path}",
        f"rollout.engine={ENGINE}",
    ]
    # A limit that only the movement, not the size, of the difference can exceed.
    arguments += ["rollout.weight_sync.verify_tolerance=100"]
    result = run(arguments)
    assert result.returncode == 1
    assert "its log-probs did not follow the trainer's since the last comparison" in result.stderr
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) <= 1  # the sync after the first step
