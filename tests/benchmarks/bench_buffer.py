"""Cost of saving the unfinished samples: how long the loop stands still, writes, reads, and bytes.

Token ids are uniform over the vocabulary, the worst case for the size. The last part of each
response is in pieces, as servers send them.

    python -m tests.benchmarks.bench_buffer --out docs/benchmarks/buffer_cpu_202611
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from bapo_megatron.data.record import Completion
from bapo_megatron.rollout.buffer import RolloutBuffer
from bapo_megatron.rollout.saved import SavedRollout, read_saved, write_saved
from bapo_megatron.types import FinishReason, Prompt, VersionSpan
from tests.benchmarks.harness import finish, machine, page, report_arguments, table
from tests.rollout.calls import begin
from tests.rollout.saved_files import AT_START

_VOCAB_SIZE = 151_936
_GROUP_SIZE = 16
_RESPONSE_TOKENS = 24_000
_PIECES, _PIECE_TOKENS = 20, 256
"""Part of each response that came since the newest checkpoint."""
_TICK_S = 0.005


ROWS = {
    "the collector's loop stands still for the snapshot": "{blocked_ms:,.0f} ms, "
    "{blocked_cpu_ms:,.0f} ms of CPU time",
    "a thread writes and flushes for": "{write_s:.1f} s, {write_cpu_s:.1f} s of CPU time",
    "longest wait of the loop meanwhile": "{longest_wait_ms:,.0f} ms",
    "memory beyond the buffer meanwhile": "{memory_mb:,.0f} MB",
    "a resume reads for": "{read_s:.1f} s, {read_cpu_s:.1f} s of CPU time",
    "size": "{bytes_per_token:.2f} bytes per token",
}


def fill(num_tokens: int) -> RolloutBuffer:
    rng, buffer = np.random.default_rng(0), RolloutBuffer()
    while num_tokens > 0:
        prompt = Prompt(f"train:{len(buffer)}", tuple(range(200)), "42", "prompt " * 100, "train")
        for episode in buffer.start_group(prompt, _GROUP_SIZE).episodes:
            call = begin(episode)
            length = min(num_tokens, int(rng.integers(1, 2 * _RESPONSE_TOKENS)))
            num_tokens -= length
            num_late = min(length // 2, _PIECES * _PIECE_TOKENS)
            for version, size in ((1, length - num_late), *((2, n) for n in _pieces(num_late))):
                token_ids = rng.integers(0, _VOCAB_SIZE, size, dtype=np.int32)
                logprobs = -rng.exponential(size=size).astype(np.float32)
                spans = (VersionSpan(version, size),) if size else ()
                part = Completion(token_ids, logprobs, spans, FinishReason.ABORT)
                call.append(part)
                if version == 1:
                    assert len(call.turn.token_ids) == size  # joined
    return buffer


def _pieces(num_tokens: int) -> list[int]:
    return [min(_PIECE_TOKENS, num_tokens - n) for n in range(0, num_tokens, _PIECE_TOKENS)]


async def measure(num_tokens: int, path: Path) -> dict[str, float]:
    buffer = fill(num_tokens)
    samples = [episode for group in buffer for episode in group.episodes]
    waits, memory = [0.0], [before := psutil.Process().memory_info().rss]

    async def tick() -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            waits.append(time.monotonic() - began_s - _TICK_S)
            memory.append(psutil.Process().memory_info().rss)

    began_s, cpu_s = time.monotonic(), [time.process_time()]
    saved = SavedRollout(AT_START, buffer.snapshot())
    taken_s = time.monotonic()
    cpu_s.append(time.process_time())
    ticking = asyncio.create_task(tick())
    await asyncio.to_thread(write_saved, path, saved)
    written_s = time.monotonic()
    cpu_s.append(time.process_time())
    ticking.cancel()
    restored = read_saved(path)
    read_s = time.monotonic() - written_s
    cpu_s.append(time.process_time())
    blocked_cpu_s, write_cpu_s, read_cpu_s = np.diff(cpu_s).tolist()
    for group, copy in zip(buffer, restored.buffer, strict=True):
        for episode, again in zip(group.episodes, copy.episodes, strict=True):
            [call], [read] = episode.record.calls, again.record.calls
            assert call.turn.token_ids.tobytes() == read.turn.token_ids.tobytes()
            assert call.turn.logprobs.tobytes() == read.turn.logprobs.tobytes()
    return {
        "num_samples": len(samples),
        "blocked_ms": 1e3 * (taken_s - began_s),
        "blocked_cpu_ms": 1e3 * blocked_cpu_s,
        "write_s": written_s - taken_s,
        "write_cpu_s": write_cpu_s,
        "longest_wait_ms": 1e3 * max(waits),
        "read_s": read_s,
        "read_cpu_s": read_cpu_s,
        "bytes_per_token": path.stat().st_size / num_tokens,
        "memory_mb": (max(memory) - before) / 1e6,
    }


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=200_000_000)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        row = asyncio.run(measure(options.tokens, Path(directory) / "rollout.parquet"))
    where = machine()
    text = page(
        "The buffer of unfinished samples in a checkpoint",
        where,
        f"{options.tokens:,} response tokens with log-probs in {row['num_samples']:,} samples; ids "
        f"are uniform over {_VOCAB_SIZE:,}. One save and one read. The machine's load average was "
        f"{load:.1f} before it began.",
        table(("", ""), [(what, text.format(**row)) for what, text in ROWS.items()]),
    )
    finish(options.out, text, {"machine": where, "load": load, "row": row})


if __name__ == "__main__":
    main()
