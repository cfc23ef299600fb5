from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bapo_megatron.tiny.model import TASK_WORDS, VOCABULARY_SIZE, build_tokenizer

STRANGE_TEXTS = (
    "",
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n\n#### 72",
    "Find $\\sum_{k=1}^{10} \\frac{k}{\\boxed{2}}$  for 日本 é\u200b😀 it's \x00\x7f",
    "tabs\tand\r\nline ends\n\n+3 maybe 4, no 5",
)


@pytest.fixture(scope="module", params=[AutoTokenizer, PreTrainedTokenizerFast])
def loaded(request, tmp_path_factory):
    """The tokenizer as programs that know only its directory load it."""
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(directory)
    # AutoTokenizer decides by the model that lies beside the tokenizer.
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    return request.param.from_pretrained(directory)


@pytest.mark.parametrize("text", STRANGE_TEXTS)
def test_any_text_survives_a_round_trip_through_the_saved_tokenizer(loaded, text):
    ids = loaded.encode(text)
    assert ids == build_tokenizer().encode(text)
    assert all(0 <= token_id < VOCABULARY_SIZE for token_id in ids)
    assert loaded.decode(ids) == text


def test_chat_template_gives_the_prompt_ids(loaded):
    messages = [{"role": "user", "content": "3+5=?"}]
    text = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert text == "<bos><|user|>3+5=?<|assistant|>"
    # The visible bytes start at id 5 with "!" (33), so "3" (51) is 23 and "+" (43) is 15.
    assert ids == [2, 3, 23, 15, 25, 266, 4]


def test_special_ids_are_the_first_and_rows_are_a_multiple_of_64(loaded):
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (0, 1, 2)
    assert len(loaded) == 5 + 256 + len(TASK_WORDS)
    assert VOCABULARY_SIZE % 64 == 0


@pytest.mark.parametrize("word", TASK_WORDS)
def test_words_of_the_task_are_one_token_and_stay_visible(loaded, word):
    ids = loaded.encode(word)
    assert len(ids) == 1
    assert loaded.decode(ids, skip_special_tokens=True) == word
