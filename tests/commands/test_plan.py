"""``python -m bapo_megatron plan``, as a user types it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.launch import run
from tests.tools.planning.cases import MODELS

MODEL = str(MODELS / "deepseek-r1-distill-qwen-7b.json")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: run\nrun_dir: runs/run\nmodel: {path: models/absent}\n"
        "parallel: {tensor: 2, pipeline: 2, context: 2}\n"
        "rollout: {max_response_tokens: 6144}\n"
    )
    return str(path)


def test_the_tables_are_readable_on_100_columns(config: str) -> None:
    arguments = ["plan", config, "--model-config", MODEL, "--gpus", "16", "--gpu-memory", "80"]
    result = run([*arguments, "log.gpu_hour_cost=2.5"], environment={"COLUMNS": "100"})
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in result.stdout  # nothing is cut off
    for heading in (
        *("Trainer memory per GPU", "GB one GPU sends in a step", "Estimated time of a step"),
        *("Disk under run_dir, GB", "layouts of 16 GPUs", "Assumptions"),
        *("Estimates: messages, times and the order of layouts", "GPU-hours of 32 GPUs: "),
        "cost at 2.5 per GPU-hour: ",
    ):
        assert sum(heading in line for line in lines) == 1
    assert sum(line.lstrip().startswith("→") for line in lines) == 1


def test_json_holds_every_figure(config: str) -> None:
    result = run(["plan", config, "--model-config", MODEL, "--gpus", "16", "--json"])
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert list(plan["layout"].values()) == [2, False, 2, 1, 2, 2, 1, None]
    assert [stage["stage"] for stage in plan["stages"]] == [0, 1]
    for stage in plan["stages"]:
        parts = [stage[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer")]
        passing = max(stage["logits_bytes"], stage["workspace_bytes"])
        assert stage["total_bytes"] == sum(parts) + stage["activations_bytes"] + passing
    assert list(plan["sent_bytes"]) == ["tensor", "context", "pipeline", "data"]
    assert all(sent > 0 for sent in plan["sent_bytes"].values())
    assert len(plan["phases"]) == 5
    assert plan["step_s"] == pytest.approx(sum(phase["seconds"] for phase in plan["phases"]))
    # 16 trainer and as many rollout GPUs.
    assert plan["gpu_hours_per_step"] == pytest.approx(plan["step_s"] * 32 / 3600)
    assert plan["gpu_hour_cost"] is None


def test_options_and_overrides_change_the_plan(config: str) -> None:
    result = run(
        [
            *("plan", config, "parallel.pipeline=1", "--model-config", MODEL, "--json"),
            *("--gpu", "b200", "--mfu", "0.5", "--response-tokens", "1000"),
            *("--rollout-gpus", "3", "--rollout-tokens-per-s", "2000"),
        ]
    )
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert (plan["gpus"], plan["layout"]["pipeline"]) == (4, 1)
    assumptions = plan["assumptions"]
    assert (assumptions["gpu"]["name"], assumptions["gpu_memory_bytes"]) == ("B200", 180e9)
    assert (assumptions["mfu_share"], assumptions["response_tokens"]) == (0.5, 1000)
    # 512 responses of 1000 tokens at 6000 tokens per second.
    assert plan["phases"][0]["seconds"] == pytest.approx(512 * 1000 / 6000)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "models/absent/config.json'; give a config.json by --model-config"),
        (["--model-config", "none.json"], 1, "none.json: no such file"),
        (["--model-config", MODEL, "--gpus", "12"], 1, "--gpus: must be a multiple of"),
        (["--model-config", MODEL, "--gpu", "h1000"], 1, "--gpu: must be one of A100, H100"),
        (["--model-config", MODEL, "parallel.tensor=3"], 2, "num_attention_heads = 28"),
        (["--model-config", MODEL, "rollout.max_response_tokens=131072"], 2, "131072 positions"),
    ],
)
def test_what_is_wrong_is_one_line(
    config: str, arguments: list[str], status: int, message: str
) -> None:
    result = run(["plan", config, *arguments])
    assert result.returncode == status
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_teacher_s_table_fits_100_columns_and_its_model_is_read(
    config: str, tmp_path: Path
) -> None:
    distilled = ["algorithm.distillation.coefficient=1", "algorithm.distillation.loss=forward_kl"]
    distilled += [f"algorithm.distillation.teacher.path={tmp_path}", "ops.logits_chunk_tokens=1024"]
    distilled += ["algorithm.distillation.teacher.memory=host"]
    arguments = ["plan", config, *distilled, "--model-config", MODEL]
    missing = run(arguments)
    assert missing.returncode == 1
    assert len(missing.stderr.splitlines()) == 1
    assert f"algorithm.distillation.teacher.path: no such file '{tmp_path}" in missing.stderr

    shutil.copy(MODELS / "deepseek-r1-distill-qwen-32b.json", tmp_path / "config.json")
    result = run(arguments, environment={"COLUMNS": "100"})
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    words = " ".join(result.stdout.split())
    for text in (
        "frozen: algorithm.distillation.teacher, 32,763,876,352 parameters",
        "stage weights teacher's hidden states scoring host memory",
        # 65.5 GB over 2 tensor and 2 pipeline ranks, twice; without the head on the last stage.
        "host memory: 127.9 GB per node",
        "scoring (teacher)",
        "copies from host memory: 25 GB/s per GPU",
    ):
        assert text in words, text
    plan = json.loads(run([*arguments, "--json"]).stdout)
    first, last = (stage["host_bytes"] for stage in plan["stages"])
    assert plan["host_bytes_per_node"] == 4 * first + 4 * last
