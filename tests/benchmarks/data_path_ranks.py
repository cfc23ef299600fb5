"""The two halves of ``bench_data_path``: encoding a batch, and bringing it to every rank."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from bapo_megatron.data import dump
from bapo_megatron.runtime.distributed import broadcast_buffer
from bapo_megatron.types import (
    EncodedBatch,
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    Sample,
    SampleText,
    VersionSpan,
)
from tests.distributed_launch import joined

VOCABULARY = 151_936
SAMPLES_PER_GROUP = 16
NUM_GROUPS = 64
PROMPT_TOKENS = 200


def make_batch(num_tokens: int) -> tuple[RolloutBatch, list[SampleText]]:
    """A seeded batch of 64 × 16 responses with log-normal lengths, and its texts.

    Ids follow Zipf's law, log-probs are those of a model that is sure of two tokens of three, one
    response of five was continued under newer weights, a token is 4.5 characters on average.
    """
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, VOCABULARY + 1) ** 1.05
    permuted = rng.permutation(VOCABULARY)
    letters = itertools.islice(itertools.product("etaoinshrdlcumwfgypb", repeat=4), VOCABULARY)
    words = np.array([" " * (n % 2) + "".join(word) for n, word in enumerate(letters)], object)

    def draw(count: int) -> np.ndarray:
        return permuted[rng.choice(VOCABULARY, size=count, p=weights / weights.sum())]

    num_samples = NUM_GROUPS * SAMPLES_PER_GROUP
    shares = rng.lognormal(0.0, 0.7, num_samples)
    lengths = np.maximum(1, (shares / shares.sum() * num_tokens).astype(int))
    ids = draw(int(lengths.sum())).astype(np.int32)
    is_sure = rng.random(len(ids)) < 2 / 3
    exponents = np.where(is_sure, rng.normal(-9, 3, len(ids)), rng.normal(-0.5, 1, len(ids)))
    logprobs = -np.exp(exponents).astype(np.float32)
    ends = np.cumsum(lengths)
    groups, texts = [], []
    for group_id in range(NUM_GROUPS):
        prompt_ids = draw(PROMPT_TOKENS).astype(np.int32)
        prompt = PromptTokens(f"train.parquet:{group_id}", prompt_ids, "train")
        prompt_text = "".join(words[prompt_ids])
        samples = []
        for index in range(SAMPLES_PER_GROUP):
            number = group_id * SAMPLES_PER_GROUP + index
            length = int(lengths[number])
            part = slice(ends[number] - length, ends[number])
            cut = length // 2 if number % 5 == 0 else 0
            spans = (VersionSpan(4, cut), VersionSpan(8, length - cut))
            samples.append(
                Sample(
                    group_id=group_id,
                    index=index,
                    prompt=prompt,
                    response_token_ids=ids[part],
                    behaviour_logprobs=logprobs[part],
                    versions=tuple(span for span in spans if span.num_tokens),
                    finish_reason=FinishReason.STOP,
                    reward=float(index % 2),
                    reward_components={"math": float(index % 2)},
                    answer_found=True,
                )
            )
            text = "".join(words[ids[part]])
            texts.append(SampleText(group_id, index, prompt_text, "42", text))
        groups.append(Group(group_id, tuple(samples)))
    return RolloutBatch(step=1, version=8, groups=tuple(groups)), texts


def encode(path: Path, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds that the collector takes to write a batch, and the size of what it writes."""
    batch, texts = make_batch(num_tokens)
    seconds, texts_s = [], []
    for _ in range(repeats):
        start_s = time.perf_counter()
        dump.write_texts(path, 1, texts)
        texts_s.append(time.perf_counter() - start_s)
        dump.write_batch(path, batch)
        seconds.append(time.perf_counter() - start_s)
    return {
        "seconds": seconds,
        "texts_s": texts_s,
        "tokens": sum(len(sample.response_token_ids) for sample in batch.samples),
        "dump_bytes": path.stat().st_size,
        "texts_bytes": dump.texts_path(path).stat().st_size,
    }


def deliver(path: Path, repeats: int) -> dict[str, Any]:
    """Seconds from the file to the batch on every rank, by phase, and this rank's memory.

    Memory is that of the first delivery: later ones find what the allocators kept of it.
    """
    phases: dict[str, list[float]] = {"prepare": [], "broadcast": [], "decode": [], "all": []}
    peaks, kept = [], []
    with joined() as groups:
        for _ in range(repeats):
            dist.barrier()
            before = _start_of_peak()
            marks = [time.perf_counter()]
            content = dump.read_encoded(path).content if groups.rank == 0 else None
            dist.barrier()
            marks.append(time.perf_counter())
            content = broadcast_buffer(content, groups)
            marks.append(time.perf_counter())
            batch = dump.decode_batch(EncodedBatch(str(path), content))
            marks.append(time.perf_counter())
            peaks.append(_memory("VmHWM") - before)
            kept.append(_memory("VmRSS") - before)
            dist.barrier()
            marks.append(time.perf_counter())
            for name, start_s, end_s in zip(
                ("prepare", "broadcast", "decode"), marks, marks[1:], strict=False
            ):
                phases[name].append(end_s - start_s)
            phases["all"].append(marks[-1] - marks[0])
            del batch
    return {"phases": phases, "peak_bytes": peaks[0], "kept_bytes": kept[0]}


def _start_of_peak() -> int:
    """Forget the highest memory of this process so far; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
