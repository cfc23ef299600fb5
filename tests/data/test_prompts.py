"""From a data set to rendered prompts: what is kept, left out, counted and reported."""

import json
import logging
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.config.data import DataConfig, DatasetConfig
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import (
    DataError,
    load_set,
    load_train_sets,
    log_warnings,
    shared_prompts,
)
from bapo_megatron.types import Prompt
from tests.data.prompt_sets import load_eval_set, make_prompt_set
from tests.data.rows import rendered, write_jsonl
from tests.data.test_tools import HERMES

GOOD = {"prompt": "x", "answer": "1"}


def test_jsonl_rows_become_prompts(tmp_path, load, tokenizer):
    path = write_jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "1+1?", "answer": "2", "level": 3},
        "",
        {"prompt": "2+2?", "answer": 4},
    )

    prompts = load(path).prompts

    assert [p.prompt_id for p in prompts] == ["train.jsonl:0", "train.jsonl:2"]
    assert [p.answer for p in prompts] == ["2", "4"]
    assert [p.row for p in prompts] == [{"level": 3}, {}]
    assert {p.source for p in prompts} == {"train"}
    assert prompts[0].text == rendered("1+1?")
    assert tokenizer.decode(prompts[0].token_ids) == rendered("1+1?")


SCHEMA = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}


def renderer_with_tools(tokenizer_dir, tmp_path, tools=None):
    (tmp_path / "x.jinja").write_text(HERMES)
    return ChatRenderer(load_tokenizer(tokenizer_dir, tmp_path / "x.jinja"), DataConfig(), tools)


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA])])
def test_a_row_s_tools_are_rendered(tmp_path, tokenizer_dir, tools):
    rows = [{**GOOD, "tools": tools}, {**GOOD, "tools": []}, GOOD]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    renderer = renderer_with_tools(tokenizer_dir, tmp_path)

    prompts = load_set(DatasetConfig(path=path), renderer, DataConfig()).prompts

    assert prompts[0].text == (
        f"<|im_start|>system\n# Tools\n<tools>\n{json.dumps(SCHEMA)}\n</tools><|im_end|>\n"
        + rendered("x")
    )
    assert [prompt.text for prompt in prompts[1:]] == [rendered("x")] * 2
    assert prompts[0].row == {"tools": tools}


def test_rows_without_tools_of_their_own_show_those_of_the_run(tmp_path, tokenizer_dir):
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, {**GOOD, "tools": []})
    config = RolloutConfig(environment="python_tool", tool_format="hermes", tools=(SCHEMA,))
    renderer = renderer_with_tools(tokenizer_dir, tmp_path, config)

    first, second = load_set(DatasetConfig(path=path), renderer, DataConfig()).prompts

    assert first.text == second.text == renderer.text("x")
    assert re.findall(r'"name": "(\w+)"', first.text) == ["add", "python"]


def test_tools_that_cannot_be_rendered_are_refused(tmp_path, load, tokenizer_dir):
    path = write_jsonl(tmp_path / "a.jsonl", {**GOOD, "tools": [SCHEMA]})
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: .* has tools .* the chat template shows none"
    ):
        load(path)
    config = RolloutConfig(tool_format="hermes", tools=(SCHEMA,))
    renderer = renderer_with_tools(tokenizer_dir, tmp_path, config)
    with pytest.raises(DataError, match="has tools of its own, but rollout has others"):
        load_set(DatasetConfig(path=path), renderer, DataConfig())
    for tools in (["add"], {"name": "add"}, "[", 3):
        path = write_jsonl(tmp_path / "a.jsonl", {**GOOD, "tools": tools})
        with pytest.raises(DataError, match=r"a\.jsonl:1: column 'tools' .*; correct or remove"):
            load_set(DatasetConfig(path=path), renderer, DataConfig())


