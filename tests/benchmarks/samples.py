"""Random models, and samples of made-up tokens, as benchmarks and the acceptance on a GPU use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.types import FinishReason, PromptTokens, Sample, VersionSpan


def make_wide_model(
    directory: Path, *, hidden: int, layers: int, positions: int, **settings: Any
) -> None:
    """Write a random Qwen2 with the demo's tokenizer."""
    from examples.tiny.model import build_tokenizer
    from tests.policy.tiny_models import make_model

    tokenizer = build_tokenizer(positions)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 192),
        "max_position_embeddings": positions,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    make_model("qwen2", directory, **sizes | settings)
    tokenizer.save_pretrained(directory)


def make_sample(
    group_id: int,
    index: int,
    prompt: PromptTokens,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    spans: Sequence[tuple[int, int]],
    reward: float,
) -> Sample:
    """A graded response; ``spans`` are versions with their numbers of tokens, in order."""
    return Sample(
        group_id=group_id,
        index=index,
        prompt=prompt,
        response_token_ids=token_ids.astype(np.int32),
        behaviour_logprobs=logprobs.astype(np.float32),
        versions=tuple(VersionSpan(version, number) for version, number in spans if number),
        finish_reason=FinishReason.STOP,
        reward=reward,
        reward_components={"math": reward},
        answer_found=True,
    )
