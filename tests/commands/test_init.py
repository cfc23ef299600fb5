"""``init``: what it writes passes ``data show``, ``plan`` and ``config``, as it says itself."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron import cli
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.settings import flat_settings
from bapo_megatron.data.rows import DataError
from tests.data.rows import write_jsonl
from tests.tools.planning.cases import MODELS, QWEN3_SHAPES


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A file of 10 prompts."""
    path = tmp_path / "sums.jsonl"
    write_jsonl(path, *({"prompt": f"{n}+1=?", "answer": str(n + 1)} for n in range(10)))
    return path


NO_SAVING = {
    "megatron.recompute": "none",
    "ops.logits_chunk_tokens": 0,
    "megatron.optimizer_offload_share": 0.0,
    "model.lora.rank": 0,
}
ON_HOST = {"ops.logits_chunk_tokens": 2048, "megatron.optimizer_offload_share": 1.0}


@pytest.fixture
def published(random_model: Path, tmp_path: Path):
    """Makes the directory of a published model: its config.json, the tiny tokenizer, no weights."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        weights = shutil.ignore_patterns("*.safetensors", "config.json")
        shutil.copytree(random_model, folder, ignore=weights)
        shutil.copy(MODELS / f"{name}.json", folder / "config.json")
        return folder

    return make


def init(folder: Path, model: Path, data: Path, gpus: int, *options: str) -> RunConfig:
    arguments = [str(folder), "--model", str(model), "--data", str(data), "--gpus", str(gpus)]
    cli.app(["init", *arguments, *options], standalone_mode=False)
    return load_config(folder / "run.yaml")


def run_printed_commands(printed: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run ``data show``, ``config`` and ``plan``, which need no GPU; return the plan."""
    commands = re.findall(
        r"^python -m bapo_megatron ((?:data show|config|plan) .+)$", printed, re.M
    )
    assert [command.split()[0] for command in commands] == ["data", "config", "plan"]
    for command in commands:
        capsys.readouterr()
        as_json = ["--json"] if command.startswith("plan") else []
        cli.app([*shlex.split(command), *as_json], standalone_mode=False)
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.parametrize(
    ("data", "gpus", "row_format", "has_suffix", "rollout", "starts"),
    [
        ("gsm8k_test.jsonl", 1, "gsm8k", True, (True, 0, 1, 0), " train "),
        # Its questions ask for a box.
        ("aime24.parquet", 8, "verl", False, (False, 4, 4, 1), ".torchrun --nproc-per-node 4 "),
        ("aime25.parquet", 24, "verl", True, (False, 0, 8, 1), "NNODES=1 NODE_RANK=0 "),
    ],
)
def test_the_commands_that_it_prints_accept_what_it_has_written(
    data: str,
    gpus: int,
    row_format: str,
    has_suffix: bool,
    rollout: tuple[bool, int, int, int],
    starts: str,
    random_model: Path,
    shared_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = init(tmp_path / "first", random_model, shared_data / data, gpus)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].removeprefix("python -m bapo_megatron").startswith(starts)
    assert config.model.dtype == "float32"
    [train_set] = config.data.train_sets
    assert train_set.row_format == row_format
    assert config.data.prompt_suffix.endswith("\\boxed{}.") is has_suffix
    section, server = config.rollout, config.rollout.server
    chosen = (section.colocated, server.first_gpu, server.count, section.async_steps)
    assert chosen == rollout
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert longest <= 2048  # the model's positions
    plan = run_printed_commands(printed, capsys)
    assert plan["fits"]
    assert (plan["trainer_gpus"], plan["gpus"]) == ({1: 1, 8: 4, 24: 8}[gpus], gpus)
    # A server that shares the trainer's GPU takes the default 80 % of it.
    peaks = r"training 0\.\d, sampling 64\.0" if gpus == 1 else r"training 0\.\d"
    assert re.search(rf"by `plan`: {peaks} of 80 GB", (tmp_path / "first/run.yaml").read_text())
    assert re.search(rf"by `plan`: {peaks} of 80 GB", printed)


