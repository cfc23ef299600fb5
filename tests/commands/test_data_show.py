"""``data show``: counts, lengths, shares and prompts, without starting anything."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from bapo_megatron import cli
from bapo_megatron.commands.data_show import inspect_data, print_data, token_lengths
from bapo_megatron.config.load import load_config
from bapo_megatron.types import Prompt
from tests.data.rows import rendered, write_jsonl


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
    nasty = {"prompt": "[bold]x[/] ```\ncode\n``` [/nope]\x1b[2J", "answer": "[red]\x9b2J"}
    write_jsonl(tmp_path / "nasty.jsonl", nasty)
    config = load_config(config_file, [f"data.train={{path: {tmp_path}/nasty.jsonl, name: '[a]'}}"])
    found = inspect_data(config, num_rows=1)
    piped = printed(print_data, *found)

    for text in (piped, printed(print_data, *found, force_terminal=True, no_color=True)):
        assert "[bold]x[/] ```" in text
        assert "answer [red]" in text
        assert "[a]" in text
        assert "[/nope]␛[2J" in text
        assert "\x1b[2J" not in text
        assert "\x9b" not in text
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
        f"data.chat_template: no such file '{Path('no.jinja').absolute()}'"
    )
    assert error_of("eval.sets=[{path: 'no-*.jsonl', name: x}]").startswith(
        f"eval.sets[0].path: no file matches '{Path('no-*.jsonl').absolute()}'"
    )
    assert error_of("model.path=nowhere").startswith(
        f"{Path('nowhere').absolute()}: no usable tokenizer"
    )


def test_lengths_are_quantiles_by_nearest_rank():
    prompts = [Prompt("x:0", tuple(range(n)), "", "") for n in range(1, 41)]

    assert token_lengths(prompts) == {"min": 1, "median": 20, "p95": 38, "max": 40}
    assert token_lengths(prompts[:1]) == {"min": 1, "median": 1, "p95": 1, "max": 1}
