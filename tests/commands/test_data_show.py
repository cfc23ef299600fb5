"""``data show``: counts, lengths, shares, prompts and dumps, without starting anything."""

from __future__ import annotations

import io
import json

import pytest
import typer
import yaml
from rich.console import Console

from bapo_megatron import cli
from bapo_megatron.commands.data_show import (
    inspect_data,
    inspect_dump,
    print_data,
    print_dump,
    token_lengths,
)
from bapo_megatron.config.load import load_config
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import write_batch, write_texts
from bapo_megatron.types import FinishReason, Group, Prompt, RolloutBatch, SampleText
from tests.data.rows import rendered, write_jsonl
from tests.data.samples import make_episode, make_sample


@pytest.fixture
def config_file(tmp_path, tokenizer_dir):
    """Two training sets, one with every kind of trouble, and an evaluation set."""
    sums = [{"question": f"What is {n}+1?", "answer": f"so\n#### {n + 1}"} for n in range(30)]
    write_jsonl(tmp_path / "sums.jsonl", *sums)
    write_jsonl(
        tmp_path / "mixed.jsonl",
        {"prompt": "What is 7+1?", "answer": "8", "level": 2},
        {"prompt": "What is 7+1?", "answer": "9"},
        {"prompt": "x" * 200, "answer": "1"},
        {"prompt": "no answer"},
    )
    write_jsonl(tmp_path / "heldout.jsonl", sums[4], {"question": "New?", "answer": "#### 1"})
    settings = {
        "name": "show",
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tokenizer_dir)},
        "data": {
            "train": [
                {"path": str(tmp_path / "sums.jsonl"), "weight": 3},
                {"path": str(tmp_path / "mixed.jsonl")},
            ],
            "max_prompt_tokens": 100,
            "on_bad_row": "skip",
            "shuffle": False,
        },
        "rollout": {"groups_per_step": 4},
        "eval": {"sets": [{"path": str(tmp_path / "heldout.jsonl")}]},
    }
    path = tmp_path / "show.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def printed(print_found, *found, **console):
    stream = io.StringIO()
    print_found(Console(file=stream, width=300, **console), *found)
    return stream.getvalue()


def test_everything_about_the_sets_is_in_the_report(config_file, tmp_path):
    report, _ = inspect_data(load_config(config_file), num_rows=2)

    sums, mixed, heldout = report["sets"]
    assert [each["use"] for each in report["sets"]] == ["train", "train", "eval"]
    assert (sums["kept"], sums["share"], sums["epoch_steps"]) == (30, 0.75, 10.0)
    assert (mixed["kept"], mixed["share"], mixed["epoch_steps"]) == (2, 0.25, 2.0)
    assert (heldout["kept"], heldout["share"], heldout["epoch_steps"]) == (2, None, None)
    counts = ("num_rows", "num_bad", "num_too_long", "num_duplicates", "num_contradictions")
    assert [mixed["report"][name] for name in counts] == [4, 1, 1, 1, 1]
    formats = [each["report"]["row_format"] for each in report["sets"]]
    assert formats == ["gsm8k", "columns", "gsm8k"]
    # 3 special tokens, and one per byte of the rest: user, assistant, 3 line ends, the question.
    assert sums["tokens"] == {"min": 31, "median": 32, "p95": 32, "max": 32}
    (overlap,) = report["overlaps"]
    assert (overlap["train_name"], overlap["eval_name"]) == ("sums", "heldout")
    assert overlap["first_train_id"] == "sums.jsonl:4"
    warnings = "\n".join(report["warnings"])
    for expected in ("rows are bad", "are longer than", "repeat the prompt", "different answers"):
        assert expected in warnings
    assert "1 of 2 prompts of evaluation set 'heldout' are in training set 'sums'" in warnings


def test_the_prompts_are_the_first_draws_of_training_as_the_engine_sees_them(config_file):
    report, special_tokens = inspect_data(load_config(config_file), num_rows=4)

    assert [(p["prompt_id"], p["answer"]) for p in report["prompts"]["train"]] == [
        ("sums.jsonl:0", "1"),
        ("sums.jsonl:1", "2"),
        ("sums.jsonl:2", "3"),
        ("mixed.jsonl:0", "8"),
    ]
    assert [p["prompt_id"] for p in report["prompts"]["eval: heldout"]] == [
        "heldout.jsonl:0",
        "heldout.jsonl:1",
    ]
    shown = report["prompts"]["train"][3]
    assert shown["text"] == rendered("What is 7+1?")
    assert (shown["source"], shown["row"]) == ("mixed", {"level": 2})
    assert special_tokens == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]


