"""Times, in CPU seconds, how long a rank takes to divide samples over ranks and micro-batches.

python tests/benchmarks/bench_packing.py

Imports nothing from ``tests``, so PYTHONPATH chooses the tree that is measured.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bapo_megatron.data.packing import PackingRules, SequenceFlops, pack_update
from bapo_megatron.types import FinishReason, PromptTokens, Sample

PROMPT_TOKENS, MAX_TOKENS = 200, 65_536
FLOPS_32B = SequenceFlops(per_token=64_000_000_000, per_pair=655_360)


def make_samples(count: int) -> list[Sample]:
    """Seeded samples with log-normal lengths: 33,000 tokens on average, at most 65,536."""
    lengths = np.random.default_rng(0).lognormal(np.log(28_000), 0.6, count)
    prompt = PromptTokens("made:0", np.zeros(PROMPT_TOKENS, np.int32))
    return [
        Sample(
            group_id=number,
            index=0,
            prompt=prompt,
            response_token_ids=np.broadcast_to(np.int32(0), (length,)),
            behaviour_logprobs=np.broadcast_to(np.float32(0), (length,)),
            versions=(),
            finish_reason=FinishReason.STOP,
            reward=0.0,
        )
        for number, length in enumerate(
            np.clip(lengths, 1, MAX_TOKENS - PROMPT_TOKENS).astype(int).tolist()
        )
    ]


def main() -> None:
    """Print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[65_536, 262_144])
    given = parser.parse_args()
    print("samples  tokens  seconds  micro-batches  fill  imbalance")  # noqa: T201
    for count in given.samples:
        samples = make_samples(count)
        for max_tokens in given.max_tokens:
            rules = PackingRules(given.ranks, max_tokens, FLOPS_32B, 16, 128)
            begin_s = time.process_time()  # what else runs on the machine does not count
            packing = pack_update(samples, range(count), rules)
            seconds = time.process_time() - begin_s
            flops = packing.rank_flops
            print(  # noqa: T201
                f"{count:7,}  {max_tokens:6}  {seconds:7.3f}  {len(packing.ranks[0]):13,}  "
                f"{packing.real_tokens / packing.slots:.3f}  "
                f"{max(flops) * len(flops) / sum(flops):.3f}"
            )


if __name__ == "__main__":
    main()
