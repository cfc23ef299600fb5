"""The models and the recorded rollouts of ``bench_trl.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bapo_megatron.data.dump import write_batch
from bapo_megatron.tiny.model import build_model, build_tokenizer, save_model
from bapo_megatron.types import Group, PromptTokens, RolloutBatch
from tests.benchmarks.samples import make_sample, make_wide_model
from tests.policy.tiny_models import load_reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

FIRST_TOKEN = 5
"""Ids below are the tokenizer's own."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model and what it is trained on."""

    name: str
    groups: int
    group_size: int
    updates: int
    prompt_tokens: int
    min_response_tokens: int
    max_response_tokens: int
    trl_divisors: tuple[int, ...]
    """TRL is tried with a rank's samples of an update in this many micro-batches."""
    max_micro_batch_tokens: int
    """This project's."""

    @property
    def samples_per_update(self) -> int:
        """Samples of an update, over all ranks."""
        return self.groups * self.group_size // self.updates


def make_tiny_model(directory: Path) -> None:
    """Write the demo's model as it is before its warm-up."""
    directory.mkdir(parents=True)
    tokenizer = build_tokenizer()
    save_model(build_model(tokenizer, 0), tokenizer, directory)


def make_trl_model(directory: Path) -> None:
    """Write a random model of 11 million parameters."""
    sizes = {"vocab_size": 8192, "initializer_range": 0.02, "tie_word_embeddings": True}
    make_wide_model(directory, hidden=384, layers=5, positions=2048, **sizes)


TINY = Load("the demo's model", 32, 8, 4, 16, 8, 80, (1, 2), 4096)
WIDE = Load("a wider model", 4, 4, 2, 32, 48, 256, (1, 2), 4096)
LOADS = {"tiny": TINY, "wide": WIDE}
MODELS = {"tiny": make_tiny_model, "wide": make_trl_model}


def write_rollouts(directory: Path, model_dir: Path, load: Load, batches: int) -> int:
    """Write random rollouts with the log-probs of the model; returns the tokens of a batch.

    Every update has the same lengths, evenly spaced, in another order: TRL divides the loss of an
    update by the mean number of tokens over the updates of its batch, this project by the update's
    own. Every group has both rewards, so that no response is left out.
    """
    model = load_reference("qwen2", model_dir).eval()
    draw = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    lengths = np.linspace(
        load.min_response_tokens, load.max_response_tokens, load.samples_per_update
    ).astype(int)
    for number in range(batches):
        of_batch = np.concatenate([draw.permutation(lengths) for _ in range(load.updates)])
        groups = []
        for place, of_group in enumerate(of_batch.reshape(load.groups, load.group_size)):
            group_id = number * load.groups + place
            prompt = draw.integers(FIRST_TOKEN, vocabulary, load.prompt_tokens)
            responses = [draw.integers(FIRST_TOKEN, vocabulary, length) for length in of_group]
            num_right = draw.integers(1, load.group_size)
            tokens = PromptTokens(f"made:{group_id}", prompt.astype(np.int32))
            logprobs = _logprobs(model, prompt, responses)
            samples = []
            for index, (ids, row) in enumerate(zip(responses, logprobs, strict=True)):
                spans, reward = [(number * load.updates, len(ids))], float(index < num_right)
                samples.append(make_sample(group_id, index, tokens, ids, row, spans, reward))
            groups.append(Group(group_id, tuple(samples)))
        batch = RolloutBatch(number + 1, version=number * load.updates, groups=tuple(groups))
        write_batch(directory / f"{dump_name(number)}.parquet", batch)
    return int(lengths.sum()) * load.updates


def _logprobs(
    model: Any, prompt: np.ndarray, responses: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
    """Log-probs of each response, from one padded batch."""
    longest = max(map(len, responses))
    rows = [np.concatenate([prompt, np.pad(r, (0, longest - len(r)))]) for r in responses]
    ids = torch.from_numpy(np.stack(rows))
    with torch.no_grad():
        logprobs = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, len(prompt) :, None]).squeeze(-1).numpy()
    for row, response in zip(chosen, responses, strict=True):
        yield row[: len(response)].astype(np.float32)


def training_order(load: Load, ranks: int, batches: int) -> list[str]:
    """Groups, as "dump:group_id", in the order of TRL's data set.

    A rank gets a contiguous part of a batch and cuts it into updates, so these parts are put
    together from the rank's part of every update.
    """
    part = load.groups // load.updates // ranks
    return [
        f"{dump_name(number)}:{number * load.groups + (update * ranks + rank) * part + place}"
        for number in range(batches)
        for rank in range(ranks)
        for update in range(load.updates)
        for place in range(part)
    ]


def dump_name(number: int) -> str:
    """Name of the dump of a batch, which are counted from 0, without suffix."""
    return f"step_{number + 1:06d}"


def padded_share(load: Load, tokens: int) -> float:
    """Share of padding in what TRL computes: all rows are as long as the batch's longest."""
    samples = load.groups * load.group_size
    slots = samples * (load.prompt_tokens + load.max_response_tokens)
    return 1 - (tokens + samples * load.prompt_tokens) / slots