def test_without_gpus_it_writes_a_cpu_configuration(
    random_model: Path, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = init(tmp_path / "run", random_model, sums, 0)
    printed = capsys.readouterr().out
    commands = re.findall(r"^python -m bapo_megatron (.+)$", printed, re.M)
    assert [command.split()[0] for command in commands] == ["data", "config", "train"]
    for command in commands[:2]:
        cli.app(shlex.split(command), standalone_mode=False)
    assert (config.rollout.engine, config.model.dtype) == ("local", "float32")
    assert (config.rollout.groups_per_step, config.rollout.max_response_tokens) == (8, 256)
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert text.startswith("# By `bapo-megatron init` for a CPU: ")
    assert "server" not in text.replace("without a server", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "gpus", "saving", "divided", "tensor"),
    [
        ("0.6b", 1, {}, "colocated", 1),
        ("0.6b", 8, {}, "split", 1),
        ("0.6b", 32, {}, "nodes", 1),
        ("4b", 1, ON_HOST, "colocated", 1),
        ("4b", 8, {}, "split", 2),
        pytest.param(*("4b", 16, {}, "nodes", 2), marks=pytest.mark.exhaustive),
        pytest.param(*("4b", 32, {}, "nodes", 2), marks=pytest.mark.exhaustive),
        pytest.param(*("4b", 64, {}, "nodes", 2), marks=pytest.mark.exhaustive),
        pytest.param(
            *("32b", 4, {"model.lora.rank": 32}, "colocated", 2), marks=pytest.mark.exhaustive
        ),
        pytest.param(*("32b", 8, ON_HOST, "colocated", 4), marks=pytest.mark.exhaustive),
        pytest.param(*("32b", 32, {}, "nodes", 8), marks=pytest.mark.exhaustive),
        pytest.param(*("30b-a3b", 8, ON_HOST, "split", 2), marks=pytest.mark.exhaustive),
        pytest.param(*("30b-a3b", 32, {}, "nodes", 1), marks=pytest.mark.exhaustive),
    ],
)
def test_what_fits_is_written_with_what_it_takes(
    size: str,
    gpus: int,
    saving: dict[str, Any],
    divided: str,
    tensor: int,
    published,
    shared_data: Path,
    tmp_path: Path,
    capsys,
) -> None:
    model = published("qwen3-30b-a3b" if size == "30b-a3b" else "qwen3-0.6b")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | QWEN3_SHAPES.get(size.upper(), {})))
    # Enough prompts for whole batches.
    config = init(tmp_path / "run", model, shared_data / "gsm8k_test.jsonl", gpus)
    values = flat_settings(config)
    assert {key: values[key] for key in NO_SAVING} == NO_SAVING | saving
    assert config.rollout.colocated is (divided == "colocated")
    assert config.parallel.tensor == tensor
    printed = capsys.readouterr().out
    said = {line.split("=")[0].strip() for line in printed.splitlines() if "  " in line[:2]}
    assert said - {"rollout.server.mem_fraction"} == saving.keys()
    assert ("sbatch examples/slurm.sbatch " in printed) is (divided == "nodes")
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in printed) is (tensor > 1 and divided != "nodes")
    [command] = re.findall(r"^python -m bapo_megatron (plan .+)$", printed, re.M)
    cli.app([*shlex.split(command), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["fits"]


def test_a_field_of_config_json_that_is_to_be_ignored_is_written_into_the_file(
    published, sums: Path, tmp_path: Path
) -> None:
    model = published("qwen3-0.6b")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"logit_scale": 0.5}))
    with pytest.raises(ValueError, match=r"'logit_scale' .* init: --ignore-field"):
        init(tmp_path / "run", model, sums, 2)
    config = init(tmp_path / "run", model, sums, 2, "--ignore-field", "logit_scale")
    assert config.model.ignored_config_fields == ("logit_scale",)


def test_every_key_of_the_file_has_its_reason_and_the_file_is_a_screen(
    random_model: Path, sums: Path, tmp_path: Path
) -> None:
    init(tmp_path / "run", random_model, sums, 2)
    lines = (tmp_path / "run" / "run.yaml").read_text().splitlines()
    assert len(lines) < 50
    bare = [line.strip() for line in lines if "#" not in line and not line.endswith(":")]
    assert bare == ["name: run", "prompt_column: prompt", "answer_column: answer", "steps: 100"]


def test_names_with_signs_of_the_shell_and_of_yaml_are_quoted(
    random_model: Path, sums: Path, tmp_path: Path, capsys
) -> None:
    data, folder = sums.rename(tmp_path / "a${b}.jsonl"), tmp_path / "my ${run}" / ".5e3"
    config = init(folder, random_model, data, 4, "--node-gpus", "4")
    assert (config.name, config.run_dir) == (".5e3", folder / "run")
    assert config.data.train_sets[0].path == data
    plan = run_printed_commands(capsys.readouterr().out, capsys)
    assert plan["assumptions"]["node_gpus"] == 4


