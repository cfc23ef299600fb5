"""Make the tiny model, warmed up on written-out solutions, and its data: deterministic.

Shape legend: B = solutions of one step, S = their longest length in tokens.
"""

import functools
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from bapo_megatron.runtime.files import atomic_directory, naming
from bapo_megatron.telemetry.console import ProgressLine
from examples.tiny.model import build_model, build_tokenizer, save_model
from examples.tiny.task import Problem, SolutionMixture, split_problems, write_solution

RECIPE_NAME = "tiny.json"
"""Says how a directory was made, and so marks it as one of ours."""

IGNORED_LABEL = -100
"""Prompt and padding positions carry this label and no loss."""

NUM_LENGTH_BUCKETS = 4
"""Parts of a batch, by length, that are padded and differentiated one after the other."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a prompt and of its response."""


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


class TinyReport(NamedTuple):
    """The result of ``make_tiny``."""

    model_dir: Path
    """Hugging Face directory of the warmed-up model."""
    num_parameters: int
    warmup_s: float
    final_loss: float
    """Mean cross entropy in nats per response token at the end of the warm-up."""


def make_tiny(
    out_dir: Path, seed: int, settings: WarmupSettings | None = None, *, num_experts: int = 0
) -> TinyReport:
    """Make a tiny model with a supervised warm-up, and its training and held-out prompts.

    On the same machine, the same seed and settings give the same bytes of weights and data. The
    complete result appears at once and replaces an earlier one.

    Args:
        out_dir: Gets model/, tiny.json, train.jsonl and heldout.jsonl.
        seed: Determines the split of the problems, the initial weights and the warm-up.
        settings: How the warm-up is optimised; the demo's by default.
        num_experts: Experts of a layer; 0: a dense model.

    Raises:
        ValueError: ``out_dir`` holds something else, which would be lost.
        OSError: ``out_dir`` cannot be written.
    """
    settings = settings or WarmupSettings()
    out_dir = Path(os.path.realpath(out_dir))
    _refuse_foreign(out_dir)
    splits = split_problems(seed)
    with naming(out_dir), atomic_directory(out_dir) as temporary_dir:
        # First, so that a directory that cannot be written costs no warm-up.
        for name, problems in (("train", splits.train), ("heldout", splits.heldout)):
            rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in problems]
            (temporary_dir / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed, num_experts)
        start_s = time.monotonic()
        final_loss = warm_up(model, tokenizer, splits.warmup, settings, seed)
        warmup_s = time.monotonic() - start_s
        (temporary_dir / "model").mkdir()
        save_model(model, tokenizer, temporary_dir / "model")
        recipe = {
            "seed": seed,
            "experts": num_experts,
            "warmup": asdict(settings),
            "torch": torch.__version__,
        }
        (temporary_dir / RECIPE_NAME).write_text(json.dumps({"recipe": recipe}, indent=2) + "\n")
    return TinyReport(out_dir / "model", model.num_parameters(), warmup_s, final_loss)


def _refuse_foreign(out_dir: Path) -> None:
    if os.path.lexists(out_dir) and not out_dir.is_dir():
        raise ValueError(f"{out_dir}: not a directory; name another one")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not (out_dir / RECIPE_NAME).is_file():
        raise ValueError(
            f"{out_dir} is not empty and holds no {RECIPE_NAME} of an earlier model, so its "
            "content would be lost; name another directory or remove this one"
        )


def warm_up(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    settings: WarmupSettings,
    seed: int,
) -> float:
    """Train ``model`` in place to write solutions like those of ``SolutionMixture()``.

    ``seed`` draws problems, with replacement, and solutions. One torch thread computes, because the
    weights depend on their number. The model is left in evaluation mode.

    Returns:
        Mean cross entropy in nats per response token over the last tenth of the steps.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.peak_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    losses: list[float] = []
    model.train()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ProgressLine() as progress:
            for step, pairs in enumerate(_draw_batches(tokenizer, problems, settings, seed)):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, settings)
                optimizer.zero_grad(set_to_none=True)
                losses.append(_accumulate_gradients(model, pairs, tokenizer.pad_token_id))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                progress.update(
                    f"warming up: step {step + 1}/{settings.num_steps}, loss {losses[-1]:.3f}"
                )
    finally:
        torch.set_num_threads(num_threads)
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _draw_batches(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    settings: WarmupSettings,
    seed: int,
) -> Iterator[list[Pair]]:
    mixture, rng = SolutionMixture(), random.Random(f"warmup-{seed}")

    @functools.cache
    def prompt_ids(problem: Problem) -> Any:
        message = {"role": "user", "content": problem.prompt}
        return tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )

    for _ in range(settings.num_steps):
        drawn = rng.choices(problems, k=settings.batch_size)
        solutions = tokenizer([write_solution(problem, mixture, rng) for problem in drawn])
        yield [
            (prompt_ids(problem), [*solution_ids, tokenizer.eos_token_id])
            for problem, solution_ids in zip(drawn, solutions["input_ids"], strict=True)
        ]


def _accumulate_gradients(model: Any, pairs: list[Pair], pad_id: int) -> float:
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
    num_fall_steps = settings.num_steps - settings.num_rise_steps
    done_share = (step - settings.num_rise_steps + 1) / (num_fall_steps + 1)
    return settings.peak_lr * 0.5 * (1 + math.cos(math.pi * done_share))


def pad_batch(pairs: Sequence[Pair], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad pairs to one length, on the right.

    Returns:
        ``input_ids`` and ``labels``, both [B, S] int64; labels are ``IGNORED_LABEL`` outside
        responses.
    """
    ids = [torch.tensor([*prompt, *response]) for prompt, response in pairs]
    labels = [torch.tensor([*[IGNORED_LABEL] * len(p), *response]) for p, response in pairs]
    input_ids_BS = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    return input_ids_BS, pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
