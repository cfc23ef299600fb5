"""A server to which many requests come at a time."""

from __future__ import annotations

import asyncio
import contextlib


class WaveServer:
    """Answers the requests of a wave when all of them have come, with the body ``ok``."""

    def __init__(self) -> None:
        self.wave = 1
        self.num_connections = 0
        self.breaks = False
        """Whether connections are closed instead."""
        self._waiting = 0
        self._answers = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                if self.breaks:
                    break
                answers = self._answers
                self._waiting += 1
                if self._waiting == self.wave:
                    self._waiting, self._answers = 0, asyncio.Event()
                    answers.set()
                await answers.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()
        writer.close()
