"""The server of ``bench_connections``; its process imports nothing else."""

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_NUM_ROWS = 512


@dataclass(frozen=True, slots=True)
class Load:
    """What the server does."""

    requests: int
    prompt_tokens: int
    response_tokens: int
    tokens_per_s: float
    """Rate of all requests together."""


class Server:
    """Streams to everybody at a fixed rate; its events are composed of prepared pieces."""

    def __init__(self, load: Load) -> None:
        generator = random.Random(0)
        self._load = load
        self._ids = [generator.randrange(150_000) for _ in range(_NUM_ROWS)]
        self._rows = [json.dumps([generator.uniform(-9, 0), n, None]) for n in self._ids]
        self._interval_s = load.requests / load.tokens_per_s

    async def run(self, ready: Connection, num_ports: int) -> None:
        """Serve until the process is ended."""
        servers = [
            await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=64 << 20, backlog=1024)
            for _ in range(num_ports)
        ]
        ready.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer_calls(reader, writer)
        writer.close()

    async def _answer_calls(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1]
            lengths = [
                line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
            ]
            body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"{}"
            if path == b"/generate":
                await self._stream(json.loads(body), writer)
            else:
                answer = json.dumps(
                    {
                        "weight_version": "0",
                        "version": "0.5.23",
                        "model_path": "",
                        "tp_size": 1,
                        "pp_size": 1,
                        "dp_size": 1,
                        "load_format": "auto",
                        "enable_lora": False,
                        "max_lora_rank": None,
                        "lora_target_modules": None,
                        "max_total_num_tokens": 1 << 30,
                        "internal_states": [{"effective_max_running_requests_per_dp": 1 << 20}],
                        "incremental_streaming_output": True,
                    }
                ).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
                )

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        step = body["sampling_params"]["stream_interval"]
        last = body["sampling_params"]["max_new_tokens"]
        sent, due_s = 0, time.monotonic()
        while sent < last and not writer.is_closing():
            total = min(sent + step, last)
            due_s += (total - sent) * self._interval_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._write(writer, self._event(body["rid"], sent, total, is_last=total == last))
            sent = total
        self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, rid: str, first: int, total: int, *, is_last: bool) -> bytes:
        picked = [index % _NUM_ROWS for index in range(first, total)]
        ids = ", ".join(str(self._ids[index]) for index in picked)
        rows = ", ".join(self._rows[index] for index in picked)
        end = '{"type": "length", "length": 1}' if is_last else "null"
        meta = (
            f'"id": "{rid}", "finish_reason": {end}, "prompt_tokens": {self._load.prompt_tokens}, '
            f'"weight_version": "0", "num_retractions": 0, "input_token_logprobs": [], '
            f'"output_token_logprobs": [{rows}], "output_token_logprobs_length": {total}, '
            f'"reasoning_tokens": 0, "completion_tokens": {total}, "cached_tokens": 0'
        )
        text = "x" * (3 * len(picked))
        return (
            f'data: {{"text": "{text}", "output_ids": [{ids}], "meta_info": {{{meta}}}}}\n\n'
        ).encode()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def serve(load: Load, ready: Connection, num_ports: int) -> None:
    """Send the ports to ``ready`` and serve until the process is ended."""
    asyncio.run(Server(load).run(ready, num_ports))