def test_nulls_that_parquet_fills_in_are_in_neither_calls_nor_tools(tmp_path, tokenizer_dir):
    def row(**arguments):
        function = {"name": "add", "arguments": arguments}
        called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        properties = {name: {"type": "integer"} for name in arguments}
        tool = {"name": "add", "parameters": {"type": "object", "properties": properties}}
        asked = [{"role": "user", "content": "?"}, called, {"role": "tool", "content": "1"}]
        tools = [{"type": "function", "function": tool}]
        return {"prompt": asked, "answer": "1", "tools": tools}

    rows = [row(a=1), row(b=2, c=[None, 3])]
    write_jsonl(tmp_path / "x.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    renderer = renderer_with_tools(tokenizer_dir, tmp_path)

    from_json, from_parquet = (
        load_set(DatasetConfig(path=tmp_path / name), renderer, DataConfig()).prompts
        for name in ("x.jsonl", "x.parquet")
    )

    assert [prompt.text for prompt in from_parquet] == [prompt.text for prompt in from_json]
    assert '"arguments": {"a": 1}}' in from_parquet[0].text
    assert '"arguments": {"b": 2, "c": [null, 3]}}' in from_parquet[1].text
    explicit = write_jsonl(tmp_path / "y.jsonl", row(a=None))
    [prompt] = load_set(DatasetConfig(path=explicit), renderer, DataConfig()).prompts
    assert '"arguments": {"a": null}}' in prompt.text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_prompt_beside_a_system_message_is_refused(tmp_path, load, role):
    messages = [{"role": role, "content": "A"}, {"role": "user", "content": "B"}]
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": messages, "answer": "1"})

    (prompt,) = load(path).prompts
    assert prompt.text == "<|im_start|>system\nA<|im_end|>\n" + rendered("B")
    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'prompt' has a system message of its"):
        load(path, system_prompt="C")


def test_prompts_that_are_too_long_are_left_out_and_reported_once(tmp_path, load, caplog):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (1, 2, 3, 4)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    # 18 tokens stand around the question: 4 special ones and the bytes of "user", "assistant" …
    around = len(load(path).prompts[0].token_ids) - 1

    loaded = load(path, max_prompt_tokens=around + 2)
    with caplog.at_level(logging.WARNING):
        log_warnings([loaded])

    assert [p.prompt_id for p in loaded.prompts] == ["a.jsonl:0", "a.jsonl:1"]
    (record,) = caplog.records
    assert f"2 of 4 prompts are longer than {around + 2} tokens" in record.getMessage()


def test_an_evaluation_set_leaves_no_prompt_out(tmp_path, load, tokenizer):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (1, 2, 3, 4)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    longest = load(path).report.longest_tokens
    renderer = ChatRenderer(tokenizer, DataConfig())

    assert len(load_eval_set(renderer, longest, path=path).prompts) == 4
    message = rf"a\.jsonl: 2 of 4 prompts .* {longest - 2} tokens, the longest has {longest}"
    with pytest.raises(DataError, match=message):
        load_eval_set(renderer, longest - 2, path=path)


def test_a_file_without_any_usable_prompt_is_refused(tmp_path, load):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"})

    with pytest.raises(DataError, match="no prompt is left: 1 of 1 prompts are longer than 3"):
        load(path, max_prompt_tokens=3)
    with pytest.raises(DataError, match="no prompt is left: 0 of 0"):
        load(write_jsonl(tmp_path / "empty.jsonl"))
    bad = write_jsonl(tmp_path / "bad.jsonl", "{", "[]")
    with pytest.raises(DataError, match=r"2 rows are bad \(the first: .*bad\.jsonl:1: not valid"):
        load(bad, on_bad_row="skip")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", ', "not valid JSON"),
        ({"question": "x", "answer": "1"}, "no column 'prompt', only question, answer"),
        ({"prompt": "x", "answer": None}, "column 'answer' .* got null"),
    ],
)
def test_a_bad_row_is_named_with_line_field_and_reason_or_skipped_and_counted(
    tmp_path, load, line, message
):
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, line, GOOD)

    with pytest.raises(DataError, match=rf"a\.jsonl:2: {message}") as caught:
        load(path)
    assert "\n" not in str(caught.value)

    loaded = load(path, on_bad_row="skip")
    assert [p.prompt_id for p in loaded.prompts] == ["a.jsonl:0", "a.jsonl:2"]
    assert (loaded.report.num_rows, loaded.report.num_bad) == (3, 1)
    assert loaded.report.first_bad == str(caught.value)
    assert loaded.report.warnings()[0].startswith(f"{path}: 1 of 3 rows are bad")


