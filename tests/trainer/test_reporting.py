"""What a run reports beside its metrics: its end, on the terminal and in a file; its samples."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bapo_megatron.config.load import load_config
from bapo_megatron.data.dump import texts_path, write_batch, write_texts
from bapo_megatron.trainer.checkpointing import RunProgress
from bapo_megatron.trainer.reporting import next_steps, report_run, sample_rows
from bapo_megatron.types import Group, RolloutBatch, SampleText
from tests.config.files import run_config
from tests.data.samples import make_sample
from tests.trainer.runs import differing_weights, train


def test_a_run_without_one_update_says_where_to_read_why(tmp_path, capsys) -> None:
    report_run(run_config(tmp_path, log={"console": False}), RunProgress(finished_steps=2), {})
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nothing was trained: ")
    for place in ("reward/mixed_groups", "train/nonfinite_tokens", f"{tmp_path}/metrics.jsonl"):
        assert place in output.err


def test_the_table_and_the_file_have_the_same_numbers_and_no_empty_times(tmp_path, capsys) -> None:
    progress = RunProgress(
        finished_steps=6,
        updates=12,
        generated_tokens=5000.0,
        generation_s=2.0,
        accuracy_before=0.25,
        accuracy_after=0.5,
        num_prompts=40,
    )
    sets = {"sets": [{"path": "a.jsonl", "samples_per_prompt": 4}, {"path": "b.jsonl"}]}
    config = run_config(
        tmp_path,
        eval=sets,
        log={"gpu_hour_cost": 2.5},
        rollout={"servers": ["http://a:1", "http://b:1"], "server": {"tensor": 4}},
    )
    report_run(config, progress, {"training": 360.0, "export": 0.01}, trainer_gpus=8)
    output = capsys.readouterr()
    assert output.err == ""
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in output.out.splitlines()]
    assert [row for row in rows if row] == [
        ["held-out prompts", "40"],
        ["avg@4 before", "25.0%"],
        ["avg@4 after", "50.0%"],
        ["steps", "6"],
        ["optimizer updates", "12"],
        ["generated tokens/s", "2,500"],
        ["GPU-hours", "1.6"],  # 16 GPUs, a tenth of an hour
        ["cost", "4.00"],
        ["time: training", "360.0 s"],
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["updates"] == 12
    assert summary["phase_s"] == {"training": 360.0, "export": 0.01}
    assert summary["gpu_hours"] == pytest.approx(1.6, rel=1e-4)
    assert summary["gpu_cost"] == pytest.approx(4.0, rel=1e-4)
    assert summary["versions"]["megatron-core"] == "0.19.2"


def test_the_end_of_a_run_says_where_the_model_is_and_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = "python -m bapo_megatron"
    plain = run_config("runs/a b", train={"steps": 20})
    assert next_steps(plain) == [
        "the trained model: runs/a b/hf",
        f"{run} report 'runs/a b'",
        f"{run} eval 'runs/a b/config.yaml' 'model.path=runs/a b/hf' 'run_dir=runs/a b-eval' "
        "'eval.sets=[{path: FILE}]'",
    ]
    config = run_config(
        "runs/a", train={"steps": 20}, eval={"sets": [{"path": "a"}]}, checkpoint={"at_end": False}
    )
    assert next_steps(config) == [f"{run} report runs/a"]
    (tmp_path / "runs/a/eval").mkdir(parents=True)
    for name in ("start", "step_000020"):
        (tmp_path / f"runs/a/eval/{name}.json").touch()
    assert (
        next_steps(config)[1]
        == f"{run} compare runs/a/eval/start.json runs/a/eval/step_000020.json"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert next_steps(config)[0] == f"{run} report {tmp_path}/runs/a"


def write_step(directory: Path, rewards: list[float]) -> Path:
    """A step of one group."""
    samples = [make_sample(2, 3, 0, index) for index in range(len(rewards))]
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward, sample.prompt = reward, samples[0].prompt
    texts = [SampleText(0, s.index, "1+1=", "2", f"answer {s.reward:g}") for s in samples]
    path = directory / "step_000020.parquet"
    write_texts(path, 20, texts)
    write_batch(path, RolloutBatch(20, 99, (Group(0, tuple(samples)),)))
    return path


def test_samples_lie_evenly_between_the_lowest_and_the_highest_reward(tmp_path: Path) -> None:
    rewards = [0.0, 0.9, 0.1, 0.8, 0.7, 0.2, 0.6, 0.3, 0.5, 0.4, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    write_step(tmp_path, rewards)
    rows = sample_rows(tmp_path, 20)
    assert [round(row["reward"], 1) for row in rows] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5]
    assert rows[0]["response"] == "answer 0"
    values = [20, 0, 5, 0.2, 3, "stop", "1+1=", "answer 0.2", "2"]
    assert list(rows[1].values()) == values
    for few in ([1.0, 0.0, 0.5], [1.0]):
        write_step(tmp_path, few)
        assert [row["reward"] for row in sample_rows(tmp_path, 20)] == sorted(few)


def test_turns_are_one_text_and_the_middle_of_a_long_one_is_left_out(tmp_path: Path) -> None:
    path = write_step(tmp_path, [0.0, 0.5, 1.0])
    long = "a" * 2000 + "b" * 9000 + "c" * 2000
    turns = ("42", "wrong", "2")
    texts = [SampleText(0, 0, long, "2", "2", turns), SampleText(0, 2, "1+1=", "2", "2")]
    write_texts(path, 20, texts)
    first, second = sample_rows(tmp_path, 20)  # the sample without a text is left out
    assert first["prompt"] == "a" * 2000 + "\n[…]\n" + "c" * 2000
    assert first["response"] == "42\n\nwrong\n\n2"
    assert (second["sample"], second["response"]) == (2, "2")


def test_without_kept_texts_or_dump_there_is_no_table(tmp_path: Path) -> None:
    assert sample_rows(tmp_path, 20) == []
    for is_texts in (False, True):
        path = write_step(tmp_path, [0.0, 1.0])
        (texts_path(path) if is_texts else path).unlink()
        assert sample_rows(tmp_path, 20) == []


@pytest.mark.distributed
def test_a_run_moves_all_weights_and_writes_its_summary_and_configuration(
    replay_config: Path, random_model: Path, tmp_path: Path
) -> None:
    settings = ("train.steps=2", "algorithm.bapo.contribution=gradient", "algorithm.epochs=2")
    rows = train(replay_config, tmp_path, *settings)
    assert [row["train/updates"] for row in rows] == [4.0, 4.0]
    before = load_file(random_model / "model.safetensors")
    assert sorted(differing_weights(tmp_path, before)) == sorted(before)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["updates"], summary["seed"]) == (2, 8, 0)
    assert summary["accuracy_before"] is None
    assert summary["generated_tokens_per_s"] is None  # whatever the dumps say
    written = tmp_path / "config.yaml"
    assert written.read_text().startswith(f"# commit {summary['commit'] or 'unknown'}\n# bapo-")
    assert load_config(written).train.max_tokens_per_micro_batch == 128


@pytest.mark.parametrize(
    ("finished_steps", "unreported", "step"), [(0, None, 0), (3, None, 4), (3, {"loss": 1.0}, 3)]
)
def test_the_next_row_of_metrics_is_that_of_the_step_without_one(
    finished_steps: int, unreported: dict[str, float] | None, step: int
) -> None:
    progress = RunProgress(finished_steps=finished_steps, unreported=unreported)
    assert progress.first_unreported == step