def test_a_pipe_gets_markdown(config_file):
    lines = printed(print_data, *inspect_data(load_config(config_file), num_rows=1)).splitlines()

    header = next(line for line in lines if line.startswith("| set"))
    cells = [cell.strip() for cell in header.strip("|").split("|")]
    assert cells[:8] == ["set", "use", "format", "rows", "bad", "too long", "duplicates", "prompts"]
    row = next(line for line in lines if line.startswith("| mixed"))
    assert [cell.strip() for cell in row.strip("|").split("|")][:8] == [
        "mixed", "train", "columns", "4", "1", "1", "1", "2",
    ]  # fmt: skip
    assert any(line.startswith("- ") and "rows are bad" in line for line in lines)
    start = lines.index("```")
    assert lines[start + 1 : start + 5] == [*rendered("What is 0+1?").splitlines(), "```"]
    assert lines[start - 2].startswith("### train · sums.jsonl:0 · ")


def test_markup_in_a_prompt_is_shown_and_not_obeyed(config_file, tmp_path):
    nasty = {"prompt": "[bold]x[/] ```\ncode\n``` [/nope]", "answer": "[red]"}
    write_jsonl(tmp_path / "nasty.jsonl", nasty)
    config = load_config(config_file, [f"data.train={{path: {tmp_path}/nasty.jsonl, name: '[a]'}}"])
    found = inspect_data(config, num_rows=1)
    piped = printed(print_data, *found)

    for text in (piped, printed(print_data, *found, force_terminal=True, no_color=True)):
        assert "[bold]x[/] ```" in text
        assert "answer [red]" in text
        assert "[a]" in text
    assert "\n````\n" in piped


def test_the_command_prints_json(config_file, capsys):
    cli.app(["data", "show", str(config_file), "--json", "--rows", "1"], standalone_mode=False)

    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["sets"]] == ["sums", "mixed", "heldout"]
    assert report["sets"][0]["tokens"].keys() == {"min", "median", "p95", "max"}
    assert report["overlaps"][0]["num_eval_prompts"] == 1
    assert report["prompts"]["train"][0]["text"] == rendered("What is 0+1?")
    assert len(report["warnings"]) == 6


def test_what_is_missing_is_named(config_file, capsys):
    def error_of(*overrides):
        with pytest.raises(ValueError, match=r"\S") as caught:
            cli.app(["data", "show", str(config_file), *overrides], standalone_mode=False)
        return str(caught.value)

    assert error_of("data.train=null", "eval.sets=[]") == (
        "data.train: needed without eval.sets, got null; set data.train.path=FILE"
    )
    assert error_of("data.chat_template=no.jinja").startswith(
        "data.chat_template: no such file 'no.jinja'"
    )
    assert error_of("eval.sets=[{path: 'no-*.jsonl', name: x}]").startswith(
        "eval.sets[0].path: no file matches 'no-*.jsonl'"
    )
    assert error_of("model.path=nowhere").startswith("nowhere: no usable tokenizer")


def test_lengths_are_quantiles_by_nearest_rank():
    prompts = [Prompt("x:0", tuple(range(n)), "", "") for n in range(1, 41)]

    assert token_lengths(prompts) == {"min": 1, "median": 20, "p95": 38, "max": 40}
    assert token_lengths(prompts[:1]) == {"min": 1, "median": 1, "p95": 1, "max": 1}


NASTY = "[bold]x[/] ```\ncode\n``` [/nope]\x1b[31m\x9b2J"


@pytest.fixture
def dump(tmp_path):
    """A group of three turns and one turn, without texts."""
    samples = (make_episode(3, (2, 4, 1, 1, 3)), make_sample(3, 5, index=1))
    samples[1].prompt = samples[0].prompt
    samples[0].finish_reason = FinishReason.TURNS
    path = tmp_path / "rollouts" / "step_000005.parquet"
    write_batch(path, RolloutBatch(step=5, version=9, groups=(Group(0, samples),)))
    return path


@pytest.fixture
def texts(dump):
    turns = ("add 3 4", "7 [red]", "mul 7 2", "14", NASTY)
    beside = [
        SampleText(0, 0, "(3 + 4) · 2?", "14", NASTY, turns),
        SampleText(0, 1, "(3 + 4) · 2?", "14", "It is 14."),
    ]
    write_texts(dump, 5, beside)


