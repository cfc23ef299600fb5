"""The supervised warm-up of the tiny model on written-out solutions.

Shape legend: B = solutions of one step, S = their longest length in tokens.
"""

import functools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from bapo_megatron.telemetry.console import ProgressLine
from bapo_megatron.tiny.task import Problem, SolutionMixture, write_solution

IGNORED_LABEL = -100
"""Prompt and padding positions carry this label and no loss."""

NUM_LENGTH_BUCKETS = 4
"""Parts of a batch, by length, that are padded and differentiated one after the other."""


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """The optimisation of the warm-up."""

    num_steps: int = 700
    batch_size: int = 64
    """Solutions per step."""
    peak_lr: float = 6e-3
    """AdamW learning rate after the rise; it then falls to zero along a cosine."""
    num_rise_steps: int = 30
    """Steps of the linear rise."""
    num_threads: int = 1
    """Torch threads. Fixed, because sums, and so the weights, depend on their number."""


def warm_up(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    mixture: SolutionMixture,
    settings: WarmupSettings,
    seed: int,
) -> float:
    """Train ``model`` in place to write solutions like those of ``mixture``.

    Problems are drawn with replacement (``seed``); each draw has a new solution. The model is left
    in evaluation mode.

    Returns:
        Mean cross entropy in nats per response token over the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.peak_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    losses: list[float] = []
    model.train()
    with _torch_threads(settings.num_threads), ProgressLine() as progress:
        for step, pairs in enumerate(_draw_batches(tokenizer, problems, mixture, settings, seed)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, settings)
            optimizer.zero_grad(set_to_none=True)
            losses.append(_accumulate_gradients(model, pairs, tokenizer.pad_token_id))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done = f"step {step + 1}/{settings.num_steps}, loss {losses[-1]:.3f}"
            progress.update(f"warming the model up: {done}")
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _draw_batches(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    mixture: SolutionMixture,
    settings: WarmupSettings,
    seed: int,
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Draw the pairs of prompt ids and response ids of every step."""
    rng = random.Random(f"warmup-{seed}")

    @functools.cache
    def prompt_ids(problem: Problem) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            return_dict=False,
        )
        return ids

    for _ in range(settings.num_steps):
        drawn = rng.choices(problems, k=settings.batch_size)
        solutions = tokenizer([write_solution(problem, mixture, rng) for problem in drawn])
        yield [
            (prompt_ids(problem), [*solution_ids, tokenizer.eos_token_id])
            for problem, solution_ids in zip(drawn, solutions["input_ids"], strict=True)
        ]


def _accumulate_gradients(
    model: Any, pairs: list[tuple[list[int], list[int]]], pad_id: int
) -> float:
    """Add the gradient of the mean cross entropy per response token and return that mean."""
    num_tokens = sum(len(response) for _, response in pairs)
    by_length = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    bucket_size = math.ceil(len(pairs) / NUM_LENGTH_BUCKETS)
    mean = 0.0
    for start in range(0, len(pairs), bucket_size):
        input_ids_BS, labels_BS = pad_batch(by_length[start : start + bucket_size], pad_id)
        # Padding stands on the right, so causal attention needs no mask for it.
        logits_BSV = model(input_ids_BS[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1),
            labels_BS[:, 1:].flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        (loss / num_tokens).backward()
        mean += loss.item() / num_tokens
    return mean


def learning_rate(step: int, settings: WarmupSettings) -> float:
    """Return the learning rate of a step: a linear rise, then a cosine to zero."""
    if step < settings.num_rise_steps:
        return settings.peak_lr * (step + 1) / settings.num_rise_steps
    remaining = settings.num_steps - settings.num_rise_steps
    done_share = (step - settings.num_rise_steps + 1) / (remaining + 1)
    return settings.peak_lr * 0.5 * (1 + math.cos(math.pi * done_share))


def pad_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad pairs of prompt ids and response ids to one length, on the right.

    Returns:
        ``input_ids`` and ``labels``, both [B, S] int64; labels are ``IGNORED_LABEL`` outside
        responses.
    """
    input_ids = [torch.tensor([*prompt, *response]) for prompt, response in pairs]
    labels = [
        torch.tensor([*[IGNORED_LABEL] * len(prompt), *response]) for prompt, response in pairs
    ]
    return (
        pad_sequence(input_ids, batch_first=True, padding_value=pad_id),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    )


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
