"""How long requests take that all end at the same time, as before a weight sync.

Waves of requests go to a server in the same process that answers each wave as a whole; with the
pool of one httpx client, and as ``SglangHttp`` streams.

    python -m tests.benchmarks.bench_connections --out docs/benchmarks/connections_cpu_202611
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from bapo_megatron.engine.sglang.http import SglangHttp
from bapo_megatron.engine.sglang.keys import ApiKeys
from tests.benchmarks import harness
from tests.fakes.wave_server import WaveServer

_SEPARATE, _POOL = "separate connections", "pool of httpx"
_MAX_POOLED = 256


async def time_waves(name: str, num_requests: int, num_waves: int) -> list[float]:
    """Seconds of each wave; the first one opens the connections."""
    server = WaveServer()
    server.wave = num_requests
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=4096)
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    http = SglangHttp(address, ApiKeys(), 600.0)
    limits = httpx.Limits(max_connections=None, keepalive_expiry=3.0)
    pool = httpx.AsyncClient(base_url=address, limits=limits, timeout=None, trust_env=False)

    async def generate() -> None:
        async with http.stream({}, "") as chunks:
            async for _ in chunks:
                pass

    async def get() -> None:
        await pool.get("/")

    send = generate if name == _SEPARATE else get
    seconds = []
    for _ in range(num_waves):
        started_s = time.monotonic()
        await asyncio.gather(*(send() for _ in range(num_requests)))
        seconds.append(time.monotonic() - started_s)
    await pool.aclose()
    await http.close()
    listener.close()
    return seconds


def report_of(seconds: dict[str, dict[int, list[float]]], machine: dict[str, Any]) -> str:
    """The markdown: the last wave of each size."""
    sizes = list(next(iter(seconds.values())))
    lines = [
        "# Requests that end at the same time",
        "",
        *harness.heading(machine, ("httpx", "httpcore")),
        "Seconds from the first request of a wave to the end of the last one, with connections "
        "that are open already; the server answers all of them at once.",
        "",
        "| requests | " + " | ".join(str(size) for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for name, by_size in seconds.items():
        cells = [f"{waves[-1]:.2f} s" if waves else "" for waves in by_size.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"The pool of httpx is left out beyond {_MAX_POOLED} requests: for every request that "
        "ends it looks at all connections for each idle one.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json (no suffix)")
    options = parser.parse_args()
    machine = harness.machine(torch.device("cpu"))
    seconds: dict[str, dict[int, list[float]]] = {_POOL: {}, _SEPARATE: {}}
    for size in options.sizes:
        for name, by_size in seconds.items():
            is_measured = name == _SEPARATE or size <= _MAX_POOLED
            waves = asyncio.run(time_waves(name, size, options.waves)) if is_measured else []
            by_size[size] = waves
    text = report_of(seconds, machine)
    print(text)  # noqa: T201
    harness.write_report(options.out, text, {"machine": machine, "seconds": seconds})


if __name__ == "__main__":
    main()
