"""Rows of files and the Hub, and question and answer in the columns of well-known data sets."""

import copy
import datetime
import decimal
import json
import os
import subprocess
import sys
import time
from functools import reduce
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
    DAPO_PROCESSED,
    GSM8K,
    MATH,
    MATH_500,
    SKYWORK,
    write_jsonl,
)
from tests.fakes.fake_hub import FakeHub, as_jsonl

USER = {"role": "user", "content": "1+1?"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}],
}
IMAGE = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
PLAIN = {"prompt": "1+1?", "answer": "2"}


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


def beside(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


@pytest.mark.parametrize(
    ("fields", "name", "question", "rest"),
    [
        pytest.param(
            SKYWORK,
            "verl",
            SKYWORK["prompt"],
            beside(SKYWORK, "prompt") | {"reward_model": {"style": "rule"}},
            id="skywork",
        ),
        pytest.param(
            DAPO_PROCESSED,
            "verl",
            "What is $1+1$?",
            beside(DAPO_PROCESSED, "prompt")
            | {"reward_model": {"style": "rule-lighteval/MATH_v2"}},
            id="dapo",
        ),
        (GSM8K, "gsm8k", "What is 1+1?", {}),
        (MATH, "math", "What is $1+1$?", {"level": "Level 1", "type": "Prealgebra"}),
        (MATH_500, "math", "What is $1+1$?", beside(MATH_500, "problem", "answer")),
        pytest.param(
            {"ID": 7, "Problem": "1+1?", "Solution": "s", "Answer": 2},
            "math",
            "1+1?",
            {"ID": 7, "Solution": "s"},
            id="aime",
        ),
        ({"Problem": "1+1?", "Solution": "$\\boxed{2}$"}, "math", "1+1?", {}),
        ({"prompt": "1+1?", "answer": 2, "id": 5}, "columns", "1+1?", {"id": 5}),
        ({"question": "1+1?", "answer": "2"}, "columns", "1+1?", {}),
        ({"Question": "1+1?", "Answer": "2"}, "columns", "1+1?", {}),
        pytest.param(
            {"prompt": [USER], "label": "2", "metadata": {}},
            "columns",
            [USER],
            {"metadata": {}},
            id="slime",
        ),
        pytest.param(
            {"prompt": "1+1?", "solutions": ["2"], "task": "math"},
            "columns",
            "1+1?",
            {"task": "math"},
            id="areal",
        ),
        # Messages in parts, and structs as JSON text.
        ({"prompt": [PARTS], "answer": "2"}, "columns", [USER], {}),
        ({"prompt": json.dumps([USER]), "answer": "2"}, "columns", [USER], {}),
        (
            {"prompt": json.dumps([PARTS]), "reward_model": {"ground_truth": "2"}},
            "verl",
            [USER],
            {"reward_model": {}},
        ),
        (
            {"prompt": [USER], "reward_model": json.dumps({"ground_truth": "2"})},
            "verl",
            [USER],
            {"reward_model": {}},
        ),
        *(  # they only look like JSON
            ({"prompt": text, "answer": "2"}, "columns", text, {})
            for text in ('[{"role": "user"', "[1, 2] is a list?", '{"a": 1}')
        ),
    ],
)
def test_a_known_schema_is_recognised_from_its_columns(fields, name, question, rest):
    assert read(fields) == (name, question, "2", rest)
    if name != "columns":
        assert read(fields, row_format=name) == (name, question, "2", rest)


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
        (PLAIN, {"row_format": "gsm8k"}, "no column 'question', only prompt"),
        ({"question": "x", "answer": "2"}, {"row_format": "gsm8k"}, "'answer' .* got '2'"),
        ({"problem": "x", "solution": "2."}, {"row_format": "math"}, "'solution' .* got '2.'"),
        ({"problem": "x", "level": 1}, {"row_format": "math"}, "'solution', only problem, level"),
        (PLAIN, {"row_format": "verl"}, "no column 'reward_model.ground_truth', only prompt, ans"),
        ({**PLAIN, "a": 1}, {"row_columns": ("a", "b")}, "no column 'b', only a"),
        ({**PLAIN, "prompt": "\ud800"}, {}, "column 'prompt' .*surrogate"),
        ({**PLAIN, "prompt": 5}, {}, "column 'prompt' .* got 5"),
        ({**PLAIN, "prompt": []}, {}, r"column 'prompt' .* got \[\]"),
        ({**PLAIN, "prompt": [{"role": "user"}]}, {}, "column 'prompt' .* role and content"),
        ({**PLAIN, "prompt": [IMAGE]}, {}, "column 'prompt' must hold messages with role and cont"),
        (
            {**PLAIN, "prompt": [USER, {"role": "assistant", "content": "2"}]},
            {},
            "column 'prompt' .* assistant: '2'",
        ),
        ({**PLAIN, "answer": float("nan")}, {}, "column 'answer' must be .* got NaN"),
        ({**PLAIN, "answer": " "}, {}, "column 'answer' must be an answer"),
        ({**PLAIN, "answer": True}, {}, "column 'answer' .* got true"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(fields, settings, message):
    with pytest.raises(DataError, match=rf"^x\.jsonl:1: .*{message}") as caught:
        read(fields, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "value", "answer"),
    [
        (parse_answer, " 42 ", "42"),
        (parse_answer, 42, "42"),
        pytest.param(parse_answer, 10**400, "1" + "0" * 400, id="beyond a float"),
        (parse_answer, 2.5, "2.5"),
        (parse_answer, decimal.Decimal("2.50"), "2.50"),
        (parse_answer, "3 + 4 = <<3+4=7>>7\n#### 7", "7"),
        (parse_answer, "…\n#### 1,234\n", "1,234"),
        (parse_answer, "#### 5\nis not at the end", "#### 5\nis not at the end"),
        (parse_answer, ["7"], "7"),
        (parse_answer, '["7"]', "7"),
        (parse_answer, '["1/2", "0.5"]', '["1/2", "0.5"]'),
        (parse_answer, ["1/2", 0.5], '["1/2", "0.5"]'),
        (parse_answer, "[1, 2]", "[1, 2]"),
        (parse_answer, "['3']", "3"),
        (parse_answer, " ['1/2', '0.5'] ", '["1/2", "0.5"]'),
        (parse_answer, r"['\\frac{1}{2}']", r"\frac{1}{2}"),
        (parse_answer, r"['it\'s']", "it's"),
        (parse_answer, r"['\frac{1}{2}']", r"['\frac{1}{2}']"),
        (parse_answer, "['3' '4']", "['3' '4']"),
        (parse_answer, "['a'] or ['b']", "['a'] or ['b']"),
        # Tests of code stay whole.
        (parse_answer, '{"outputs": ["a\\n#### 5"]}', '{"outputs": ["a\\n#### 5"]}'),
        # The first marks of the last line.
        (worked_answer, "#### 1\n#### 2 #### 3", "2 #### 3"),
        (worked_answer, "5+5=10\n#### -1,000.50\n", "-1,000.50"),
        (boxed_answer, r"\boxed{1} and \boxed{2}", "2"),
        (boxed_answer, r"\[\boxed{\frac{\sqrt{3}}{2}}.\]", r"\frac{\sqrt{3}}{2}"),
        (boxed_answer, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (boxed_answer, r"\boxed{\left\{ x \right.} }", r"\left\{ x \right."),
        (boxed_answer, r"$\fbox{7}$", "7"),
        (boxed_answer, r"so $x = \boxed 5$.", "5"),
        (boxed_answer, r"\boxed {\text{(A)}}", r"\text{(A)}"),
        (boxed_answer, "\\boxed{\n 12 }", "12"),
    ],
)
def test_answers_are_taken_from_their_usual_forms(parse, value, answer):
    assert parse(value) == answer


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_answer, "5\n####  ", "'5 ####  '"),
        (worked_answer, "5\n####  ", "'5 ####  '"),
        (parse_answer, [["1"]], "got a list of lists"),
        (parse_answer, reduce(lambda value, _: [value], range(900), "1"), "got a list of lists"),
        (boxed_answer, r"\boxed{1} \boxed{2", "empty or never closed"),
        (boxed_answer, r"\boxed{}", "empty or never closed"),
        (boxed_answer, None, "got null"),
        (boxed_answer, "2", r"with a \\boxed answer"),
    ],
)
def test_what_holds_no_answer_is_refused(parse, value, message):
    with pytest.raises(ValueError, match=message):
        parse(value)


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


