"""HTTP calls to one SGLang server: keys, time limits, and errors that say what to do."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.engine.sglang.stream import RefusedError
from bapo_megatron.errors import (
    BrokenConnectionError,
    RolloutError,
    ServerError,
    ServerGoneError,
    describe_cause,
)

_MAX_ATTEMPTS = 4
_FIRST_BACKOFF_S = 0.25
_CONNECT_TIMEOUT_S = 10.0
# The server closes idle connections after 5 s; one that it is just closing must not be used.
KEEPALIVE_EXPIRY_S = 3.0
_MAX_REASON = 300


class SglangHttp:
    """Sends calls, and checks the status of the answers."""

    def __init__(self, address: str, keys: ApiKeys, request_timeout_s: float) -> None:
        """Prepare the connections; ``request_timeout_s`` limits calls that have no other limit."""
        self.address = address.rstrip("/")
        self._keys = keys
        self._timeout_s = request_timeout_s
        self._control_http = self._make_http(request_timeout_s)
        # Separate, so that other calls never queue behind generation.
        self._stream_http = self._make_http(None, SeparateConnections(KEEPALIVE_EXPIRY_S))

    def _make_http(
        self, read_timeout_s: float | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.address,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(
                self._timeout_s, connect=_CONNECT_TIMEOUT_S, read=read_timeout_s, pool=None
            ),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S),
            transport=transport,
            trust_env=False,  # a proxy must not stand between trainer and server
        )

    async def close(self) -> None:
        """Close every connection; the server aborts what it was still generating for them."""
        await self._stream_http.aclose()
        await self._control_http.aclose()

    @contextlib.asynccontextmanager
    async def stream(self, body: dict[str, Any], label: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request to ``/generate``; yield what the server streams, chunk by chunk.

        There is no time limit, and errors of httpx are not translated; ``label`` names the request
        in other errors.

        Raises:
            RolloutError: The server refuses it.
        """
        path = "/generate"
        async with self._stream_http.stream(
            "POST", path, json=body, headers=self._keys.headers(admin=False)
        ) as reply:
            if reply.status_code != httpx.codes.OK:
                await reply.aread()
                self._check_status(reply, f"{path} ({label})", admin=False)
            yield reply.aiter_raw()

    async def send_once(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        admin: bool,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send a call beside generation, without repeating it.

        Control calls are those that take the ``admin`` key, see ``ApiKeys``. The default of
        ``timeout_s`` is ``rollout.request_timeout_s``.

        Raises:
            ServerGoneError: There was no answer in time; a ``BrokenConnectionError`` where the
                connection broke.
            RolloutError: The server refuses.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._control_http.request(
                    method, path, json=body, headers=self._keys.headers(admin=admin)
                )
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise ServerGoneError(
                f"{self.address}{path}: no answer within {limit_s:g} s; look for what it waits for "
                "in the server's log"
            ) from error
        except httpx.TransportError as error:
            raise BrokenConnectionError(
                f"{self.address}{path}: no connection ({describe_cause(error)}); see the server's "
                "log, or correct rollout.servers"
            ) from error
        self._check_status(reply, path, admin=admin)
        return reply

    async def get(self, path: str, *, admin: bool, timeout_s: float | None = None) -> Any:
        """GET as ``send_once``; return the answer's JSON."""
        reply = await self.send_once("GET", path, None, admin=admin, timeout_s=timeout_s)
        with self.checked(path):
            return reply.json()

    async def control(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """POST a control call as ``send_once``."""
        await self.send_once("POST", path, body, admin=True, timeout_s=timeout_s)

    async def send(self, path: str, body: dict[str, Any], *, admin: bool) -> httpx.Response:
        """POST as ``send_once``; repeat it if the connection breaks."""
        for attempt in range(_MAX_ATTEMPTS - 1):
            try:
                return await self.send_once("POST", path, body, admin=admin)
            except BrokenConnectionError:
                await asyncio.sleep(_FIRST_BACKOFF_S * 2**attempt)
        return await self.send_once("POST", path, body, admin=admin)

    def _check_status(self, reply: httpx.Response, path: str, *, admin: bool) -> None:
        status = reply.status_code
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise RolloutError(
                f"{self.address}{path}: the key was refused (HTTP {status}); set "
                f"{self._keys.variable(admin=admin)} to the server's key"
            )
        if status != httpx.codes.OK:
            text = f"{self.address}{path}: HTTP {status}: {_reason(reply)}"
            if status >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise ServerError(f"{text}; see the server's log")
            raise RolloutError(f"{text}; correct the setting it names, or see the server's log")

    @contextlib.contextmanager
    def checked(self, label: str) -> Iterator[None]:
        """Name server and request if an answer does not have the documented form."""
        try:
            yield
        except RefusedError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
            raise ServerError(
                f"{self.address}: unusable answer ({label}): {reason}; use an SGLang version that "
                "this project supports, or see the server's log"
            ) from error


def _reason(reply: httpx.Response) -> str:
    """The server's own words, on one line."""
    try:
        content = reply.json()
    except ValueError:
        content = reply.text
    if isinstance(content, dict):
        content = content.get("error", content.get("message", content.get("detail", content)))
    if isinstance(content, dict):
        content = content.get("message", content)
    return " ".join(str(content).split())[:_MAX_REASON].rstrip(".")


class SeparateConnections(httpx.AsyncBaseTransport):
    """A connection for every request in flight, kept for later ones.

    Whenever a request begins or ends, the pool of httpx looks at all of its connections, and for
    each idle one at all of them again: where hundreds of requests end at a time, as before a weight
    sync, that takes seconds. Here the time does not depend on their number, which the caller
    limits.
    """

    def __init__(self, keepalive_expiry_s: float) -> None:
        """Open nothing; a connection that was idle for longer is closed at the next request."""
        self._keepalive_expiry_s = keepalive_expiry_s
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=keepalive_expiry_s)
        self._ssl_context = httpx.create_ssl_context(trust_env=False)  # takes long to make
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()
        """Since when, and which; the latest is used first."""
        self._all: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request on an idle connection, or on a new one."""
        expired_s = time.monotonic() - self._keepalive_expiry_s
        while self._idle and self._idle[0][0] < expired_s:
            _, connection = self._idle.popleft()
            self._all.discard(connection)
            await connection.aclose()
        if self._idle:
            connection = self._idle.pop()[1]
        else:
            connection = httpx.AsyncHTTPTransport(
                verify=self._ssl_context, trust_env=False, limits=self._limits
            )
            self._all.add(connection)

        def release() -> None:
            self._idle.append((time.monotonic(), connection))

        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            release()  # it has closed its socket
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, release)
        return response

    async def aclose(self) -> None:
        """Close every connection, also those of requests in flight."""
        connections, self._all = self._all, set()
        self._idle.clear()
        for connection in connections:
            await connection.aclose()


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
