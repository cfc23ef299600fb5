"""Sampling in the collector's process: the local engine beside transformers' ``generate``.

    python -m bapo_megatron make-tiny /tmp/tiny --seed 0
    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_local_engine /tmp/tiny/model --threads 1

Both sample the same number of tokens for prompts of the same lengths, in groups that share one; no
token ends a response. The last contender has four times as many requests as rows: responses of
different lengths, so that rows are freed and filled again and again.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.engine.base import CompletionSink, GenerateRequest, SamplingSettings
from bapo_megatron.engine.local.backend import load_model
from bapo_megatron.engine.local.engine import LocalEngine
from tests.benchmarks.harness import Contender, Section, arguments, interleave, publish

GROUP = 8
BURST = 8
"""Decode steps that are asked for at once."""


def make_requests(
    number: int, options: argparse.Namespace, *, are_ragged: bool
) -> list[GenerateRequest]:
    """Requests of groups of ``GROUP``; ragged ones have a tenth of the tokens up to all of them."""
    draw = np.random.default_rng(0)
    shortest = max(options.tokens // 10, 1) if are_ragged else options.tokens
    requests = []
    for n in range(number):
        if n % GROUP == 0:
            length = int(draw.integers(options.prompt // 2, options.prompt + 1))
            prompt = draw.integers(3, 200, size=length).tolist()
        max_new_tokens = int(draw.integers(shortest, options.tokens + 1))
        settings = SamplingSettings(1.0, max_new_tokens, seed=n)
        requests.append(GenerateRequest(input_ids=prompt, sampling=settings, label="", version=0))
    return requests


async def sample(engine: LocalEngine, requests: list[GenerateRequest]) -> None:
    """Sample all of them."""
    streams = [asyncio.create_task(engine.stream(r, CompletionSink())) for r in requests]
    await asyncio.sleep(0)
    while engine.num_in_flight:
        await engine.decode(BURST)
        await asyncio.sleep(0)
    await asyncio.gather(*streams)


def generate(model: Any, requests: list[GenerateRequest]) -> None:
    """As ``sample``, by transformers."""
    width = max(len(request.input_ids) for request in requests)
    tokens, mask = (torch.zeros(len(requests), width, dtype=torch.long) for _ in range(2))
    for row, request in enumerate(requests):
        tokens[row, -len(request.input_ids) :] = torch.tensor(request.input_ids)
        mask[row, -len(request.input_ids) :] = 1
    num_tokens = requests[0].sampling.max_new_tokens
    answer = model.generate(
        tokens.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=True,
        top_k=0,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )
    assert answer.shape == (len(requests), width + num_tokens)


def measure(
    runner: asyncio.Runner, rows: int, options: argparse.Namespace, device: torch.device
) -> Section:
    """Time one number of rows."""
    import transformers

    loaded = load_model(options.model, options.dtype, options.device)
    engine = LocalEngine(replace(loaded, stop_ids=frozenset()), rows)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).to(device)
    model.generation_config.eos_token_id = None
    equal, ragged = (
        make_requests(number, options, are_ragged=are_ragged)
        for number, are_ragged in ((rows, False), (4 * rows, True))
    )
    contenders = [
        Contender("local", lambda: runner.run(sample(engine, equal))),
        Contender("local, refilled", lambda: runner.run(sample(engine, ragged))),
        Contender("transformers' generate", lambda: generate(model, equal)),
    ]
    timings = interleave(contenders, device, rounds=options.rounds, warmup=1)
    num_tokens = [
        sum(request.sampling.max_new_tokens for request in requests)
        for requests in (equal, ragged, equal)
    ]
    remarks = [
        f"{timing.name}: {number:,} tokens, {number / timing.median_s:,.0f} tokens/s"
        for timing, number in zip(timings, num_tokens, strict=True)
    ]
    runner.run(engine.close())
    return Section(f"{rows} rows", timings, "local", remarks=["; ".join(remarks) + "."])


def main() -> None:
    """Run and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--prompt", type=int, default=24, help="tokens of the longest prompt")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    with asyncio.Runner() as runner:
        sections = [measure(runner, rows, options, device) for rows in options.rows]
    publish(f"Local engine, {options.model.name}", sections, options, device)


if __name__ == "__main__":
    main()
