"""Rows of files and the Hub, and question and answer in the columns of well-known data sets."""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import os
import subprocess
import sys
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
    read_rows,
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
from tests.fakes.fake_hub import FakeHub, as_jsonl

USER = {"role": "user", "content": "1+1?"}


def read(fields: dict[str, Any], **settings: Any):
    """The format's name, and question, answer and the other columns of a row."""
    dataset = DatasetConfig(path="x.jsonl", **settings)
    fields = copy.deepcopy(fields)
    row_format = recognise(dataset, fields)
    assert row_format is not None
    row = Row("x.jsonl:0", "x.jsonl:1", fields)
    return row_format.name, *row_format.read(
        row, dataset.row_columns, set(), lambda asked, _: asked
    )


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
    ids=["skywork", "gsm8k", "math", "math-500", "columns", "plain"],
)
def test_a_known_schema_is_recognised_from_its_columns(fields, name, question, rest):
    assert read(fields) == (name, question, "2", rest)


@pytest.mark.parametrize(
    ("fields", "columns", "rest"),
    [
        ({"prompt": [USER], "label": "2", "metadata": {}}, ([USER], "2"), {"metadata": {}}),
        ({"prompt": "1+1?", "solutions": ["2"], "task": "math"}, ("1+1?", "2"), {"task": "math"}),
        ({"prompt": "1+1?", "solutions": ["1", "2"]}, ("1+1?", '["1", "2"]'), {}),
        (
            {"ID": 7, "Problem": "1+1?", "Solution": "s", "Answer": 2},
            ("1+1?", "2"),
            {"ID": 7, "Solution": "s"},
        ),
        ({"Problem": "1+1?", "Solution": "$\\boxed{2}$"}, ("1+1?", "2"), {}),
        ({"Question": "1+1?", "Answer": "2"}, ("1+1?", "2"), {}),
    ],
    ids=["slime", "areal", "several", "aime", "boxed", "capitals"],
)
def test_columns_of_slime_areal_and_aime_files_are_recognised(fields, columns, rest):
    assert read(fields)[1:] == (*columns, rest)


PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [PARTS], "answer": "2"},
        {"prompt": json.dumps([USER]), "answer": "2"},
        {"prompt": json.dumps([PARTS]), "reward_model": {"ground_truth": "2"}},
        {"prompt": [USER], "reward_model": json.dumps({"ground_truth": "2"})},
    ],
    ids=["parts", "prompt as text", "both", "reward_model as text"],
)
def test_messages_in_parts_and_structs_as_json_text_are_read_as_plain_ones(fields):
    assert read(fields)[1:3] == ([USER], "2")


def test_what_only_looks_like_json_or_has_an_image_is_as_it_was():
    for text in ('[{"role": "user"', "[1, 2] is a list?", '{"a": 1}'):
        assert read({"prompt": text, "answer": "2"})[1] == text
    image = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
    with pytest.raises(DataError, match="column 'prompt' must hold messages with role and content"):
        read({"prompt": [image], "answer": "2"})


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
        ("['3']", "3"),
        (" ['1/2', '0.5'] ", '["1/2", "0.5"]'),
        (r"['\\frac{1}{2}']", r"\frac{1}{2}"),
        (r"['it\'s']", "it's"),
        (r"['\frac{1}{2}']", r"['\frac{1}{2}']"),
        ("['3' '4']", "['3' '4']"),
        ("['a'] or ['b']", "['a'] or ['b']"),
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


def test_tests_of_code_stay_whole() -> None:
    tests = '{"inputs": ["#### 4"], "outputs": ["a\\n#### 5"]}'
    assert parse_answer(tests) == tests


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
        (r"\boxed{1} \boxed{2", "empty or never closed"),
        (r"\boxed{}", "empty or never closed"),
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
        "plots": [{"bytes": b"\x89PNG", "path": "a.png"}],
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
        "plots": [{"path": "a.png"}],
    }
    json.dumps(prompt.row, allow_nan=False)
    assert "plots.bytes" in caplog.text


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"images": [{"bytes": b"\x89PNG", "path": None}]}, r"\[.*"),
        ({"image": "a.png"}, "'a.png'"),
        ({"videos": ["a.mp4"]}, r'\["a.mp4"\]'),
        ({"system": "Be brief."}, "'Be brief.'"),
        ({"history": [["1+0?", "1"]]}, r'\[\["1\+0\?", "1"\]\]'),
        ({"documents": [{"title": "t", "text": "x"}]}, r"\[.*"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, r'\{"enable_thinking": false\}'),
        ({"reasoning_effort": "high"}, "'high'"),
        ({"choices": ["two", "ten"]}, r'\["two", "ten"\]'),
    ],
)
def test_a_column_that_the_model_should_see_and_does_not_is_refused(columns, shown):
    fields = {"prompt": "<image> 1+1?", "answer": "2", **columns}
    (name,) = columns
    with pytest.raises(DataError, match=rf"^x\.jsonl:1: column '{name}' is not in .* see {shown};"):
        read(fields)
    with pytest.raises(DataError, match="name it in row_columns if only rewards"):
        read(fields, row_columns=())


@pytest.mark.parametrize(
    "columns",
    [
        {"images": [], "system": "", "history": None, "audio": {"bytes": None, "path": None}},
        {"choices": ["1", "3"], "options": {"A": "Yes"}, "system": "Be brief."},
    ],
)
def test_a_column_that_is_empty_or_in_the_prompt_is_kept(columns):
    fields = {"prompt": "Be brief. Yes, 1 or 3?", "answer": "2", **columns}
    assert read(fields)[3] == columns


def test_a_column_that_only_rewards_need_is_named_in_row_columns():
    fields = {"prompt": "1+1?", "answer": "2", "image": "python:3.12", "n": 1}
    assert read(fields, row_columns=("image",))[3] == {"image": "python:3.12"}


