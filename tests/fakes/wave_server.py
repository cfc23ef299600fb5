"""A server to which many requests come at a time."""

import asyncio
import contextlib
import json

_META = {"finish_reason": {"type": "abort"}, "weight_version": "0", "completion_tokens": 0}
_EVENT = b"data: %s\n\n" % json.dumps({"output_ids": [], "meta_info": _META}).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_EVENT), _EVENT)


class WaveServer:
    """Answers the requests of a wave when all of them have come: they are aborted."""

    def __init__(self) -> None:
        self.wave = 1
        self.num_connections = 0
        self._waiting = 0
        self._answers = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                answers = self._answers
                self._waiting += 1
                if self._waiting == self.wave:
                    self._waiting, self._answers = 0, asyncio.Event()
                    answers.set()
                await answers.wait()
                writer.write(_ANSWER)
                await writer.drain()
        writer.close()
