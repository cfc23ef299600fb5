"""What ``bench_data_path`` measures, in processes that import one tree or another.

Run by path, with PYTHONPATH set to the tree that is measured, because the commit before has no such
file; it therefore imports nothing from ``tests``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from bapo_megatron import types
from bapo_megatron.data import dump

VOCABULARY = 151_936
SAMPLES_PER_GROUP = 16
NUM_GROUPS = 64
PROMPT_TOKENS = 200
IS_FORMER = hasattr(dump, "dump_bytes")
"""Whether this is the tree from before batches were encoded once."""


def make_batch(num_tokens: int) -> tuple[types.RolloutBatch, list[Any]]:
    """A seeded batch of 64 × 16 responses with log-normal lengths, and its texts.

    Ids follow Zipf's law, log-probs are those of a model that is sure of two tokens of three, one
    response of five was continued under newer weights, a token is 4.5 characters on average.
    """
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, VOCABULARY + 1) ** 1.05
    permuted = rng.permutation(VOCABULARY)
    words = np.array(_words(), dtype=object)

    def draw(count: int) -> np.ndarray:
        return permuted[rng.choice(VOCABULARY, size=count, p=weights / weights.sum())]

    num_samples = NUM_GROUPS * SAMPLES_PER_GROUP
    shares = rng.lognormal(0.0, 0.7, num_samples)
    lengths = np.maximum(1, (shares / shares.sum() * num_tokens).astype(int))
    ids = draw(int(lengths.sum()))
    is_sure = rng.random(len(ids)) < 2 / 3
    logprobs = -np.exp(
        np.where(is_sure, rng.normal(-9, 3, len(ids)), rng.normal(-0.5, 1, len(ids)))
    )
    begins = np.cumsum(lengths) - lengths
    groups, texts = [], []
    for group_id in range(NUM_GROUPS):
        prompt_ids = draw(PROMPT_TOKENS).tolist()
        prompt_text = "".join(words[prompt_ids])
        prompt = _prompt(group_id, prompt_ids, prompt_text)
        samples = []
        for index in range(SAMPLES_PER_GROUP):
            number = group_id * SAMPLES_PER_GROUP + index
            length = int(lengths[number])
            part = slice(begins[number], begins[number] + length)
            cut = length // 2 if number % 5 == 0 else 0
            text = "".join(words[ids[part]])
            samples.append(_sample(group_id, index, prompt, ids[part], logprobs[part], cut, text))
            texts.append((group_id, index, prompt_text, "42", text))
        groups.append(types.Group(group_id, tuple(samples)))
    return types.RolloutBatch(step=1, version=8, groups=tuple(groups)), texts


def _words() -> list[str]:
    """A word for every id: four letters, every other one after a space."""
    words = itertools.islice(itertools.product("etaoinshrdlcumwfgypb", repeat=4), VOCABULARY)
    return [" " * (number % 2) + "".join(word) for number, word in enumerate(words)]


def _prompt(group_id: int, ids: list[int], text: str) -> Any:
    name = f"train.parquet:{group_id}"
    if IS_FORMER:
        return types.Prompt(name, tuple(ids), "42", text, "train")
    return types.PromptTokens(name, np.array(ids, np.int32), "train")


def _sample(
    group_id: int,
    index: int,
    prompt: Any,
    ids: np.ndarray,
    logprobs: np.ndarray,
    cut: int,
    text: str,
) -> types.Sample:
    """A response whose first ``cut`` tokens are of version 4."""
    fields: dict[str, Any] = {
        "group_id": group_id,
        "index": index,
        "prompt": prompt,
        "behaviour_logprobs": logprobs.astype(np.float32),
        "finish_reason": types.FinishReason.STOP,
        "reward": float(index % 2),
        "reward_components": {"math": float(index % 2)},
        "answer_found": True,
    }
    if IS_FORMER:
        versions = np.where(np.arange(len(ids)) < cut, 4, 8)
        return types.Sample(
            response_token_ids=ids.astype(np.int64), versions=versions, response_text=text, **fields
        )
    spans = [types.VersionSpan(4, cut), types.VersionSpan(8, len(ids) - cut)]
    return types.Sample(
        response_token_ids=ids.astype(np.int32),
        versions=tuple(span for span in spans if span.num_tokens),
        **fields,
    )


def encode(path: Path, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds that the collector takes to write a batch, and the size of what it writes."""
    batch, texts = make_batch(num_tokens)
    seconds, texts_s = [], []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        if not IS_FORMER:
            dump.write_texts(path, 1, [types.SampleText(*text) for text in texts])
        texts_s.append(time.perf_counter() - begin_s)
        dump.write_batch(path, batch)
        seconds.append(time.perf_counter() - begin_s)
    return {
        "seconds": seconds,
        "texts_s": texts_s,
        "tokens": sum(len(sample.response_token_ids) for sample in batch.samples),
        "dump_bytes": path.stat().st_size,
        "texts_bytes": 0 if IS_FORMER else dump.texts_path(path).stat().st_size,
    }


def deliver(path: Path, rank: int, num_ranks: int, port: int, repeats: int) -> dict[str, Any]:
    """Seconds from the file to the batch on every rank, by phase, and this rank's memory.

    Memory is that of the first delivery: later ones find what the allocators kept of it.
    """
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    groups = SimpleNamespace(rank=rank, control=dist.group.WORLD)
    phases: dict[str, list[float]] = {"prepare": [], "broadcast": [], "decode": [], "all": []}
    peaks, kept = [], []
    for _ in range(repeats):
        dist.barrier()
        before = _start_of_peak()
        marks = [time.perf_counter()]
        batch = _former(path, groups, marks) if IS_FORMER else _current(path, groups, marks)
        peaks.append(_memory("VmHWM") - before)
        kept.append(_memory("VmRSS") - before)
        dist.barrier()
        marks.append(time.perf_counter())
        for name, begin_s, end_s in zip(
            ("prepare", "broadcast", "decode"), marks, marks[1:], strict=False
        ):
            phases[name].append(end_s - begin_s)
        phases["all"].append(marks[-1] - marks[0])
        del batch
    dist.destroy_process_group()
    return {"phases": phases, "peak_bytes": peaks[0], "kept_bytes": kept[0]}


def _former(path: Path, groups: Any, marks: list[float]) -> types.RolloutBatch:
    from bapo_megatron.runtime.distributed import broadcast_bytes

    content = dump.dump_bytes(dump.read_batch(path)) if groups.rank == 0 else None
    dist.barrier()
    marks.append(time.perf_counter())
    content = broadcast_bytes(content, groups)
    marks.append(time.perf_counter())
    batch = dump.read_batch(content)
    marks.append(time.perf_counter())
    return batch


def _current(path: Path, groups: Any, marks: list[float]) -> types.RolloutBatch:
    from bapo_megatron.runtime.distributed import broadcast_buffer

    content = dump.read_encoded(path).content if groups.rank == 0 else None
    dist.barrier()
    marks.append(time.perf_counter())
    content = broadcast_buffer(content, groups)
    marks.append(time.perf_counter())
    batch = dump.decode_batch(types.EncodedBatch(str(path), content))
    marks.append(time.perf_counter())
    return batch


def _start_of_peak() -> int:
    """Forget the highest memory of this process so far; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Do one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("encode", "deliver"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    if given.part == "encode":
        result = encode(given.path, given.tokens, given.repeats)
    else:
        result = deliver(given.path, given.rank, given.ranks, given.port, given.repeats)
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
