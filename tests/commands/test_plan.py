"""``python -m bapo_megatron plan``, as a user types it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bapo_megatron import cli
from tests.tools.planning.cases import MODELS

MODEL = ("--model-config", str(MODELS / "deepseek-r1-distill-qwen-7b.json"))
RunPlan = Callable[..., str]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunPlan:
    """Returns what the command prints about a configuration, on 100 columns."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "name: run\nrun_dir: runs/run\nmodel: {path: models/absent}\n"
        "parallel: {tensor: 2, pipeline: 2, context: 2}\n"
        "rollout: {max_response_tokens: 6144}\n"
    )
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> str:
        cli.app(["plan", str(config), *arguments], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_tables_are_readable_on_100_columns(plan: RunPlan) -> None:
    shown = plan(*MODEL, "--trainer-gpus", "16", "--gpu-memory", "80", "log.gpu_hour_cost=2.5")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in shown  # nothing is cut off
    for heading in (
        *("Trainer memory per GPU", "GB one GPU sends in a step", "Estimated time of a step"),
        *("Disk under run_dir, GB", "layouts of 16 GPUs", "Assumptions"),
        *("Estimates: messages, times and the order of layouts", "GPU-hours of 32 GPUs: "),
        "cost at 2.5 per GPU-hour: ",
    ):
        assert sum(heading in line for line in lines) == 1
    assert sum(line.lstrip().startswith("→") for line in lines) == 1


def test_options_and_overrides_change_the_plan_and_json_holds_every_figure(plan: RunPlan) -> None:
    options = ("--gpu", "b200", "--mfu", "0.5", "--response-tokens", "1000", "--gpus", "11")
    rollout = ("--trainer-gpus", "8", "--rollout-tokens-per-s", "2000")
    figures = json.loads(plan("parallel.context=1", *MODEL, *options, *rollout, "--json"))
    assert list(figures["layout"].values()) == [2, False, 2, 1, 1, 2, 1, None]
    assumptions = figures["assumptions"]
    assert (assumptions["gpu"]["name"], assumptions["gpu_memory_bytes"]) == ("B200", 180e9)
    assert (assumptions["mfu_share"], assumptions["response_tokens"]) == (0.5, 1000)
    assert [stage["stage"] for stage in figures["stages"]] == [0, 1]
    for stage in figures["stages"]:
        parts = [stage[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer")]
        passing = max(stage["logits_bytes"], stage["workspace_bytes"])
        assert stage["total_bytes"] == sum(parts) + stage["activations_bytes"] + passing
    sent = figures["sent_bytes"]
    assert [group for group in sent if sent[group]] == ["tensor", "pipeline", "data"]
    # 512 responses of 1000 tokens at 6000 tokens per second.
    assert figures["phases"][0]["seconds"] == pytest.approx(512 * 1000 / 6000)
    assert figures["step_s"] == pytest.approx(sum(p["seconds"] for p in figures["phases"]))
    assert figures["gpu_hours_per_step"] == pytest.approx(figures["step_s"] * 11 / 3600)
    assert figures["gpu_hour_cost"] is None


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 1, "models/absent/config.json'; give a config.json by --model-config"),
        (("--model-config", "none.json"), 1, "none.json: no such file"),
        ((*MODEL, "parallel.tensor=3"), 2, "num_attention_heads = 28"),
    ],
)
def test_what_is_wrong_is_one_line(
    plan: RunPlan,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    with pytest.raises((OSError, ValueError)) as caught:
        plan(*arguments)
    assert cli._report(caught.value) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), message in err) == ("", 1, True)


def test_a_teacher_s_table_fits_100_columns_and_its_model_is_read(
    plan: RunPlan, tmp_path: Path
) -> None:
    distilled = ["algorithm.distillation.coefficient=1", "algorithm.distillation.loss=forward_kl"]
    distilled += [f"algorithm.distillation.teacher.path={tmp_path}", "ops.logits_chunk_tokens=1024"]
    distilled += ["algorithm.distillation.teacher.memory=host", *MODEL]
    missing = rf"^algorithm\.distillation\.teacher\.path: no such file '{tmp_path}"
    with pytest.raises(ValueError, match=missing):
        plan(*distilled)

    shutil.copy(MODELS / "deepseek-r1-distill-qwen-32b.json", tmp_path / "config.json")
    shown = plan(*distilled)
    assert max(map(len, shown.splitlines())) <= 100
    words = " ".join(shown.split())
    for text in (
        "frozen: algorithm.distillation.teacher, 32,763,876,352 parameters",
        "stage weights teacher's hidden states scoring host memory",
        # 65.5 GB over 2 tensor and 2 pipeline ranks, twice; without the head on the last stage.
        "127.9 GB of host memory per node",
        "scoring (teacher)",
        "host memory: 25 GB/s per GPU",
    ):
        assert text in words, text
