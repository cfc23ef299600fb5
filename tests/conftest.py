"""Fixtures that several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that start servers or several processes, and other slow ones, come first.

    Workers take whole modules (``--dist loadscope``); a long one at the end would run alone.
    """
    marks = ("sglang", "distributed", "slow")
    long = {item.path for item in items if any(map(item.get_closest_marker, marks))}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with GSM8K and AIME, beside the checkout; skips where it is not there."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}")
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer with one token per byte and a ChatML template, made offline.

    Byte tokens have ids 0 to 255; ``<|im_end|>`` ends a sequence.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder
