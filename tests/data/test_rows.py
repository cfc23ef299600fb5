"""From the columns of well-known data sets to question, answer and the rest of the row."""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.data.rows import (
    DataError,
    Row,
    boxed_answer,
    parse_answer,
    recognise,
    worked_answer,
)
from tests.data.rows import (
    DAPO,
    DAPO_PROCESSED,
    GSM8K,
    MATH,
    MATH_500,
    SKYWORK,
    VERL,
    write_jsonl,
)


def read(fields: dict[str, Any], **settings: Any):
    """The format's name, and question, answer and the other columns of a row."""
    dataset = DatasetConfig(path="x.jsonl", **settings)
    fields = copy.deepcopy(fields)
    row_format = recognise(dataset, fields)
    assert row_format is not None
    row = Row("x.jsonl:0", "x.jsonl:1", fields)
    return row_format.name, *row_format.read(row, dataset.row_columns, set(), lambda asked: asked)


@pytest.mark.parametrize(
    ("fields", "name", "question", "rest"),
    [
        (
            SKYWORK,
            "verl",
            SKYWORK["prompt"],
            {
                "data_source": "train-math-numinamath1.5_olympiads",
                "ability": "math",
                "reward_model": {"style": "rule"},
                "extra_info": SKYWORK["extra_info"],
            },
        ),
        (
            DAPO_PROCESSED,
            "verl",
            "What is $1+1$?",
            {
                "solution": "2",
                "data_source": "math_dapo",
                "source_prompt": DAPO["prompt"],
                "ability": "MATH",
                "reward_model": {"style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": "9a9b6eb4"},
            },
        ),
        (GSM8K, "gsm8k", "What is 1+1?", {}),
        (MATH, "math", "What is $1+1$?", {"level": "Level 1", "type": "Prealgebra"}),
        (
            MATH_500,
            "math",
            "What is $1+1$?",
            {
                "solution": MATH_500["solution"],
                "subject": "Prealgebra",
                "level": 1,
                "unique_id": "test/prealgebra/1.json",
            },
        ),
        ({"prompt": "1+1?", "answer": 2, "id": 5}, "columns", "1+1?", {"id": 5}),
        ({"question": "1+1?", "answer": "2"}, "columns", "1+1?", {}),
    ],
    ids=["skywork", "dapo-text", "gsm8k", "math", "math-500", "columns", "plain"],
)
def test_a_known_schema_is_recognised_from_its_columns(fields, name, question, rest):
    assert read(fields) == (name, question, "2", rest)


@pytest.mark.parametrize(
    ("fields", "row_format"), [(SKYWORK, "verl"), (GSM8K, "gsm8k"), (MATH, "math")]
)
def test_a_format_that_is_named_reads_as_the_recognised_one(fields, row_format):
    assert read(fields, row_format=row_format) == read(fields)


def test_columns_are_mapped_for_anything_else():
    fields = {"task": {"text": "1+1?"}, "truth": [{"x": 1}], "gold": 2, "note": "n"}

    rest = {"task": {}, "truth": [{"x": 1}], "note": "n"}
    mapped = read(fields, prompt_column="task.text", answer_column="gold")
    assert mapped == ("columns", "1+1?", "2", rest)


def test_one_mapped_column_leaves_the_other_its_usual_name():
    fields = {"question": "1+1?", "answer": "x\n#### 2"}

    assert read(fields, prompt_column="question") == ("columns", "1+1?", "2", {})


