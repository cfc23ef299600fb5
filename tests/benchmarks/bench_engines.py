"""Sampling by each engine, through the same interface, beside transformers' ``generate``.

    python -m examples.tiny DIR --seed 0
    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_engines DIR/model --threads 1

Prompts are shared by groups. Responses end by themselves or at ``--tokens``; what was sampled is
counted. There are twice as many requests as rows, so that rows are freed and filled again. The
second model is a random one of ``--wide`` hidden units and 8 layers: 12.6 million parameters by
default.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_megatron.engine.base import Engine, GenerateRequest, SamplingSettings
from bapo_megatron.engine.local.engine import LocalEngine, load_model
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.server import SglangServer
from bapo_megatron.rollout.episodes import BURST
from tests.benchmarks.harness import Contender, Section, arguments, interleave, publish
from tests.benchmarks.samples import make_wide_model
from tests.engine.helpers import Kept
from tests.engine.sglang.servers import KEYS, running, server_config

GROUP = 8
WIDE = {"layers": 8, "positions": 512, "initializer_range": 0.05}
SERVER = {"max_total_tokens": 65536, "max_running_requests": 288, "mem_fraction": 0.3}


def make_requests(number: int, options: argparse.Namespace) -> list[GenerateRequest]:
    """Requests of groups of ``GROUP``, with prompts of random digits and signs."""
    draw = np.random.default_rng(0)
    requests = []
    for n in range(number):
        if n % GROUP == 0:
            length = int(draw.integers(12, 25))
            prompt = draw.integers(3, 20, size=length).tolist()
        settings = SamplingSettings(1.0, options.tokens, seed=n)
        requests.append(GenerateRequest(input_ids=prompt, sampling=settings, label="", version=0))
    return requests


async def sample(engine: Engine, requests: Sequence[GenerateRequest]) -> int:
    """Sample all of them; returns the tokens."""
    sinks = [Kept() for _ in requests]
    streams = [
        asyncio.create_task(engine.stream(request, sink))
        for request, sink in zip(requests, sinks, strict=True)
    ]
    await asyncio.sleep(0)
    while engine.stepper is not None and engine.num_in_flight:
        await engine.stepper.decode(BURST)
        await asyncio.sleep(0)
    await asyncio.gather(*streams)
    return sum(len(sink.completion().token_ids) for sink in sinks)


def generate(model: Any, requests: Sequence[GenerateRequest], rows: int) -> int:
    """As ``sample``, by transformers, ``rows`` at a time."""
    num_tokens = 0
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        width = max(len(request.input_ids) for request in batch)
        tokens, mask = (torch.zeros(len(batch), width, dtype=torch.long) for _ in range(2))
        for row, request in enumerate(batch):
            tokens[row, -len(request.input_ids) :] = torch.tensor(request.input_ids)
            mask[row, -len(request.input_ids) :] = 1
        answer = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=batch[0].sampling.max_new_tokens,
            pad_token_id=0,
        )
        num_tokens += int((answer[:, width:] != 0).sum())
    return num_tokens


def measure(
    runner: asyncio.Runner,
    title: str,
    model_dir: Path,
    options: argparse.Namespace,
    device: torch.device,
) -> list[Section]:
    """Time every number of rows on one model."""
    import transformers

    loaded = load_model(model_dir, "float32", options.device)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.to(device)
    sections = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = server_config(model_dir, directory, dtype="float32", server=SERVER)
        server = SglangServer(config, options.device, KEYS)
        stack.enter_context(running(server))
        client = runner.run(_connect(server.address, server.keys))
        for rows in options.rows:
            engine = LocalEngine(*loaded, rows)
            requests = make_requests(2 * rows, options)
            num_tokens: dict[str, int] = {}

            def counting(name: str, run: Callable[[], int], counts: dict[str, int]) -> Contender:
                def count() -> None:
                    counts[name] = run()

                return Contender(name, count)

            runs: dict[str, Callable[[], int]] = {
                "local": lambda e=engine, r=requests: runner.run(sample(e, r)),
                "sglang": lambda r=requests: runner.run(sample(client, r)),
                "transformers' generate": lambda r=requests, n=rows: generate(model, r, n),
            }
            contenders = [counting(name, run, num_tokens) for name, run in runs.items()]
            timings = interleave(contenders, device, rounds=options.rounds, warmup=1)
            remarks = [
                f"{timing.name}: {num_tokens[timing.name]:,} tokens, "
                f"{num_tokens[timing.name] / timing.median_s:,.0f} tokens/s"
                for timing in timings
            ]
            sections.append(
                Section(f"{title}, {rows} rows", timings, "local", remarks=["; ".join(remarks)])
            )
            runner.run(engine.close())
        runner.run(client.close())
    return sections


async def _connect(address: str, keys: Any) -> SglangClient:
    return SglangClient(address, keys, request_timeout_s=300)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, default=64, help="limit of a response")
    parser.add_argument(
        "--wide", type=int, default=384, help="hidden units of the second model; 0: leave it out"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as directory:
        sections = measure(runner, options.model.name, options.model, options, device)
        if options.wide:
            make_wide_model(Path(directory), hidden=options.wide, **WIDE)
            model, *_ = load_model(Path(directory), "float32", "cpu")
            size = sum(parameter.numel() for parameter in model.parameters())
            title = f"{size / 1e6:.1f} million parameters"
            sections += measure(runner, title, Path(directory), options, device)
    publish("Engines", sections, options, device)


if __name__ == "__main__":
    main()