def test_other_columns_become_json_values_and_bytes_are_left_out(tmp_path, load):
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

    loaded = load(tmp_path / "x.parquet")

    assert loaded.prompts[0].row == {
        "at": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "took": 90.0,
        "price": "1.50",
        "score": None,
        "tags": ["a", None],
        "plots": [{"path": "a.png"}],
    }
    assert "plots.bytes" in loaded.report.warnings()[0]


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


EMPTY = {"images": [], "system": "", "history": None, "audio": {"bytes": None, "path": None}}
SHOWN = {"choices": ["1", "3"], "options": {"A": "Yes"}, "system": "Be brief."}


@pytest.mark.parametrize(
    ("columns", "row_columns", "kept"),
    [
        (EMPTY, None, EMPTY),
        (SHOWN, None, SHOWN),
        ({"image": "python:3.12", "n": 1}, ("image",), {"image": "python:3.12"}),
        ({"a": 1, "b": 2}, (), {}),
    ],
)
def test_columns_that_are_empty_shown_or_named_are_kept(columns, row_columns, kept):
    fields = {"prompt": "Be brief. Yes, 1 or 3?", "answer": "2", **columns}
    assert read(fields, row_columns=row_columns)[3] == kept


def test_verl_s_rows_are_read_from_parquet_as_from_jsonl(tmp_path, load):
    write_jsonl(tmp_path / "x.jsonl", SKYWORK)
    pq.write_table(pa.Table.from_pylist([SKYWORK]), tmp_path / "x.parquet")

    (from_json,) = load(tmp_path / "x.jsonl").prompts
    (from_parquet,) = load(tmp_path / "x.parquet").prompts

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