@pytest.mark.parametrize(
    ("stored", "dtype", "reason"),
    [
        ({"torch_dtype": "float32"}, "float32", "'float32'"),
        ({"dtype": "bfloat16"}, "bfloat16", "'bfloat16'"),
        ({"dtype": "float16"}, "bfloat16", "'float16'"),
        ({}, "bfloat16", "names none"),
    ],
)
def test_the_number_format_is_the_model_s_if_it_can_be_trained(
    stored: dict[str, str],
    dtype: str,
    reason: str,
    random_model: Path,
    sums: Path,
    tmp_path: Path,
) -> None:
    model = shutil.copytree(random_model, tmp_path / "model")
    fields = json.loads((model / "config.json").read_text()) | {"dtype": None}
    (model / "config.json").write_text(json.dumps(fields | stored))
    config = init(tmp_path / "run", model, sums, 1)
    assert config.model.dtype == dtype
    assert config.rollout.groups_per_step == 8  # of ten prompts, in four updates
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert re.search(rf"^  dtype: {dtype} +# its config.json .*{reason}$", text, re.M)


@pytest.mark.parametrize(
    ("row", "options", "asks_for_box", "line"),
    [
        (
            {"task": {"text": "1+1=? Use \\boxed{}."}, "answer": "2"},
            ["--prompt-column", "task.text"],
            False,
            "prompt_column: task.text",
        ),
        (
            {"task": "1+1=?", "result": 2},
            ["--prompt-column", "task", "--answer-column", "result"],
            True,
            "answer_column: result",
        ),
        ({"prompt": "Why?", "answer": "because " * 20}, [], True, "# most answers are long texts"),
    ],
)
def test_rows_and_options_decide_what_is_written(
    row: dict[str, Any],
    options: list[str],
    asks_for_box: bool,
    line: str,
    random_model: Path,
    tmp_path: Path,
) -> None:
    data = tmp_path / "tasks*.jsonl"
    for name in ("tasks1.jsonl", "tasks2.jsonl"):
        write_jsonl(tmp_path / name, row)
    if options:
        with pytest.raises(DataError, match=r"tasks1\.jsonl:1: .*--prompt-column"):
            init(tmp_path / "run", random_model, data, 1)
        assert not (tmp_path / "run").exists()
    config = init(tmp_path / "run", random_model, data, 1, *options)
    [train_set] = config.data.train_sets
    assert (train_set.name, len(train_set.files())) == ("train", 2)
    assert (config.data.prompt_suffix != "") == asks_for_box
    assert line in (tmp_path / "run" / "run.yaml").read_text()


def test_the_evaluation_that_the_file_proposes_can_be_made(
    random_model: Path, sums: Path, tmp_path: Path, capsys
) -> None:
    init(tmp_path / "run", random_model, sums, 2)
    file = tmp_path / "run" / "run.yaml"
    text = file.read_text()
    file.write_text(text.replace("# eval: {", "eval: {").replace("FILE", str(sums)))
    cli.app(["config", str(file)], standalone_mode=False)
    assert "every_steps: 10" in capsys.readouterr().out


def test_an_existing_file_stays(random_model: Path, sums: Path, tmp_path: Path) -> None:
    file = tmp_path / "run" / "run.yaml"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"run\.yaml: exists"):
        init(file.parent, random_model, sums, 1)
    assert file.read_text() == "mine"
    file.unlink()
    file.symlink_to("nowhere.yaml")
    with pytest.raises(ValueError, match=r"run\.yaml: exists"):
        init(file.parent, random_model, sums, 1)


@pytest.mark.parametrize(
    ("model", "data", "gpus", "problem"),
    [
        ("deepseek-r1-distill-qwen-32b", "sums", 1, "--gpus: 1 H100 cannot .* or LoRA; give more"),
        ("qwen3-0.6b", "sums", 12, "--gpus: must be whole nodes of 8 GPUs .* got 12; give 8"),
        ("qwen3-0.6b", "none", 1, r"none\.jsonl: no row"),
    ],
)
def test_too_few_gpus_half_nodes_and_files_without_rows_are_refused(
    published, sums: Path, tmp_path: Path, model: str, data: str, gpus: int, problem: str
) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ValueError, match=problem):
        init(tmp_path / "run", published(model), tmp_path / f"{data}.jsonl", gpus)
    assert not (tmp_path / "run").exists()
