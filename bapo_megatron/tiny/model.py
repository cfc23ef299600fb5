"""The tiny model: a Qwen2 with random weights, and its tokenizer.

The tokenizer knows the 256 bytes and a few words of the task, so no text is unknown to it.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2Tokenizer

PAD, EOS, BOS, USER, ASSISTANT = "<pad>", "<eos>", "<bos>", "<|user|>", "<|assistant|>"
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
    """Build the byte-level tokenizer with its chat template; nothing in it is learned.

    It is a ``Qwen2Tokenizer`` because ``AutoTokenizer`` makes one of whatever lies beside a Qwen2
    model, with Qwen2's pre-tokenizer; words of the task are added tokens, which it leaves whole.
    Sequences, prompt and response together, have at most ``max_tokens``.
    """
    bytes_in_letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [PAD, EOS, BOS, USER, ASSISTANT, *bytes_in_letters]
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


INITIAL_STD = 0.08
"""Standard deviation of the initial matrices; biases start at 0 and norms at 1."""


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """Build a two-layer ``Qwen2ForCausalLM`` of 115,264 parameters, whose values ``seed`` draws."""
    from transformers import Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=INITIAL_STD,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )
    # Layers draw initial values from the global generator before ours replace them.
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return model


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Write model, tokenizer and their configuration to an existing directory."""
    model.config.save_pretrained(model_dir)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    ).save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    path = model_dir / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; a server may be another user