def as_parquet(rows, **options) -> bytes:
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    content = pa.BufferOutputStream()
    pq.write_table(table, content, **options)
    return content.getvalue().to_pybytes()


def test_every_file_format_gives_the_same_fields(tmp_path):
    records = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    write_jsonl(tmp_path / "x.jsonl", records[0], "", records[1])
    (tmp_path / "x.json").write_text(json.dumps(records))
    (tmp_path / "x.parquet").write_bytes(as_parquet(records))

    for suffix, ids, places in (
        ("jsonl", ("x.jsonl:0", "x.jsonl:2"), ("x.jsonl:1", "x.jsonl:3")),
        ("json", ("x.json:0", "x.json:1"), ("x.json: entry 0", "x.json: entry 1")),
        ("parquet", ("x.parquet:0", "x.parquet:1"), ("x.parquet: row 0", "x.parquet: row 1")),
    ):
        rows = rows_of(tmp_path / f"x.{suffix}")
        assert [(row.prompt_id, row.place, row.fields) for row in rows] == [
            (prompt_id, f"{tmp_path}/{place}", record)
            for prompt_id, place, record in zip(ids, places, records, strict=True)
        ]


def test_files_that_match_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("part-b", "part-a", "part-c", "other"):
        write_jsonl(tmp_path / f"{name}.jsonl", {"prompt": name})

    rows = rows_of(tmp_path / "part-*.jsonl", name="parts")

    assert [(row.prompt_id, row.fields["prompt"]) for row in rows] == [
        (f"part-{name}.jsonl:0", f"part-{name}") for name in "abc"
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


def test_parquet_rows_are_counted_over_row_groups(tmp_path):
    records = [{"n": n} for n in range(2500)]
    (tmp_path / "a.parquet").write_bytes(as_parquet(records, row_group_size=700))

    rows = rows_of(tmp_path / "a.parquet")

    assert [row.fields for row in rows] == records
    assert [row.prompt_id for row in rows] == [f"a.parquet:{n}" for n in range(2500)]


def not_utf8() -> bytes:
    binary = pa.array([b"good", b"\xff", b"too"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    return as_parquet(pa.table({"prompt": texts}))


def damaged_within() -> bytes:
    texts = [{"prompt": f"question {n} " * 20} for n in range(500)]
    content = bytearray(as_parquet(texts, compression="zstd"))
    content[40:400] = bytes(360)
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", b'{"prompt": "x"}', "must be a JSON list"),
        ("a.json", b"[1,", "not valid JSON"),
        ("a.parquet", b"no parquet", "not a readable parquet file"),
        pytest.param("a.parquet", damaged_within(), "not a readable parquet file", id="damaged"),
        pytest.param("a.parquet", not_utf8(), "rows 0 to 2 .*utf-8", id="not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_on_one_line(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{tmp_path}/{name}: {problem}") as caught:
        rows_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        rows_of(tmp_path / "c.parquet")


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
