import json

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.tiny.model import (
    TASK_WORDS,
    VOCABULARY_SIZE,
    build_model,
    build_tokenizer,
    save_model,
)

STRANGE_TEXTS = (
    "",
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n\n#### 72",
    "Find $\\sum_{k=1}^{10} \\frac{k}{\\boxed{2}}$  for 日本 é\u200b😀 it's \x00\x7f",
    "tabs\tand\r\nline ends\n\n+3 maybe 4, no 5",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A saved model that was never trained."""
    directory, tokenizer = tmp_path_factory.mktemp("model"), build_tokenizer()
    save_model(build_model(tokenizer, seed=0), tokenizer, directory)
    return directory


def test_generation_ends_at_the_end_token(directory):
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 1


def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone():
    tokenizer = build_tokenizer()
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    first, same, other = (build_model(tokenizer, seed) for seed in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert torch.equal(torch.rand(4), expected)


@pytest.fixture(scope="module", params=[AutoTokenizer, PreTrainedTokenizerFast])
def loaded(request, directory):
    """The tokenizer as programs that know only its directory load it."""
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


@pytest.mark.parametrize("word", TASK_WORDS)
def test_words_of_the_task_are_one_token_and_stay_visible(loaded, word):
    ids = loaded.encode(word)
    assert len(ids) == 1
    assert loaded.decode(ids, skip_special_tokens=True) == word
