"""Connections for many requests at a time."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class SeparateConnections(httpx.AsyncBaseTransport):
    """A connection of its own for every request in flight, kept for later ones.

    Whenever a request begins or ends, the pool of httpx looks at all of its connections, and for
    each idle one at all of them again: where hundreds of requests end at a time, as before a weight
    sync, that takes seconds. Here it takes the same time however many there are. Who uses it limits
    their number.
    """

    def __init__(self, keepalive_expiry_s: float) -> None:
        """Open nothing yet.

        Args:
            keepalive_expiry_s: A connection that was idle for longer is not used again, and closed
                when the next request is sent.
        """
        self._keepalive_expiry_s = keepalive_expiry_s
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=keepalive_expiry_s)
        self._ssl_context = httpx.create_ssl_context(trust_env=False)  # takes long to make
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()
        """Since when, and which; the latest is used first."""
        self._all: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request on an idle connection, or on a new one."""
        await self._close_expired()
        connection = self._idle.pop()[1] if self._idle else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._release(connection)  # it has closed its socket
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, lambda: self._release(connection))
        return response

    async def aclose(self) -> None:
        """Close every connection, also those of requests in flight."""
        connections, self._all = self._all, set()
        self._idle.clear()
        for connection in connections:
            await connection.aclose()

    async def _close_expired(self) -> None:
        expired_s = time.monotonic() - self._keepalive_expiry_s
        while self._idle and self._idle[0][0] < expired_s:
            _, connection = self._idle.popleft()
            self._all.discard(connection)
            await connection.aclose()

    def _release(self, connection: httpx.AsyncHTTPTransport) -> None:
        self._idle.append((time.monotonic(), connection))

    def _new(self) -> httpx.AsyncHTTPTransport:
        connection = httpx.AsyncHTTPTransport(
            verify=self._ssl_context, trust_env=False, limits=self._limits
        )
        self._all.add(connection)
        return connection


class _Stream(httpx.AsyncByteStream):
    """The content of a response; its connection is free once it is closed."""

    def __init__(self, content: httpx.AsyncByteStream, release: Callable[[], None]) -> None:
        self._content = content
        self._release: Callable[[], None] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._content:
            yield part

    async def aclose(self) -> None:
        release, self._release = self._release, None
        try:
            await self._content.aclose()
        finally:
            if release is not None:
                release()
