"""HTTP calls to one SGLang server: keys, time limits, and errors that say what to do."""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from bapo_megatron.engine.sglang.keys import ApiKeys
from bapo_megatron.errors import (
    BrokenConnectionError,
    RefusedError,
    ServerError,
    ServerGoneError,
    describe_cause,
)

_BACKOFFS_S = (0.25, 0.5, 1.0)
_CONNECT_TIMEOUT_S = 10.0
# The server closes idle connections after 5 s; one that it is just closing must not be used.
_KEEPALIVE_EXPIRY_S = 3.0
_MAX_REASON = 300
_MAX_REST_BYTES = 64 << 10
_MAX_REPLY_BYTES = 64 << 20
"""Limit of an answer that comes as a whole; the largest are log-probs of a long context."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that came as a whole."""

    status: int
    content: bytes
    headers: Mapping[str, str]
    """Their names in any case."""

    @property
    def text(self) -> str:
        """The content for people."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The content as a JSON value; raise a ``ValueError`` if it is none."""
        return orjson.loads(self.content)


class SglangHttp:
    """Sends calls, and checks the status of the answers.

    Every request in flight has a connection of its own; the caller limits their number.
    """

    def __init__(self, address: str, keys: ApiKeys, request_timeout_s: float) -> None:
        """Connect to nothing; ``request_timeout_s`` limits calls that have no other limit."""
        self.address = address.rstrip("/")
        self._keys = keys
        self._timeout_s = request_timeout_s

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made by the first call, because it belongs to the event loop."""
        return aiohttp.ClientSession(
            # A proxy must not stand between trainer and server: no ``trust_env``.
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_EXPIRY_S,
                # The system's authorities, where those of a cluster are installed; takes 20 ms.
                ssl=not self.address.startswith("https:") or ssl.create_default_context(),
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close every connection; the server aborts what it was still generating for them."""
        await self._session.close()

    @contextlib.asynccontextmanager
    async def stream(self, body: dict[str, Any], label: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request to ``/generate``; yield what the server streams, chunk by chunk.

        There is no time limit, and errors of aiohttp are not translated; ``label`` names the
        request in errors about the status.
        """
        path = "/generate"
        async with self._send("POST", path, body, admin=False) as reply:
            if reply.status != HTTPStatus.OK:
                async with asyncio.timeout(self._timeout_s):
                    whole = await self._read(reply, path)
                self._check_status(whole, f"{path} ({label})", admin=False)
            yield reply.content.iter_any()
            await _drain(reply)

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, *, admin: bool
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.request(
            method,
            self.address + path,
            data=None if body is None else orjson.dumps(body),
            headers=self._keys.headers(admin=admin),
            allow_redirects=False,
        )

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        admin: bool,
        timeout_s: float | None = None,
    ) -> Reply:
        """POST ``body``, or GET without one, beside generation; once.

        The default of ``timeout_s`` is ``rollout.request_timeout_s``.

        Raises:
            ServerGoneError: There was no answer in time, or the connection broke.
            ServerError: The server failed.
            RefusedError: It refuses.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(limit_s), self._send(method, path, body, admin=admin) as got:
                reply = await self._read(got, path)
        except aiohttp.ClientError as error:
            raise BrokenConnectionError(
                f"{self.address}{path}: no connection ({_why_broken(error)}); see the server's "
                "log, or correct rollout.servers"
            ) from error
        except TimeoutError as error:
            raise ServerGoneError(
                f"{self.address}{path}: no answer within {limit_s:g} s; look for what it waits for "
                "in the server's log"
            ) from error
        self._check_status(reply, path, admin=admin)
        return reply

    async def _read(self, reply: aiohttp.ClientResponse, path: str) -> Reply:
        content = bytearray()
        async for piece in reply.content.iter_any():
            content += piece
            if len(content) > _MAX_REPLY_BYTES:
                raise ServerError(
                    f"{self.address}{path}: an answer of more than {_MAX_REPLY_BYTES >> 20} MB; "
                    "look at what answers there"
                )
        return Reply(reply.status, bytes(content), reply.headers)

    async def control(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """POST a control call as ``call``."""
        await self.call(path, body, admin=True, timeout_s=timeout_s)

    async def call_again(self, path: str, body: dict[str, Any], *, admin: bool) -> Reply:
        """POST as ``call``; repeat it if the connection breaks."""
        for backoff_s in _BACKOFFS_S:
            with contextlib.suppress(BrokenConnectionError):
                return await self.call(path, body, admin=admin)
            await asyncio.sleep(backoff_s)
        return await self.call(path, body, admin=admin)

    def _check_status(self, reply: Reply, path: str, *, admin: bool) -> None:
        status = reply.status
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            problem = "the key was refused" if self._keys.headers(admin=admin) else "needs a key"
            raise RefusedError(
                f"{self.address}{path}: {problem} (HTTP {status}); set "
                f"{self._keys.variable(admin=admin)} to the server's key"
            )
        if status != HTTPStatus.OK:
            text = f"{self.address}{path}: HTTP {status}: {_reason(reply)}"
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ServerError(f"{text}; see the server's log")
            raise RefusedError(f"{text}; correct the setting it names, or see the server's log")

    @contextlib.contextmanager
    def checked(self, label: str) -> Iterator[None]:
        """Name server and request if an answer does not have the documented form."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
            raise ServerError(
                f"{self.address}: unusable answer ({label}): {reason}; use an SGLang version that "
                "this project supports, or see the server's log"
            ) from error


async def _drain(reply: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection is free; leave more than that."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            async for piece in reply.content.iter_any():
                num_bytes += len(piece)
                if num_bytes > _MAX_REST_BYTES:
                    return


def _why_broken(error: aiohttp.ClientError) -> str:
    """The operating system's words where there are any; aiohttp adds the address, and ``ssl``."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return error.os_error.strerror
    return describe_cause(error)


def _reason(reply: Reply) -> str:
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
