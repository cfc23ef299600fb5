"""The tiny model, a Qwen2 or a Qwen3 with experts, with random weights, and its tokenizer.

The tokenizer knows the 256 bytes and a few words of the task, so no text is unknown to it.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.utils import logging

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


EXPERTS_PER_TOKEN = 2
_EXPERT_SIZE = 64
"""Channels of an expert: two of them compute as much as the MLP of the dense model."""


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int, num_experts: int = 0) -> Any:
    """Build a model of two layers, whose values ``seed`` draws.

    A ``Qwen2ForCausalLM`` of 115,264 parameters, or with experts a ``Qwen3MoeForCausalLM`` with
    ``num_experts`` of them in each layer.
    """
    import transformers

    kind, kind_of_config = transformers.Qwen2ForCausalLM, transformers.Qwen2Config
    traits: dict[str, Any] = {}
    if num_experts:
        kind, kind_of_config = transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig
        traits = {
            "num_experts": num_experts,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "moe_intermediate_size": _EXPERT_SIZE,
            "norm_topk_prob": True,
            "head_dim": 16,
        }
    config = kind_of_config(
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
        architectures=[kind.__name__],
        dtype="float32",
        **traits,
    )
    # Layers draw initial values from the global generator before ours replace them.
    with torch.random.fork_rng(devices=[]):
        model = kind(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return model


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Write model, tokenizer and their configuration to an existing directory."""
    logging.disable_progress_bar()
    model.save_pretrained(model_dir)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    ).save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    # safetensors makes it private; a server may be another user.
    (model_dir / "model.safetensors").chmod(0o644)
