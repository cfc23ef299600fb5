"""The tiny model's tokenizer: the 256 bytes and a few words of the task, so no text is unknown."""

from __future__ import annotations

from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer

PAD, EOS, BOS, USER, ASSISTANT = "<pad>", "<eos>", "<bos>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, EOS, BOS, USER, ASSISTANT)
"""Their ids are 0 to 4; the bytes follow."""

TASK_WORDS = ("\\boxed{", "\n\\boxed{", "\n+", " maybe ", ", no ", "=?")
"""Texts that are one token each; every other character is one token per byte."""

VOCABULARY_SIZE = 320
"""Rows of the embedding: a multiple of 64, so that any usual tensor-parallel size divides it."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(max_tokens: int = 2048) -> Qwen2Tokenizer:
    """Build the tokenizer; nothing is learned, so it is always the same.

    It is a ``Qwen2Tokenizer`` because ``AutoTokenizer`` makes one of whatever lies beside a Qwen2
    model, with Qwen2's pre-tokenizer; words of the task are added tokens, which it leaves whole.

    Args:
        max_tokens: The model's longest sequence, prompt and response.

    Returns:
        A byte-level tokenizer with a chat template and at most ``VOCABULARY_SIZE`` ids.
    """
    letters = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in TASK_WORDS])
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) <= VOCABULARY_SIZE
    return tokenizer
