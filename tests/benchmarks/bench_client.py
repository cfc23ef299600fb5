"""What the client costs: CPU time and memory of one process that has 512 requests in flight.

A server in another process streams tokens with log-probs, in events of SGLang's form, at a given
rate; this process does nothing but receive and check them, as the collector does. What counts is
the share of a core for 1,000 tokens/s, and whether memory grows.

    python -m tests.benchmarks.bench_client --out docs/benchmarks/client_cpu_202611
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import Completion, GenerateRequest, SamplingSettings
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.rollout.pool import EnginePool
from tests.benchmarks import harness
from tests.benchmarks.stream_server import Load, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

_WARM_UP_S = 3.0
_NUM_MEMORY_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Case:
    """One way to stream."""

    stream_tokens: int
    is_incremental: bool

    @property
    def name(self) -> str:
        kind = "new tokens" if self.is_incremental else "all tokens"
        return f"pieces of {self.stream_tokens}, {kind} in each event"


@dataclass(frozen=True, slots=True)
class Row:
    """What one case cost."""

    case: str
    tokens_per_s: float
    core_share: float
    core_share_per_1000_tokens_per_s: float
    requests_per_s: float
    rss_first_mb: float
    rss_last_mb: float


class Client:
    """Keeps the requests in flight and counts what comes."""

    def __init__(self, addresses: Sequence[str], case: Case, load: Load) -> None:
        config = RolloutConfig.model_validate(
            {
                "max_connections": load.requests,
                "stream_tokens": case.stream_tokens,
                "health": {"timeout_s": 600.0},  # a busy machine is no fault of the servers
            }
        )
        clients = [
            SglangClient(address, ApiKeys(), request_timeout_s=config.request_timeout_s)
            for address in addresses
        ]
        self.pool = EnginePool(clients, config, version=0)
        self._load = load
        self.num_tokens = 0
        self.num_requests = 0

    def _take(self, part: Completion) -> None:
        self.num_tokens += len(part.token_ids)

    async def keep_sampling(self, number: int) -> None:
        """One request after the other; the first ones end at different times."""
        length = 1 + self._load.response_tokens * (number + 1) // self._load.requests
        while True:
            request = GenerateRequest(
                input_ids=[7] * self._load.prompt_tokens,
                sampling=SamplingSettings(1.0, min(length, self._load.response_tokens)),
                label=f"request {number}",
            )
            await self.pool.generate(request, self._take, affinity=number // 8)
            self.num_requests += 1
            length = self._load.response_tokens


async def _measure(address: str, case: Case, load: Load, seconds: float) -> Row:
    client = Client([address], case, load)
    await client.pool.states.wait_for_engines()
    tasks = [asyncio.create_task(client.keep_sampling(n)) for n in range(load.requests)]
    await asyncio.sleep(_WARM_UP_S)
    tokens, requests = client.num_tokens, client.num_requests
    wall_s, cpu_s = time.monotonic(), time.process_time()
    memory_mb = []
    for _ in range(_NUM_MEMORY_SAMPLES):
        await asyncio.sleep(seconds / _NUM_MEMORY_SAMPLES)
        memory_mb.append(psutil.Process().memory_info().rss / 1e6)
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    tokens, requests = client.num_tokens - tokens, client.num_requests - requests
    for task in tasks:
        task.cancel()
    failures = [
        result
        for result in await asyncio.gather(*tasks, return_exceptions=True)
        if not isinstance(result, asyncio.CancelledError)
    ]
    await client.pool.states.close()
    assert not failures, failures[0]
    return Row(
        case=case.name,
        tokens_per_s=tokens / wall_s,
        core_share=cpu_s / wall_s,
        core_share_per_1000_tokens_per_s=1000 * cpu_s / tokens,
        requests_per_s=requests / wall_s,
        rss_first_mb=memory_mb[0],
        rss_last_mb=memory_mb[-1],
    )


def measure(case: Case, load: Load, seconds: float) -> Row:
    """Start a server of its own for a case and measure the client."""
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe()
    server = context.Process(target=serve, args=(load, case.is_incremental, theirs), daemon=True)
    server.start()
    try:
        address = f"http://127.0.0.1:{ready.recv()[0]}"
        return asyncio.run(_measure(address, case, load, seconds))
    finally:
        server.kill()
        server.join()


def _report(load: Load, rows: list[Row], machine: dict[str, Any]) -> str:
    lines = [
        "# Client",
        "",
        *harness.heading(machine, ("aiohttp", "orjson")),
        f"{load.requests} requests in flight, prompts of {load.prompt_tokens} and responses of "
        f"{load.response_tokens} tokens with log-probs, from a server in another process that "
        f"sends {load.tokens_per_s:,.0f} tokens/s in all. CPU time and memory are those of the "
        "client's process.",
        "",
        "|  | tokens/s | of a core | of a core for 1,000 tokens/s | requests/s | memory after a "
        "tenth – at the end |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {row.tokens_per_s:,.0f} | {row.core_share:.1%} | "
        f"{row.core_share_per_1000_tokens_per_s:.2%} | {row.requests_per_s:.1f} | "
        f"{row.rss_first_mb:.0f} – {row.rss_last_mb:.0f} MB |"
        for row in rows
    ]
    lines += [
        "",
        "Events with all tokens cost more the longer a response is: start servers with "
        "`--incremental-streaming-output`, as this project does.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every case, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json (no suffix)")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens-per-s", type=float, default=10_000)
    parser.add_argument("--response-tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=20.0, help="per case")
    arguments = parser.parse_args()
    load = Load(arguments.requests, 256, arguments.response_tokens, arguments.tokens_per_s)
    cases = [Case(64, True), Case(16, True), Case(1, True), Case(64, False)]
    rows = [measure(case, load, arguments.seconds) for case in cases]
    machine = harness.machine(torch.device("cpu"))
    report = _report(load, rows, machine)
    print(report)  # noqa: T201
    if arguments.out is not None:
        values = {"machine": machine, "load": asdict(load), "rows": [asdict(row) for row in rows]}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(report)


if __name__ == "__main__":
    main()