def test_only_the_columns_that_are_named_stay_in_memory(tmp_path, load):
    path = write_jsonl(tmp_path / "x.jsonl", {"prompt": "x", "answer": "1", "a": 1, "b": 2})

    assert load(path)[0].row == {"a": 1, "b": 2}
    assert load(path, row_columns=("b",))[0].row == {"b": 2}
    assert load(path, row_columns=())[0].row == {}


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


# --- rows of files and the Hub ---

READ_FROM_HUB = """
import json, sys
from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.data.rows import DataError, read_rows
for settings in json.loads(sys.argv[1]):
    try:
        rows = [(r.prompt_id, r.place, r.fields) for r in read_rows(DatasetConfig(**settings))]
        print(json.dumps(rows))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def rows_of(path, **settings):
    return list(read_rows(DatasetConfig(path=path, **settings)))


def test_every_file_format_gives_the_same_fields(tmp_path):
    records = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    write_jsonl(tmp_path / "x.jsonl", records[0], "", records[1])
    (tmp_path / "x.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")

    jsonl, listed, parquet = (rows_of(tmp_path / f"x.{s}") for s in ("jsonl", "json", "parquet"))

    assert [row.fields for row in jsonl] == records
    assert [row.fields for row in listed] == records
    assert [row.fields for row in parquet] == records
    assert [row.prompt_id for row in jsonl] == ["x.jsonl:0", "x.jsonl:2"]
    assert [row.place for row in jsonl] == [f"{tmp_path}/x.jsonl:1", f"{tmp_path}/x.jsonl:3"]
    assert listed[1].place == f"{tmp_path}/x.json: entry 1"
    assert parquet[1].place == f"{tmp_path}/x.parquet: row 1"


def test_files_that_match_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"part-{name}.jsonl", {"prompt": name})
    write_jsonl(tmp_path / "other.jsonl", {"prompt": "no"})

    rows = rows_of(tmp_path / "part-*.jsonl", name="parts")

    assert [(row.prompt_id, row.fields) for row in rows] == [
        ("part-a.jsonl:0", {"prompt": "a"}),
        ("part-b.jsonl:0", {"prompt": "b"}),
        ("part-c.jsonl:0", {"prompt": "c"}),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "x", ', "not valid JSON"),
        (b"[1, 2]", "must be an object with named fields, got [1, 2]"),
        (b'{"prompt": "\xff"}', "not valid JSON ('utf-8'"),
        (b"[" * 100_000, "not valid JSON (nested too deeply)"),
        (b'{"answer": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds"),
    ],
)
def test_a_line_that_cannot_be_read_has_a_place_and_a_reason_and_the_next_is_read(
    tmp_path, line, problem
):
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"prompt": "x"}\n')

    bad, good = rows_of(tmp_path / "a.jsonl")

    assert (bad.place, bad.fields) == (f"{tmp_path}/a.jsonl:1", None)
    assert bad.problem.startswith(problem)
    assert good.fields == {"prompt": "x"}


def test_parquet_rows_that_are_no_utf8_are_refused_by_place(tmp_path):
    binary = pa.array([b"good", b"\xff", b"too"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")

    with pytest.raises(DataError, match=r"a\.parquet: rows 0 to 2 .*utf-8"):
        rows_of(tmp_path / "a.parquet")


def test_parquet_rows_are_counted_over_row_groups(tmp_path):
    records = [{"n": n} for n in range(2500)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=700)

    rows = rows_of(tmp_path / "a.parquet")

    assert [row.fields for row in rows] == records
    assert [row.prompt_id for row in rows] == [f"a.parquet:{n}" for n in range(2500)]


def test_a_file_of_another_content_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet")
    (tmp_path / "a.json").write_text('{"prompt": "x"}')
    (tmp_path / "b.json").write_text("[1,")

    for name in ("a.parquet", "a.json", "b.json"):
        with pytest.raises(DataError, match=f"{name}: "):
            rows_of(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        rows_of(tmp_path / "c.parquet")


def test_a_parquet_file_that_is_damaged_within_is_refused_on_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [{"prompt": f"question {n} " * 20} for n in range(500)]
    pq.write_table(pa.Table.from_pylist(texts), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[40:400] = bytes(360)
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file") as caught:
        rows_of(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_set_of_the_hub_is_loaded_once_and_then_read_without_a_network(tmp_path):
    files = {"data/train.jsonl": as_jsonl([GSM8K] * 3), "data/test.jsonl": as_jsonl([GSM8K])}
    with FakeHub({"acme/sums": files}) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
            "NO_PROXY": "127.0.0.1",
        }

        def read(*settings, **variables):
            result = subprocess.run(
                [sys.executable, "-c", READ_FROM_HUB, json.dumps(settings)],
                env={**environment, **variables},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert result.returncode == 0, result.stderr
            return [json.loads(line) for line in result.stdout.splitlines()]

        train, test = {"hub": "acme/sums", "split": "train"}, {"hub": "acme/sums", "split": "test"}
        (online,) = read(train)
    assert online == [
        [f"acme/sums:{n}", f"acme/sums (train): row {n}", dict(GSM8K)] for n in range(3)
    ]

    rows, others, no_split, absent = read(
        train,
        test,
        {"hub": "acme/sums", "split": "dev"},
        {"hub": "acme/products", "split": "train"},
        HF_HUB_OFFLINE="1",
    )
    assert (rows, len(others)) == (online, 1)
    assert no_split.startswith("acme/sums (dev): cannot be loaded (Unknown split")
    assert absent.startswith("acme/products (train): cannot be loaded (Couldn't reach")
    assert f"into {tmp_path}/datasets" in absent
