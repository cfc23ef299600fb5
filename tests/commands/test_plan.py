"""``python -m bapo_megatron plan``, as a user types it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.launch import run
from tests.tools.planning.cases import MODELS

if TYPE_CHECKING:
    from pathlib import Path

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
    result = run(arguments, environment={"COLUMNS": "100"})
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in result.stdout  # nothing is cut off
    for heading in (
        "Trainer memory per GPU",
        "GB one GPU sends in a step",
        "Estimated time of a step",
        "Disk under run_dir, GB",
        "layouts of 16 GPUs",
        "Assumptions",
        "Estimates: messages, times and the order of layouts",
        "GPU-hours of 32 GPUs: ",
    ):
        assert sum(heading in line for line in lines) == 1
    assert sum(line.lstrip().startswith("→") for line in lines) == 1


@pytest.mark.parametrize("columns", [None, "60"])
def test_nothing_is_cut_in_a_pipe_or_on_a_narrow_terminal(
    config: str, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    arguments = ["plan", config, "--model-config", MODEL, "--gpus", "16"]
    result = run(arguments, environment={"COLUMNS": columns} if columns else None)
    assert result.returncode == 0, result.stderr
    assert "…" not in result.stdout
    if columns is None:
        headings = [line.split() for line in result.stdout.splitlines() if "recompute" in line]
        assert ["fits", "bubble", "training", "s"] in [words[-4:] for words in headings]


def test_no_row_of_messages_and_phases_is_wrapped(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: run\nrun_dir: runs/run\nmodel: {path: models/absent}\n"
        "parallel: {tensor: 8, sequence: true, pipeline: 2, context: 4}\n"
        "megatron: {overlap_grad_reduce: true, overlap_param_gather: true}\n"
        "rollout: {groups_per_step: 128, samples_per_group: 16, max_response_tokens: 65536}\n"
        "train: {max_tokens_per_micro_batch: 16640}\n"
    )
    model = str(MODELS / "deepseek-r1-distill-qwen-32b.json")
    arguments = ["plan", str(path), "--model-config", model, "--gpus", "128"]
    table = run(arguments, environment={"COLUMNS": "100"})
    plan = json.loads(run([*arguments, "--json"]).stdout)
    rows = re.findall(
        r"^ *(tensor|context|pipeline|data) +(\d+) +(node|network) +\S+ *$", table.stdout, re.M
    )
    # Gradients are summed over 2 data × 4 context ranks.
    assert rows == [
        ("tensor", "8", "node"),
        ("context", "4", "network"),
        ("pipeline", "2", "network"),
        ("data", "8", "network"),
    ]
    names = [phase["name"] for phase in plan["phases"]]
    cells = r" +[\d,.<]+" * 4 + r" +\d+%"
    assert [
        name for name in names if re.search(rf"^ *{re.escape(name)}{cells} *$", table.stdout, re.M)
    ] == names


def test_json_holds_every_figure(config: str) -> None:
    result = run(["plan", config, "--model-config", MODEL, "--gpus", "16", "--json"])
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["layout"] == {
        "tensor": 2,
        "sequence": False,
        "pipeline": 2,
        "virtual": 1,
        "context": 2,
        "data": 2,
    }
    assert [stage["stage"] for stage in plan["stages"]] == [0, 1]
    for stage in plan["stages"]:
        parts = [stage[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer")]
        passing = max(stage["logits_bytes"], stage["workspace_bytes"])
        assert stage["total_bytes"] == sum(parts) + stage["activations_bytes"] + passing
    assert list(plan["sent_bytes"]) == ["tensor", "context", "pipeline", "data"]
    assert all(sent > 0 for sent in plan["sent_bytes"].values())
    assert [phase["name"] for phase in plan["phases"]] == [
        "rollout",
        "forward-only",
        "forward + backward",
        "optimizer",
        "weight sync",
    ]
    assert plan["step_s"] == pytest.approx(sum(phase["seconds"] for phase in plan["phases"]))
    # 16 trainer and as many rollout GPUs.
    assert plan["gpu_hours_per_step"] == pytest.approx(plan["step_s"] * 32 / 3600)
    assert plan["assumptions"]["mfu_share"] == 0.4
    assert sum(estimate["is_configured"] for estimate in plan["layouts"]) == 1


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
        (
            [],
            1,
            "models/absent' does not exist; give the model's config.json by",
        ),
        (["--model-config", "none.json"], 1, "--model-config: no such file 'none.json'"),
        (["--model-config", MODEL, "--gpus", "12"], 1, "--gpus: must be a multiple of"),
        (["--model-config", MODEL, "--gpu", "h1000"], 1, "--gpu: must be one of A100, H100"),
        (["--model-config", MODEL, "parallel.tensor=3"], 2, "must divide the model's 28"),
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