def test_rows_before_the_first_of_a_known_format_are_bad(tmp_path, load):
    path = write_jsonl(tmp_path / "a.jsonl", {"input": "x"}, GOOD)

    with pytest.raises(DataError, match=r"a\.jsonl:1: the columns input are of no known format; "):
        load(path)
    loaded = load(path, on_bad_row="skip")
    assert (loaded.report.num_bad, loaded.report.row_format) == (1, "columns")


def test_rows_that_repeat_a_prompt_are_counted_and_contradicting_answers_named(tmp_path, load):
    rows = enumerate(("a1", "b1", "a1", "a2", "a3", "b1"), start=1)
    path = write_jsonl(
        tmp_path / "a.jsonl", *({"id": i, "prompt": q, "answer": a} for i, (q, a) in rows)
    )

    kept, dropped = load(path), load(path, on_duplicate="drop")

    assert [p.row["id"] for p in kept.prompts] == [1, 2, 3, 4, 5, 6]
    assert len({id(p.token_ids) for p in kept.prompts}) == 2  # each text is tokenised once
    assert [p.row["id"] for p in dropped.prompts] == [1, 2]
    for loaded, action in ((kept, "stay"), (dropped, "were left out")):
        assert loaded.report.num_duplicates == 4
        assert loaded.report.num_contradictions == 1
        repeated, contradicting = loaded.report.warnings()
        assert f"4 of 6 rows repeat the prompt of an earlier one and {action}" in repeated
        assert contradicting.endswith("the first: a.jsonl:0 has '1', a.jsonl:3 has '2'")


def test_an_evaluation_has_each_distinct_prompt_once(tmp_path, tokenizer):
    rows = [{"prompt": q, "answer": "1", "id": i} for i in range(3) for q in "abcd"]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    renderer = ChatRenderer(tokenizer, DataConfig())

    loaded = load_eval_set(renderer, path=path)
    assert [p.prompt_id for p in loaded.prompts] == [f"a.jsonl:{row}" for row in range(4)]
    (line,) = loaded.report.warnings()
    assert "8 of 12 rows repeat the prompt of an earlier one and were left out (an eval" in line
    assert "data.on_duplicate" not in line

    # The state of an environment may follow from the other columns.
    loaded = load_eval_set(renderer, environment="games:Chess", path=path)
    assert len(loaded.prompts) == 12
    (line,) = loaded.report.warnings()
    assert "and stay (an environment may read their other columns)" in line


