from __future__ import annotations

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import DataError, PromptStream, load_prompts, parse_answer
from bapo_megatron.types import Prompt


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def load(tokenizer):
    """Loads a file with the given columns; prompts keep their questions."""

    def load_file(path, max_prompt_tokens=4096, **columns):
        renderer = ChatRenderer(tokenizer)
        return load_prompts(DatasetConfig(path=path, **columns), renderer, max_prompt_tokens)

    return load_file


def write_jsonl(path, *lines):
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def rendered(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_jsonl_rows_become_prompts(tmp_path, load, tokenizer):
    path = write_jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "1+1?", "answer": "2"},
        "",
        {"prompt": "2+2?", "answer": 4},
    )

    prompts = load(path)

    assert [p.prompt_id for p in prompts] == ["train.jsonl:0", "train.jsonl:2"]
    assert [p.answer for p in prompts] == ["2", "4"]
    assert prompts[0].text == rendered("1+1?")
    assert tokenizer.decode(prompts[0].token_ids) == rendered("1+1?")


def test_token_ids_equal_the_tokenizer_s_own_chat_rendering(tmp_path, load, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "Größe von π?", "answer": "1"})

    own = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Größe von π?"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
    )

    assert list(load(path)[0].token_ids) == own["input_ids"]


def test_json_and_parquet_give_the_same_prompts_as_jsonl(tmp_path, load):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    write_jsonl(tmp_path / "x.jsonl", *rows)
    (tmp_path / "x.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")

    wanted = [(p.text, p.answer) for p in load(tmp_path / "x.jsonl")]

    assert wanted == [(rendered("a"), "1"), (rendered("b"), "2")]
    for name in ("x.json", "x.parquet"):
        assert [(p.text, p.answer) for p in load(tmp_path / name)] == wanted


def test_chat_messages_and_a_dotted_answer_column_are_read(tmp_path, load):
    row = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": '["2"]', "style": "rule"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")

    (prompt,) = load(tmp_path / "x.parquet", answer_column="reward_model.ground_truth")

    assert prompt.text == f"<|im_start|>system\nBe brief.<|im_end|>\n{rendered('1+1?')}"
    assert prompt.answer == "2"


def test_system_prompt_and_suffix_surround_the_question(tokenizer):
    renderer = ChatRenderer(tokenizer, system_prompt="Think.", prompt_suffix="\nBox it.")

    assert renderer.messages("1+1?") == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1+1?\nBox it."},
    ]
    question = [{"role": "user", "content": "1+1?"}]
    assert renderer.messages(question)[1]["content"] == "1+1?\nBox it."
    assert question == [{"role": "user", "content": "1+1?"}]


def test_two_system_messages_are_refused(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": messages, "answer": "1"})

    with pytest.raises(DataError, match=r"a\.jsonl:1: column 'prompt' has a system message of its"):
        load_prompts(DatasetConfig(path=path), ChatRenderer(tokenizer, system_prompt="C"), 4096)


def test_prompts_that_are_too_long_are_left_out_and_reported_once(tmp_path, load, caplog):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (1, 2, 3, 4)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    # 18 tokens stand around the question: 4 special ones and the bytes of "user", "assistant" …
    around = len(load(path)[0].token_ids) - 1

    with caplog.at_level(logging.WARNING):
        prompts = load(path, max_prompt_tokens=around + 2)

    assert [p.prompt_id for p in prompts] == ["a.jsonl:0", "a.jsonl:1"]
    (record,) = caplog.records
    assert f"2 of 4 prompts are longer than {around + 2} tokens" in record.getMessage()


def test_a_file_without_any_usable_prompt_is_refused(tmp_path, load):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"})

    with pytest.raises(DataError, match="no prompt is left: 1 of 1 prompts are longer than 3"):
        load(path, max_prompt_tokens=3)
    with pytest.raises(DataError, match="no prompt is left: 0 of 0"):
        load(write_jsonl(tmp_path / "empty.jsonl"))


GOOD = {"prompt": "x", "answer": "1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", ', r"a\.jsonl:2: not valid JSON \(.*\); correct or remove it"),
        ("[1, 2]", r"a\.jsonl:2: must be an object with named fields, got \[1, 2\]"),
        (
            {"question": "x", "answer": "1"},
            r"a\.jsonl:2: no column 'prompt', only question, answer",
        ),
        ({"prompt": "x"}, r"a\.jsonl:2: no column 'answer', only prompt; .* set answer_column"),
        (
            {"prompt": "x", "answer": None},
            r"a\.jsonl:2: column 'answer' must be a text, .* got null",
        ),
        ({"prompt": "x", "answer": " "}, r"a\.jsonl:2: column 'answer' .* got an empty text"),
        ({"prompt": "x", "answer": True}, r"a\.jsonl:2: column 'answer' .* got true"),
        ({"prompt": 5, "answer": "1"}, r"a\.jsonl:2: column 'prompt' must be a text .* got 5"),
        ({"prompt": [], "answer": "1"}, r"a\.jsonl:2: column 'prompt' .* got \[\]"),
        (
            {"prompt": [{"role": "user"}], "answer": "1"},
            r"column 'prompt' must hold messages with role and content, got \{\"role\": \"user\"\}",
        ),
    ],
)
def test_a_bad_row_is_named_with_line_field_and_reason(tmp_path, load, line, message):
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, line)

    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_row_that_is_no_utf8_is_named(tmp_path, load):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "1"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl:1: not UTF-8"):
        load(tmp_path / "a.jsonl")


