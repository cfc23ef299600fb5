"""How many tokens and requests one collector carries, and how long requests take that end together.

Servers in other processes stream tokens with log-probs to this one, which does with them what the
collector does: receive, check, put together, admit the next request.

    python -m tests.benchmarks.bench_connections --out docs/benchmarks/connections_cpu_202611
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.data.record import Completion
from bapo_megatron.engine.base import CompletionSink, GenerateRequest, SamplingSettings
from bapo_megatron.engine.sglang.client import SglangClient
from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.rollout.batching import LoopLag
from bapo_megatron.rollout.collector import collect_garbage_rarely
from bapo_megatron.rollout.pool import EnginePool
from tests.benchmarks.harness import columns, finish, machine, page, report_arguments, table
from tests.benchmarks.stream_server import Load, serve
from tests.fakes.wave_server import WaveServer

_TOKENS_PER_S_OF_A_REQUEST = 61.0
_WAVES = (512, 2048, 8192)


COLUMNS = {
    "sent: tokens/s": "{tokens_per_s:,.0f}",
    "requests": "{requests:,}",
    "tokens of a piece": "{piece_tokens}",
    "received: tokens/s": "{received_per_s:,.0f}",
    "of a core": "{core_share:.0%}",
    "of a core for 1,000 tokens/s": "{core_per_thousand:.3%}",
    "lag": "{loop_lag_s:.2f} s",
    "errors": "{errors}",
    "machine's load": "{machine_load:.1f}",
}


class Client:
    """Keeps the requests in flight and counts what comes."""

    def __init__(self, addresses: Sequence[str], piece_tokens: int, load: Load) -> None:
        config = RolloutConfig.model_validate(
            {
                "max_connections": load.requests,
                "stream_tokens": piece_tokens,
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

    def _take(self, part: Completion) -> None:
        self.num_tokens += len(part.token_ids)

    async def keep_sampling(self, number: int) -> None:
        """One request after the other; the first ones end at different times."""
        length = 1 + self._load.response_tokens * (number + 1) // self._load.requests
        while True:
            request = GenerateRequest(
                input_ids=[7] * self._load.prompt_tokens,
                sampling=SamplingSettings(1.0, min(length, self._load.response_tokens), seed=0),
                label=f"request {number}",
            )
            await self.pool.generate(lambda sent=request: sent, self._take, number // 8)
            length = self._load.response_tokens


@contextlib.contextmanager
def servers(load: Load, processes: int, engines: int) -> Iterator[list[str]]:
    """Addresses of engines, which some processes share."""
    context, started, addresses = multiprocessing.get_context("spawn"), [], []
    try:
        for _ in range(processes):
            ready, theirs = context.Pipe()
            arguments = (load, theirs, engines // processes)
            started.append(context.Process(target=serve, args=arguments, daemon=True))
            started[-1].start()
            addresses += [f"http://127.0.0.1:{port}" for port in ready.recv()]
        yield addresses
    finally:
        for process in started:
            process.kill()
            process.join()


async def measure(
    addresses: Sequence[str], load: Load, piece_tokens: int, seconds: float
) -> dict[str, float]:
    """Let every request begin a piece's time after the others, then count."""
    client = Client(addresses, piece_tokens, load)
    await client.pool.states.wait_for_engines()
    piece_s = piece_tokens * load.requests / load.tokens_per_s

    async def begin(number: int) -> None:
        await asyncio.sleep(piece_s * number / load.requests)
        await client.keep_sampling(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(load.requests)]
    await asyncio.sleep(2.5 * piece_s)
    lag, tokens = LoopLag(), client.num_tokens
    measuring = asyncio.create_task(lag.measure())
    wall_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    tokens = client.num_tokens - tokens
    measuring.cancel()
    num_failed = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.pool.states.close()
    return {
        "tokens_per_s": load.tokens_per_s,
        "requests": load.requests,
        "piece_tokens": piece_tokens,
        "received_per_s": tokens / wall_s,
        "core_share": cpu_s / wall_s,
        "core_per_thousand": 1000 * cpu_s / max(tokens, 1),
        "loop_lag_s": lag.take_max(),
        "errors": num_failed + client.pool.num_lost_requests,
        "machine_load": os.getloadavg()[0],
    }


async def time_waves(num_requests: int, num_waves: int) -> list[float]:
    """Seconds of each wave of requests that end together; the first one opens the connections."""
    server = WaveServer()
    server.wave = num_requests
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=4096)
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client = SglangClient(address, ApiKeys(), request_timeout_s=600.0)
    request = GenerateRequest(input_ids=[], sampling=SamplingSettings(1.0, 1, seed=0), label="")
    seconds = []
    for _ in range(num_waves):
        started_s = time.monotonic()
        sink = CompletionSink()
        await asyncio.gather(*(client.stream(request, sink) for _ in range(num_requests)))
        seconds.append(time.monotonic() - started_s)
    await client.close()
    listener.close()
    return seconds


def report_of(
    rows: Sequence[dict[str, float]],
    waves: dict[int, list[float]],
    where: dict[str, Any],
    options: argparse.Namespace,
) -> str:
    return page(
        "What one collector carries",
        where,
        f"{options.engines} engines in {options.processes} other processes send "
        f"{_TOKENS_PER_S_OF_A_REQUEST:g} tokens/s with log-probs to each request, responses of "
        f"{options.response_tokens:,} tokens. CPU time is that of the one process that receives "
        "them; *lag* is the largest of its event loop in "
        f"{options.seconds:g} s. The machine's load is that of all its processes: where it exceeds "
        "the cores, what is received and the lag say little.",
        columns(rows, COLUMNS),
        "## Requests that end at the same time",
        "As before a weight sync. Seconds from the first request of a wave to the end of the last "
        "one, with open connections to a server in the same process that answers all of them at "
        "once.",
        table(
            ["requests", *(f"{size:,}" for size in waves)],
            [["", *(f"{seconds[-1]:.2f} s" for seconds in waves.values())]],
        ),
    )


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--requests", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--pieces", type=int, nargs="+", default=[512, 64])
    parser.add_argument("--response-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=20.0, help="per row")
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2, help="that the engines share")
    parser.add_argument("--waves", type=int, nargs="*", default=_WAVES)
    options = parser.parse_args()
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    rows = []
    collect_garbage_rarely()
    for pieces, requests in itertools.product(options.pieces, options.requests):
        rate = requests * _TOKENS_PER_S_OF_A_REQUEST
        load = Load(requests, 256, options.response_tokens, rate)
        with servers(load, options.processes, options.engines) as addresses:
            rows.append(asyncio.run(measure(addresses, load, pieces, options.seconds)))
        gc.collect()
    waves = {size: asyncio.run(time_waves(size, 2)) for size in options.waves}
    where = machine()
    values = {"machine": where, "rows": rows, "waves": waves}
    finish(options.out, report_of(rows, waves, where, options), values)


if __name__ == "__main__":
    main()