@pytest.mark.parametrize(
    ("question", "mark"),
    [
        ("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("<｜User｜>1+1?<｜Assistant｜><think>", "<｜User｜>"),
        ([{"role": "user", "content": "<start_of_turn>user\n1+1?"}], "<start_of_turn>"),
        ("[INST] 1+1? [/INST]", "[INST]"),
        ("|<x>| < |y| > 1 and a <| b |> c [I]", ""),
    ],
)
def test_prompts_that_are_rendered_already_are_warned_of(tmp_path, load, question, mark):
    rows = [{"prompt": question, "answer": "1"}, GOOD]
    report = load(write_jsonl(tmp_path / "a.jsonl", *rows)).report

    assert report.num_rendered == bool(mark)
    expected = "1 of 2 prompts contain the marks of a chat template, .* the first: a.jsonl:0 has "
    assert bool(mark) == any(
        re.search(expected + re.escape(mark), line) for line in report.warnings()
    )


def test_prompts_that_several_sets_of_a_mixture_have_are_reported():
    sets = [
        make_prompt_set(name, [Prompt(f"{name}:{i}", (1,), "", text) for i, text in texts])
        for name, texts in (
            ("a", enumerate("xyx")),
            ("b", enumerate("zyyx")),
            ("c", enumerate("w")),
        )
    ]

    assert shared_prompts(sets) == [
        "training set 'b': 2 of 3 prompts are in an earlier set too, the first: b:1 is a:1 of 'a'"
    ]
    assert shared_prompts(sets[:1]) == []


def test_each_training_set_follows_the_rules_of_the_data_section(tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", GOOD, GOOD, "{")
    write_jsonl(tmp_path / "b.jsonl", {"question": "x", "answer": "5\n#### 5"})
    data = DataConfig.model_validate(
        {
            "train": [
                {"path": tmp_path / "a.jsonl", "weight": 3},
                {"path": tmp_path / "b.jsonl", "name": "second"},
            ],
            "on_bad_row": "skip",
            "on_duplicate": "drop",
        }
    )

    first, second = load_train_sets(data, ChatRenderer(tokenizer, DataConfig()))

    assert (first.name, first.weight, len(first.prompts)) == ("a", 3.0, 1)
    assert (first.report.num_bad, first.report.num_duplicates) == (1, 1)
    assert (second.name, second.weight, second.prompts[0].answer) == ("second", 1.0, "5")
    assert second.report.row_format == "gsm8k"


def test_references_that_are_no_answers_are_left_out_and_counted(tmp_path, tokenizer):
    answers = ["proof", r"\text{Proof.}", "not found", "", None, "see solution", "5", "proofs"]
    rows = [{"prompt": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    data = DataConfig(train={"path": write_jsonl(tmp_path / "a.jsonl", *rows)})
    renderer = ChatRenderer(tokenizer, data)

    [loaded] = load_train_sets(data, renderer, RewardConfig())

    assert [prompt.answer for prompt in loaded.prompts] == ["5", "proofs"]
    assert (loaded.report.num_no_answer, loaded.report.num_bad) == (6, 0)
    (line,) = loaded.report.warnings()
    assert "6 of 8 references are not answers ('' 2, 'proof' 1" in line
    assert line.endswith("and were left out (reward.no_answers)")
    with pytest.raises(DataError, match=r"not answers .* an evaluation leaves none out; remove"):
        load_eval_set(renderer, path=data.train_sets[0].path)


@pytest.mark.parametrize("answer", [{}, [], ["5", {}]])
def test_an_answer_of_another_type_is_no_empty_reference(tmp_path, tokenizer, answer):
    rows = ({"prompt": "q", "answer": answer}, GOOD)
    data = DataConfig(train={"path": write_jsonl(tmp_path / "a.jsonl", *rows)})

    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'answer' "):
        load_train_sets(data, ChatRenderer(tokenizer, data), RewardConfig())


def test_the_list_of_no_answers_is_the_users_and_applies_where_math_scores():
    custom = RewardConfig(no_answers=("todo",))
    by_url = {"functions": [{"name": "own", "function": "my_module:score"}]}

    assert custom.refused_answers == ("todo",)
    assert "proof" in RewardConfig().refused_answers
    assert RewardConfig.model_validate(by_url).refused_answers == ()


def test_a_constant_answer_that_is_right_for_many_prompts_is_reported(tmp_path, load):
    answers = ["yes"] * 50 + [str(n) for n in range(50)]
    rows = [{"prompt": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    fewer = write_jsonl(tmp_path / "b.jsonl", *rows[1:])

    (line,) = load(path).report.warnings()

    assert "the constant answer 'yes' is right for 50 of 100 prompts (50.0%)" in line
    assert load(fewer).report.warnings() == []