@pytest.mark.usefixtures("texts")
def test_a_dump_is_shown_by_turns(dump):
    lines = printed(print_dump, inspect_dump(dump, 2)).splitlines()

    assert lines[0] == f"{dump} · step 5 · version 9 · 1 groups · 2 samples"
    assert lines[1:18] == [
        "",
        "### group 0 · sample 0 · train.jsonl:0 · turns · reward 0",
        "",
        "- reward components: math 0 · style/words 7.25",
        "- weights versions (tokens): 0 (2) · 1 (2) · 2 (2)",
        "- tokens: 6 sampled, 5 written",
        "- answer: 14",
        "",
        "**prompt**",
        "",
        "```",
        "(3 + 4) · 2?",
        "```",
        "",
        "**turn 1 · policy · 2 tokens**",
        "",
        "```",
    ]
    headings = [line for line in lines if line.startswith("**")]
    assert headings == [
        "**prompt**",
        "**turn 1 · policy · 2 tokens**",
        "**environment · 4 tokens**",
        "**turn 2 · policy · 1 tokens**",
        "**environment · 1 tokens**",
        "**turn 3 · policy · 3 tokens**",
        "**prompt**",
        "**turn 1 · policy · 5 tokens**",
    ]
    assert lines[-3:] == ["```", "It is 14.", "```"]
    first = printed(print_dump, inspect_dump(dump, 1))
    assert "sample 1" not in first
    assert "2 samples" in first


@pytest.mark.usefixtures("texts")
def test_what_a_model_wrote_is_neither_markup_nor_a_control_sequence(dump):
    report = inspect_dump(dump, 1)
    piped = printed(print_dump, report)
    shown = printed(print_dump, report, force_terminal=True, no_color=True)

    for text in (piped, shown):
        assert "[bold]x[/] ```" in text
        assert "``` [/nope]" in text
        assert "7 [red]" in text
    assert "\n````\n[bold]" in piped
    assert "␛[31m�2J" in shown
    assert "\x1b[31m" not in shown
    assert "\x9b" not in shown


def test_a_dump_without_texts_shows_numbers_of_tokens(dump):
    report = inspect_dump(dump, 1)

    piped = printed(print_dump, report)

    for text in (piped, printed(print_dump, report, force_terminal=True, no_color=True)):
        assert "No texts beside the dump: numbers of tokens only." in text
        assert "tokens: 6 sampled, 5 written" in text
        for heading in ("turn 1 · policy · 2 tokens", "environment · 4 tokens", "turn 3 · policy"):
            assert heading in text
        assert "```" not in text
        assert "answer:" not in text
    assert "prompt" not in "".join(line for line in piped.splitlines() if "**" in line)


@pytest.mark.usefixtures("texts")
def test_the_command_prints_a_dump_as_json(dump, capsys):
    cli.app(["data", "show", str(dump), "--json", "-n", "2"], standalone_mode=False)

    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["version"], report["has_texts"]) == (5, 9, True)
    first, second = report["samples"]
    assert (first["finish_reason"], first["versions"]) == ("turns", [[0, 2], [1, 2], [2, 2]])
    assert (first["sampled_tokens"], first["written_tokens"]) == (6, 5)
    assert first["parts"][1] == {"author": "environment", "num_tokens": 4, "text": "7 [red]"}
    assert [part["num_tokens"] for part in first["parts"]] == [2, 4, 1, 1, 3]
    assert second["parts"] == [{"author": "policy", "num_tokens": 5, "text": "It is 14."}]


@pytest.mark.usefixtures("texts")
def test_the_command_shows_one_sample_unless_asked_for_more(dump, capsys):
    cli.app(["data", "show", str(dump)], standalone_mode=False)
    assert capsys.readouterr().out.count("### group") == 1

    cli.app(["data", "show", str(dump), "-n", "0"], standalone_mode=False)
    assert capsys.readouterr().out.count("### group") == 0


def test_a_dump_takes_no_overrides(dump):
    with pytest.raises(typer.BadParameter, match="is a rollout dump, which takes no 'seed=1'"):
        cli.app(["data", "show", str(dump), "seed=1"], standalone_mode=False)


def test_a_dump_that_is_missing_or_none_is_named(dump, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet"):
        inspect_dump(tmp_path / "nowhere.parquet", 1)
    write_texts(dump, 5, [SampleText(0, 0, "?", "14", "14")])
    with pytest.raises(DumpError, match=r"step_000005\.parquet: the texts of a dump"):
        inspect_dump(dump.parent / "texts" / dump.name, 1)


def test_texts_of_another_dump_are_refused(dump):
    write_texts(dump, 5, [SampleText(0, 0, "?", "14", "c", ("a", "b", "c"))])

    with pytest.raises(DumpError, match="sample 0 of group 0 has 3 texts, its tokens are of 5 par"):
        inspect_dump(dump, 1)


def test_a_sample_without_its_text_shows_numbers_of_tokens(dump):
    write_texts(dump, 5, [SampleText(0, 1, "?", "14", "It is 14.")])

    first, second = inspect_dump(dump, 2)["samples"]
    assert (first["prompt"], first["parts"][0]["text"]) == (None, None)
    assert (second["prompt"], second["parts"][0]["text"]) == ("?", "It is 14.")
