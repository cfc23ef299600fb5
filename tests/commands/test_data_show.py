"""``data show``: counts, lengths, shares and prompts, without starting anything."""

import io
import json
import re

import pytest
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
    path = tmp_path / "show.yaml"
    path.write_text(
        f"name: show\nrun_dir: {tmp_path}/run\nmodel: {{path: {tokenizer_dir}}}\n"
        "data:\n"
        f"  train: [{{path: {tmp_path}/sums.jsonl, weight: 3}}, {{path: {tmp_path}/mixed.jsonl}}]\n"
        "  max_prompt_tokens: 100\n  on_bad_row: skip\n  shuffle: false\n"
        "rollout: {groups_per_step: 4}\n"
        f"eval: {{sets: [{{path: {tmp_path}/heldout.jsonl}}]}}\n"
    )
    return path


def printed(report):
    stream = io.StringIO()
    print_data(Console(file=stream, width=300), report)
    return stream.getvalue()


def test_everything_about_the_sets_is_in_the_report(config_file):
    report = inspect_data(load_config(config_file), num_rows=2)

    sums, mixed, heldout = report["sets"]
    assert [entry["use"] for entry in report["sets"]] == ["train", "train", "eval"]
    assert (sums["kept"], sums["share"], sums["epoch_steps"]) == (30, 0.75, 10.0)
    assert (mixed["kept"], mixed["share"], mixed["epoch_steps"]) == (2, 0.25, 2.0)
    assert (heldout["kept"], heldout["share"], heldout["epoch_steps"]) == (2, None, None)
    counts = ("num_rows", "num_bad", "num_too_long", "num_duplicates", "num_contradictions")
    assert [mixed["report"][name] for name in counts] == [4, 1, 1, 1, 1]
    formats = [entry["report"]["row_format"] for entry in report["sets"]]
    assert formats == ["gsm8k", "columns", "gsm8k"]
    # 3 special tokens, and one per byte of the rest: user, assistant, 3 line ends, the question.
    assert sums["tokens"] == {"min": 31, "median": 32, "p95": 32, "max": 32}
    (overlap,) = report["overlaps"]
    assert (overlap["train_name"], overlap["eval_name"]) == ("sums", "heldout")
    assert (overlap["first_train_id"], overlap["num_eval_prompts"]) == ("sums.jsonl:4", 1)
    warnings = "\n".join(report["warnings"])
    for expected in ("rows are bad", "are longer than", "repeat the prompt", "different answers"):
        assert expected in warnings
    assert "1 of 2 prompts of evaluation set 'heldout' are in training set 'sums'" in warnings
    assert len(report["warnings"]) == 6


def test_the_prompts_are_the_first_draws_of_training_as_the_engine_sees_them(config_file, capsys):
    cli.app(["data", "show", str(config_file), "--json", "--rows", "4"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)

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


def test_a_pipe_gets_markdown(config_file):
    lines = printed(inspect_data(load_config(config_file), num_rows=1)).splitlines()

    header, _, _, mixed = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ][:4]
    assert header[:9] == [
        "set", "use", "format", "rows", "bad", "no answer", "too long", "duplicates", "prompts",
    ]  # fmt: skip
    assert mixed[:9] == ["mixed", "train", "columns", "4", "1", "0", "1", "1", "2"]
    assert any(line.startswith("- ") and "rows are bad" in line for line in lines)
    (start,) = [n for n, line in enumerate(lines) if line.startswith("### train · sums.jsonl:0 · ")]
    text = [f"    {line}" for line in rendered("What is 0+1?").splitlines()]
    assert lines[start + 1 : start + 3 + len(text)] == ["- row: {}", "", *text]


def test_lengths_are_quantiles_by_nearest_rank():
    prompts = [Prompt("x:0", tuple(range(n)), "", "") for n in range(1, 41)]

    assert token_lengths(prompts) == {"min": 1, "median": 20, "p95": 38, "max": 40}
    assert token_lengths(prompts[:1]) == {"min": 1, "median": 1, "p95": 1, "max": 1}


def test_references_that_are_no_answers_are_counted_in_the_table_and_named(config_file, tmp_path):
    rows = [{"prompt": f"q{n}", "answer": a} for n, a in enumerate(["proof", "notfound", "7"])]
    write_jsonl(tmp_path / "proofs.jsonl", *rows)
    override = f"data.train={{path: {tmp_path}/proofs.jsonl}}"

    text = printed(inspect_data(load_config(config_file, [override]), num_rows=0))
    kept = inspect_data(load_config(config_file, [override, "reward.no_answers=[]"]), num_rows=0)

    assert "2 of 3 references are not answers ('proof' 1, 'notfound' 1) and were left out" in text
    assert re.search(r"\| proofs +\| train \| columns +\| +3 \| +0 \| +2 \|", text)
    assert kept["sets"][0]["kept"] == 3


@pytest.mark.parametrize("use", ["train", "eval"])
def test_a_reference_that_holds_no_tests_is_refused_with_its_row(config_file, tmp_path, use):
    rows = [{"prompt": f"q{n}", "answer": a} for n, a in enumerate(["7", "{'inputs': []}"])]
    path = write_jsonl(tmp_path / "tests.jsonl", *rows)
    reward = "{functions: [{name: code, function: program}], timeout_s: 9}"
    overrides = [f"reward={reward}", "data.on_bad_row=raise", f"data.train={{path: {path}}}"]
    if use == "eval":
        overrides = [f"reward={reward}", f"eval.sets=[{{path: {path}}}]"]

    with pytest.raises(ValueError, match=r"tests.jsonl:2: the reference answer must hold tests"):
        inspect_data(load_config(config_file, overrides), num_rows=0)


def test_demonstrations_are_shown_with_what_trains_in_colour(config_file, tmp_path):
    rows = [{"prompt": f"{n}+1?", "response": f"[b]{n + 1}"} for n in range(3)]
    write_jsonl(tmp_path / "shown.jsonl", *rows, {"prompt": "?"})
    override = f"demonstrations.train=[{{path: {tmp_path}/shown.jsonl}}]"

    report = inspect_data(load_config(config_file, [override, "data.train=null"]), num_rows=2)

    shown = report["demonstrations"]
    assert [row["key"] for row in shown["rows"]] == ["shown.jsonl:0", "shown.jsonl:1"]
    assert shown["rows"][1]["parts"] == [(False, rendered("1+1?")), (True, "[b]2<|im_end|>")]
    assert (shown["report"]["num_kept"], shown["report"]["num_bad"]) == (3, 1)
    assert "; 1 bad rows left out" in shown["summary"]
    assert "\n**trained**\n\n    [b]1<|im_end|>\n" in printed(report)
    stream = io.StringIO()
    print_data(
        Console(file=stream, width=300, force_terminal=True, color_system="standard"), report
    )
    assert "\x1b[32m    [b]1<|im_end|>\x1b[0m" in stream.getvalue()