def test_a_file_of_another_format_is_refused(tmp_path, load):
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "a.parquet").write_text("no parquet")
    (tmp_path / "a.json").write_text('{"prompt": "x"}')

    with pytest.raises(DataError, match=r"a\.csv: must end in \.jsonl, \.json or \.parquet"):
        load(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
        load(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.json: must be a JSON list of objects"):
        load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (" 42 ", "42"),
        (42, "42"),
        (2.5, "2.5"),
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


def test_gsm8k_answers_are_the_final_numbers(shared_data, load):
    prompts = load(shared_data / "gsm8k_test.jsonl", prompt_column="question")

    assert len(prompts) == 1319
    assert prompts[0].prompt_id == "gsm8k_test.jsonl:0"
    assert prompts[0].answer == "18"
    assert all(p.answer.replace(",", "").lstrip("-").isdigit() for p in prompts)


def test_aime_in_skywork_s_schema_is_read(shared_data, load):
    prompts = load(shared_data / "aime24.parquet", answer_column="reward_model.ground_truth")

    assert len(prompts) == 30
    assert [p.answer for p in prompts[:2]] == ["204", "025"]
    assert prompts[0].text.startswith(
        "<|im_start|>user\nEvery morning Aya goes for a $9$-kilometer"
    )


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"a:{i}", (i,), str(i), f"question {i}") for i in range(count)]


def take(stream: PromptStream, count: int) -> list[str]:
    return [next(stream).prompt_id for _ in range(count)]


def test_without_shuffling_the_file_repeats_in_order():
    stream = PromptStream(make_prompts(3), seed=0, shuffle=False)

    assert take(stream, 7) == ["a:0", "a:1", "a:2", "a:0", "a:1", "a:2", "a:0"]
    assert stream.epoch == 2


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    ids = take(PromptStream(make_prompts(50), seed=1, shuffle=True), 100)

    assert sorted(ids[:50]) == sorted(ids[50:]) == sorted(f"a:{i}" for i in range(50))
    assert ids[:50] != ids[50:]
    assert ids == take(PromptStream(make_prompts(50), seed=1, shuffle=True), 100)
    assert ids != take(PromptStream(make_prompts(50), seed=2, shuffle=True), 100)


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20])
def test_a_resumed_stream_equals_the_uninterrupted_one(position):
    uninterrupted = take(PromptStream(make_prompts(7), seed=3, shuffle=True), 40)
    stream = PromptStream(make_prompts(7), seed=3, shuffle=True)
    take(stream, position)
    state = json.loads(json.dumps(stream.state()))

    resumed = PromptStream(make_prompts(7), seed=3, shuffle=True)
    resumed.restore(state)

    assert take(resumed, 40 - position) == uninterrupted[position:]


def test_a_position_in_other_prompts_is_refused():
    state = PromptStream(make_prompts(7), seed=3, shuffle=True).state()

    with pytest.raises(ValueError, match="the training prompts differ"):
        PromptStream(make_prompts(8), seed=3, shuffle=True).restore(state)
    with pytest.raises(ValueError, match="seed was 3 when it was saved and is 4 now"):
        PromptStream(make_prompts(7), seed=4, shuffle=True).restore(state)
    with pytest.raises(ValueError, match=r"data\.shuffle was True when it was saved"):
        PromptStream(make_prompts(7), seed=3, shuffle=False).restore(state)


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0, shuffle=True)


def test_a_directory_without_a_tokenizer_is_refused_on_one_line(tmp_path):
    with pytest.raises(ValueError, match="no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, tokenizer_dir):
    for file in tokenizer_dir.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        load_tokenizer(tmp_path)
