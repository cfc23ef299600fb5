"""Conversations in a chat template, as text and as token ids."""

from __future__ import annotations

import pytest

from bapo_megatron.config.data import DataConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer, make_renderer
from tests.conftest import CHAT_TEMPLATE
from tests.data.rows import rendered

THINKING = CHAT_TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"


@pytest.fixture
def thinking(tokenizer_dir, tmp_path):
    """The tokenizer with a template that has a variable, from a file."""
    (tmp_path / "thinking.jinja").write_text(THINKING)
    return load_tokenizer(tokenizer_dir, tmp_path / "thinking.jinja")


def test_system_prompt_and_suffix_surround_the_question(tokenizer):
    renderer = ChatRenderer(tokenizer, system_prompt="Think.", prompt_suffix="\nBox it.")

    assert renderer.messages("1+1?") == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1+1?\nBox it."},
    ]
    question = [{"role": "user", "content": "1+1?"}]
    assert renderer.messages(question)[1]["content"] == "1+1?\nBox it."
    assert question == [{"role": "user", "content": "1+1?"}]


def test_token_ids_are_those_of_the_tokenizer_s_own_rendering(tokenizer):
    renderer = ChatRenderer(tokenizer)
    questions = [f"Größe von π{n}?" for n in range(2100)]  # more than are tokenised at once

    texts = [renderer.text(question) for question in questions]
    token_ids = renderer.token_ids(texts)

    assert texts[0] == rendered("Größe von π0?")
    for number in (0, 999, 1000, 2099):
        own = tokenizer.apply_chat_template(
            [{"role": "user", "content": questions[number]}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
        )
        assert list(token_ids[number]) == own["input_ids"]
        assert renderer.decode(token_ids[number]) == texts[number]


def test_a_template_from_a_file_takes_the_place_of_the_tokenizer_s(thinking):
    assert ChatRenderer(thinking).text("1+1?") == rendered("1+1?")
    off = ChatRenderer(thinking, template_arguments={"enable_thinking": False})
    assert off.text("1+1?") == rendered("1+1?") + "<think></think>"


def test_the_settings_of_a_run_make_its_renderer(thinking):
    data = DataConfig(
        system_prompt="S", prompt_suffix="!", chat_template_arguments={"enable_thinking": False}
    )

    assert make_renderer(thinking, data).text("1+1?") == (
        f"<|im_start|>system\nS<|im_end|>\n{rendered('1+1?!')}<think></think>"
    )


def test_an_argument_that_the_template_does_not_know_is_refused(thinking):
    with pytest.raises(ValueError, match="does not mention 'enable_thinkin'"):
        ChatRenderer(thinking, template_arguments={"enable_thinkin": False})
    for name in ("add_generation_prompt", "messages"):
        with pytest.raises(ValueError, match=f"must not hold '{name}', which the program sets"):
            ChatRenderer(thinking, template_arguments={name: True})


def test_a_template_that_is_no_jinja_is_refused_with_its_line(tokenizer_dir, tmp_path):
    (tmp_path / "x.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    tokenizer = load_tokenizer(tokenizer_dir, tmp_path / "x.jinja")

    with pytest.raises(ValueError, match=r"must be a valid Jinja template, got line 2: ") as caught:
        ChatRenderer(tokenizer)
    assert "\n" not in str(caught.value)


def test_what_a_template_refuses_is_an_error_of_the_conversation(tokenizer_dir, tmp_path):
    (tmp_path / "x.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    tokenizer = load_tokenizer(tokenizer_dir, tmp_path / "x.jinja")

    assert ChatRenderer(tokenizer).text("1+1?") == rendered("1+1?")
    with pytest.raises(ValueError, match=r"is refused by the chat template \(no system role\)"):
        ChatRenderer(tokenizer, system_prompt="S").text("1+1?")


def test_a_directory_without_a_tokenizer_is_refused_on_one_line(tmp_path):
    with pytest.raises(ValueError, match="no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_chat_template_needs_one_from_a_file(tmp_path, tokenizer_dir):
    for file in tokenizer_dir.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "x.jinja"
    template.write_text(CHAT_TEMPLATE)

    with pytest.raises(ValueError, match=r"no chat template; .* or set data\.chat_template"):
        load_tokenizer(tmp_path)
    assert ChatRenderer(load_tokenizer(tmp_path, template)).text("1+1?") == rendered("1+1?")
    template.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"data\.chat_template: must be UTF-8"):
        load_tokenizer(tmp_path, template)