def test_columns_of_no_known_format_are_not_guessed():
    assert recognise(DatasetConfig(path="x.jsonl"), {"input": "1+1?", "target": "2"}) is None
    assert recognise(DatasetConfig(path="x.jsonl"), {"problem": "1+1?"}) is None


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        (
            {"question": "1+1?", "answer": "2"},
            {"row_format": "gsm8k"},
            r"x\.jsonl:1: column 'answer' .* got '2'",
        ),
        (
            {"problem": "1+1?", "solution": "It is 2."},
            {"row_format": "math"},
            "column 'solution' .* got 'It is 2.'",
        ),
        (
            {"problem": "1+1?", "level": 1},
            {"row_format": "math"},
            "no column 'solution', only problem, level",
        ),
        (
            {"prompt": "1+1?", "answer": "2"},
            {"row_format": "verl"},
            r"no column 'reward_model.ground_truth', only prompt, answer",
        ),
        (
            {"prompt": "1+1?", "answer": "2", "a": 1},
            {"row_columns": ("a", "b")},
            "no column 'b', only a",
        ),
        (
            {"prompt": "\ud800", "answer": "2"},
            {},
            "column 'prompt' .*surrogate",
        ),
        ({"prompt": "x", "answer": float("nan")}, {}, r"column 'answer' must be .* got NaN"),
        (
            {"prompt": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
            | {"answer": "2"},
            {},
            "column 'prompt' .* assistant: '2'",
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_named(fields, settings, message):
    with pytest.raises(DataError, match=message) as caught:
        read(fields, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (" 42 ", "42"),
        (42, "42"),
        pytest.param(10**400, "1" + "0" * 400, id="beyond a float"),
        (2.5, "2.5"),
        (decimal.Decimal("2.50"), "2.50"),
        ("3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        ("…\n#### 1,234\n", "1,234"),
        ("#### 5\nis not at the end", "#### 5\nis not at the end"),
        (["7"], "7"),
        ('["7"]', "7"),
        ('["1/2", "0.5"]', '["1/2", "0.5"]'),
        (["1/2", 0.5], '["1/2", "0.5"]'),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_answers_are_taken_from_their_usual_forms(value, answer):
    assert parse_answer(value) == answer


@pytest.mark.parametrize(
    "bait",
    [
        "#### a" + " " * 1_000_000 + "b\nc",
        "####" + " " * 1_000_000 + "\nc",
        "#" * 1_000_000 + "\nc",
    ],
    ids=["spaces behind", "spaces between", "marks"],
)
def test_long_solutions_are_read_in_linear_time(bait):
    start_s = time.process_time()

    assert parse_answer(bait) == bait
    assert time.process_time() - start_s < 1


def test_marks_without_an_answer_are_refused():
    for parse in (parse_answer, worked_answer):
        with pytest.raises(ValueError, match="'5 ####'"):
            parse("5\n####  ")


@pytest.mark.parametrize("depth", [2, 900])
def test_a_list_of_lists_is_no_answer(depth):
    value = "1"
    for _ in range(depth):
        value = [value]
    with pytest.raises(ValueError, match="got a list of lists"):
        parse_answer(value)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("#### 1\n#### 2 #### 3", "2 #### 3"),
        ("5+5=10\n#### -1,000.50\n", "-1,000.50"),
    ],
)
def test_the_answer_of_a_worked_solution_stands_behind_the_first_marks_of_its_last_line(
    solution, answer
):
    assert worked_answer(solution) == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\[\boxed{\frac{\sqrt{3}}{2}}.\]", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.} }", r"\left\{ x \right."),
        (r"$\fbox{7}$", "7"),
        (r"so $x = \boxed 5$.", "5"),
        (r"\boxed {\text{(A)}}", r"\text{(A)}"),
        ("\\boxed{\n 12 }", "12"),
    ],
)
def test_the_last_box_of_a_solution_holds_its_answer(solution, answer):
    assert boxed_answer(solution) == answer


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        (r"\boxed{1} \boxed{2", "never closed"),
        (r"\boxed{}", "empty"),
        (None, "got null"),
        ("2", r"with a \\boxed answer"),
    ],
)
def test_a_solution_without_a_closed_box_is_refused(solution, message):
    with pytest.raises(ValueError, match=message):
        boxed_answer(solution)


def test_other_columns_become_json_values_and_bytes_are_left_out(tmp_path, load, caplog):
    row = {
        "prompt": "x",
        "answer": "1",
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "day": datetime.date(2026, 1, 2),
        "took": datetime.timedelta(seconds=90),
        "price": decimal.Decimal("1.50"),
        "score": float("nan"),
        "tags": ["a", None],
        "images": [{"bytes": b"\x89PNG", "path": "a.png"}],
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")

    (prompt,) = load(tmp_path / "x.parquet")

    assert prompt.row == {
        "at": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "took": 90.0,
        "price": "1.50",
        "score": None,
        "tags": ["a", None],
        "images": [{"path": "a.png"}],
    }
    json.dumps(prompt.row, allow_nan=False)
    assert "images.bytes" in caplog.text


def test_only_the_columns_that_are_named_stay_in_memory(tmp_path, load):
    path = write_jsonl(tmp_path / "x.jsonl", {"prompt": "x", "answer": "1", "a": 1, "b": 2})

    assert load(path)[0].row == {"a": 1, "b": 2}
    assert load(path, row_columns=("b",))[0].row == {"b": 2}
    assert load(path, row_columns=())[0].row == {}


@pytest.mark.slow
def test_gsm8k_answers_are_the_final_numbers(shared_data, load):
    prompts = load(shared_data / "gsm8k_test.jsonl")

    assert len(prompts) == 1319
    assert prompts[0].prompt_id == "gsm8k_test.jsonl:0"
    assert prompts[0].answer == "18"
    assert {p.source for p in prompts} == {"gsm8k_test"}
    assert all(p.answer.replace(",", "").lstrip("-").isdigit() for p in prompts)
    assert prompts == load(shared_data / "gsm8k_test.jsonl", prompt_column="question")


def test_aime_in_skywork_s_schema_is_read(shared_data, load):
    prompts = load(shared_data / "aime24.parquet")

    assert len(prompts) == 30
    assert [p.answer for p in prompts[:2]] == ["204", "025"]
    assert prompts[0].text.startswith(
        "<|im_start|>user\nEvery morning Aya goes for a $9$-kilometer"
    )
    assert prompts[0].row == {
        "data_source": "test-math-aime24",
        "ability": "math",
        "reward_model": {"style": "rule"},
        "extra_info": {"index": 0, "split": "test"},
    }
    by_columns = {"answer_column": "reward_model.ground_truth"}
    assert prompts == load(shared_data / "aime24.parquet", **by_columns)


@pytest.mark.parametrize(
    "fields", [SKYWORK, DAPO, VERL, DAPO_PROCESSED], ids=["skywork", "dapo", "verl", "text"]
)
def test_verl_s_rows_are_read_from_parquet_as_from_jsonl(fields, tmp_path, load):
    write_jsonl(tmp_path / "x.jsonl", fields)
    pq.write_table(pa.Table.from_pylist([fields]), tmp_path / "x.parquet")

    (from_json,) = load(tmp_path / "x.jsonl")
    (from_parquet,) = load(tmp_path / "x.parquet")

    assert (from_parquet.text, from_parquet.answer) == (from_json.text, "2")
    assert from_parquet.row == from_json.row
    assert "1+1" in from_json.text
