"""``samples show``: a step's responses for reading, safe for the terminal."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from rich.console import Console

from bapo_megatron import cli
from bapo_megatron.commands.samples import inspect_step, print_step
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import read_batch, write_batch, write_texts
from bapo_megatron.tools.report.rollouts import read_step
from bapo_megatron.types import FinishReason, Group, RolloutBatch, SampleText, VersionSpan
from tests.data.samples import add_branch, make_episode, make_sample
from tests.tools.report.made_runs import SCRIPT, make_run

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
"""Characters that no output may hold, apart from the console's own colours."""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A group of three turns and one turn, without texts and configuration."""
    samples = (make_episode(3, (2, 4, 1, 1, 3)), make_sample(3, 5, index=1))
    samples[1].prompt = samples[0].prompt
    samples[0].finish_reason = FinishReason.TURNS
    path = tmp_path / "rollouts" / "step_000005.parquet"
    write_batch(path, RolloutBatch(step=5, version=9, groups=(Group(0, samples),)))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of three groups; step 3 has other sources, exits, lengths, ages and rewards."""
    path = make_run(tmp_path / "run", rewards=(0.0, 1.0))
    groups = []
    for group_id, (source, reward, length, version, reason) in enumerate(
        [
            ("sums", 0.25, 3, 7, FinishReason.STOP),
            ("words", 2.0, 9, 5, FinishReason.LENGTH),
            ("sums", -1.0, 6, 8, FinishReason.STOP),
        ]
    ):
        samples = [make_sample(3, length + index, group_id, index) for index in (0, 1)]
        samples[1].prompt = samples[0].prompt
        object.__setattr__(samples[0].prompt, "source", source)
        for index, sample in enumerate(samples):
            sample.reward = reward + index / 2
            sample.versions = (VersionSpan(version - index, length + index),)
            sample.finish_reason = reason
        groups.append(Group(group_id, tuple(samples)))
    batch = RolloutBatch(step=3, version=9, groups=tuple(groups))
    write_batch(path / "rollouts" / "step_000003.parquet", batch)
    return path


def report_of(dump: Path, num_samples: int) -> dict[str, Any]:
    step = read_step(dump, {})
    return inspect_step(dump, step, step.batch.samples, num_samples)


def printed(report: dict[str, Any]) -> str:
    stream = io.StringIO()
    print_step(Console(file=stream, width=300), report)
    return stream.getvalue()


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    cli.app(["samples", "show", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return json.loads(output_of(capsys, *arguments, "--json"))


TURNS = [
    "**turn 1 · policy · 2 tokens**",
    "**turn 1 · environment · 4 tokens**",
    "**turn 2 · policy · 1 tokens**",
    "**turn 2 · environment · 1 tokens**",
    "**turn 3 · policy · 3 tokens**",
]


def test_a_response_is_shown_by_turns_with_what_its_reward_is_made_of(dump: Path) -> None:
    turns = ("add 3 4", "7 [red]", "mul 7 2", "14", "it is")
    beside = [
        SampleText(0, 0, "(3 + 4) · 2?", "14", "it is", turns, "x\x1b", "different"),
        SampleText(0, 1, "(3 + 4) · 2?", "14", "It is 14."),
    ]
    write_texts(dump, 5, beside)
    report = report_of(dump, 1)
    (sample,) = report["samples"]
    assert (sample["finish_reason"], sample["reward"], sample["advantage"]) == ("turns", 0.0, None)
    assert sample["reward_components"] == {"math": 0.0, "style/words": 7.25}
    graded = [sample[name] for name in ("answer", "answer_found", "extracted", "reason")]
    assert graded == ["14", True, "x\x1b", "different"]
    assert (sample["age"], sample["versions"]) == (9, [(0, 2), (1, 2), (2, 2)])
    counts = [sample[f"{kind}_tokens"] for kind in ("sampled", "trained", "written")]
    assert counts == [6, 6, 5]

    lines = printed(report).splitlines()
    titles = [f"### {dump}", "### group 0 · sample 0 · train.jsonl:0"]
    assert [line for line in lines if line.startswith("###")] == titles
    facts = {"- step: 5", "- version: 9", "- num_chosen: 2", "- estimator: ?", "- age: 9"}
    assert facts | {'- extracted: "x\\u001b"', "- versions: [[0, 2], [1, 2], [2, 2]]"} <= set(lines)
    assert [line for line in lines if line.startswith("**")] == ["**prompt**", *TURNS]
    prompt = lines.index("**prompt**")
    assert lines[prompt + 1 : prompt + 7] == [
        *("", "    (3 + 4) · 2?", "", TURNS[0], "", "    add 3 4"),
    ]
    assert printed(report_of(dump, 2)).endswith("tokens**\n\n    It is 14.\n")


def test_further_sequences_of_an_episode_follow_the_first(dump: Path) -> None:
    batch = read_batch(dump)
    add_branch(batch.samples[0], (1, 2, 4), shared_tokens=3)
    write_batch(dump, batch)
    (sample,) = report_of(dump, 1)["samples"]
    assert (sample["sampled_tokens"], sample["written_tokens"]) == (6 + 5, 5 + 2)
    assert sample["trained_tokens"] == 6 + 5
    assert sample["parts"][-3:] == [
        {"sequence": 1, "author": "policy", "num_tokens": 1, "text": None},
        {"sequence": 1, "author": "environment", "num_tokens": 2, "text": None},
        {"sequence": 1, "author": "policy", "num_tokens": 4, "text": None},
    ]
    lines = printed(report_of(dump, 1)).splitlines()
    assert [line for line in lines if line.startswith("**")] == [
        *TURNS,
        "**sequence 2 · turn 1 · policy · 1 tokens**",
        "**sequence 2 · turn 1 · environment · 2 tokens**",
        "**sequence 2 · turn 2 · policy · 4 tokens**",
    ]


def test_json_of_an_attack_has_no_character_that_a_terminal_obeys(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = output_of(capsys, run, "--step", 1, "--json")

    assert not OBEYED.search(output)
    assert json.loads(output)["samples"][0]["parts"][0]["text"] == f"{SCRIPT} answer is 3"


def test_samples_are_sorted_filtered_and_limited(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*options: object) -> list[tuple[int, int]]:
        samples = json_of(capsys, run, "--step", 3, *options)["samples"]
        return [(sample["group_id"], sample["index"]) for sample in samples]

    by_reward = [(1, 1), (1, 0), (0, 1), (0, 0), (2, 1), (2, 0)]
    assert chosen("-n", 9) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert chosen("--sort", "reward", "-n", 9) == by_reward
    assert chosen("--sort", "reward") == by_reward[:4]
    assert chosen("--sort", "length", "-n", 2) == [(1, 1), (1, 0)]
    # The batch has version 9; the oldest tokens are of 7, 6, 5, 4, 8 and 7.
    assert chosen("--sort", "age", "-n", 9) == [(1, 1), (1, 0), (0, 1), (0, 0), (2, 1), (2, 0)]
    assert chosen("--sort", "advantage", "-n", 3) == [(0, 1), (1, 1), (2, 1)]
    assert chosen("--group", 2) == [(2, 0), (2, 1)]
    assert chosen("--exit", "stop", "--sort", "reward", "-n", 1) == [(0, 1)]
    assert chosen("--group", 9) == []


def test_advantages_are_those_of_the_run_unless_its_estimator_is_a_users(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def advantages(*options: object) -> list[float]:
        report = json_of(capsys, run, "--step", 1, *options)
        return [sample["advantage"] for sample in report["samples"]]

    # Rewards 0 and 1: mean 0.5, unbiased standard deviation 0.70711.
    assert advantages() == pytest.approx([-0.70711, 0.70711] * 2, abs=1e-5)
    custom = "tests.algorithm.own_objectives:rank_advantage"
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("advantage: grpo", f"advantage: {custom}"))
    assert advantages() == [None] * 4
    with pytest.raises(typer.BadParameter, match="--sort advantage"):
        output_of(capsys, run, "--step", 1, "--sort", "advantage")


def test_the_newest_step_is_shown_unless_one_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json_of(capsys, run)["step"] == 3
    assert json_of(capsys, run / "rollouts" / "step_000001.parquet")["step"] == 1
    with pytest.raises(ValueError, match="no dump of step 2;"):
        output_of(capsys, run, "--step", 2)
    with pytest.raises(ValueError, match="no dump of a step;"):
        output_of(capsys, run / "rollouts")
    with pytest.raises(typer.BadParameter, match="takes no --step"):
        output_of(capsys, run / "rollouts" / "step_000001.parquet", "--step", 1)


def test_tokens_that_a_setting_keeps_out_of_the_loss_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("reward:\n", "reward:\n  truncated: mask\n"))
    samples = json_of(capsys, run, "--step", 3, "-n", 9)["samples"]
    assert [sample["trained_tokens"] for sample in samples] == [3, 4, 0, 0, 6, 7]


def test_a_dump_without_texts_shows_numbers_of_tokens(dump: Path) -> None:
    lines = printed(report_of(dump, 1)).splitlines()

    assert {"- has_texts: false", "- answer: ?"} <= set(lines)
    assert not [line for line in lines if line.startswith(("    ", "**prompt"))]
    assert [line for line in lines if line.startswith("**")] == TURNS


def test_texts_of_another_dump_are_refused(dump: Path) -> None:
    write_texts(dump, 5, [SampleText(0, 0, "?", "14", "c", ("a", "b", "c"))])

    with pytest.raises(DumpError, match="sample 0 of group 0 has 3 texts"):
        report_of(dump, 1)


def saved(path: Path, *arguments: object) -> list[dict[str, Any]]:
    out = path.parent / "good.parquet"
    options = ["--out", out, "--min-reward", 1, *arguments]
    cli.app(["samples", "save", *map(str, [path, *options])], standalone_mode=False)
    return pq.read_table(out).to_pylist()


def test_good_responses_of_all_steps_become_demonstrations_once_and_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for step, rewards in ((1, (1.0, 1.0, 0.5)), (2, (1.0, 2.0, 1.0))):
        episode, *plain = make_episode(3, (2, 4, 1)), *(make_sample(3, 5, index=n) for n in (1, 2))
        add_branch(episode, (1, 2, 4), shared_tokens=3)
        samples = (episode, *plain)
        for sample, reward in zip(samples, rewards, strict=True):
            sample.prompt, sample.reward = episode.prompt, reward
            sample.finish_reason = FinishReason.STOP
        plain[1].response_token_ids = plain[1].response_token_ids + step  # equal in no two steps
        if step == 2:
            plain[1].finish_reason = FinishReason.LENGTH
        groups = (Group(0, samples),)
        path = run / "rollouts" / f"step_00000{step}.parquet"
        write_batch(path, RolloutBatch(step=step, version=9, groups=groups))

    rows = saved(run)

    assert [(row["step"], row["reward"]) for row in rows] == [(2, 1.0), (2, 1.0), (2, 2.0)]
    first, branch, _ = rows
    prompt, response = episode.prompt.token_ids.tolist(), episode.response_token_ids.tolist()
    assert first["token_ids"] == prompt + response
    assert first["is_trained"] == [False] * 3 + [True] * 2 + [False] * 4 + [True]
    assert branch["is_trained"][-7:] == [True] + [False] * 2 + [True] * 4
    assert first["prompt_id"] == "train.jsonl:0"
    assert "2 of 6 responses, to 1 prompts" in capsys.readouterr().err
    assert len(saved(run, "--per-prompt", 1)) == 2
    with pytest.raises(ValueError, match=r"rollouts: none of 6 responses .* lower --min-reward"):
        saved(run, "--min-reward", 9)
    with pytest.raises(typer.BadParameter, match=r"--out: must end in \.parquet"):
        saved(run, "--out", "x.jsonl")
