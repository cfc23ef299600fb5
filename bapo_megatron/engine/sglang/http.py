"""HTTP calls to one SGLang server: keys, time limits, and errors that say what to do."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

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


class SglangHttp:
    """Sends calls, and checks the status of the answers.

    Each request in flight to ``/generate`` has an httpx client of its own, kept for later ones.
    Whenever a request begins or ends, a client looks at all of its connections, and for each idle
    one at all of them again: where hundreds of requests end at a time, as before a weight sync,
    that takes seconds. Here the time does not depend on their number, which the caller limits.
    """

    def __init__(self, address: str, keys: ApiKeys, request_timeout_s: float) -> None:
        """Connect to nothing; ``request_timeout_s`` limits calls that have no other limit."""
        self.address = address.rstrip("/")
        self._keys = keys
        self._timeout_s = request_timeout_s
        # The system's authorities, where those of a cluster are installed; httpx brings its own.
        self._ssl_context = ssl.create_default_context()  # slow to make
        self._clients: list[httpx.AsyncClient] = []
        self._control_client = self._make_client()
        self._idle_clients: list[httpx.AsyncClient] = []

    def _make_client(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            base_url=self.address,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_EXPIRY_S),
            verify=self._ssl_context,
            trust_env=False,  # a proxy must not stand between trainer and server
        )
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Close every connection; the server aborts what it was still generating for them."""
        for client in self._clients:
            await client.aclose()

    @contextlib.asynccontextmanager
    async def stream(self, body: dict[str, Any], label: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request to ``/generate``; yield what the server streams, chunk by chunk.

        There is no time limit, and errors of httpx are not translated; ``label`` names the request
        in errors about the status.
        """
        path, headers = "/generate", self._keys.headers(admin=False)
        client = self._idle_clients.pop() if self._idle_clients else self._make_client()
        try:
            async with client.stream("POST", path, json=body, headers=headers) as reply:
                if reply.status_code != httpx.codes.OK:
                    await reply.aread()
                    self._check_status(reply, f"{path} ({label})", admin=False)
                yield reply.aiter_raw()
        finally:
            self._idle_clients.append(client)

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        admin: bool,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """POST ``body``, or GET without one, beside generation; once.

        The default of ``timeout_s`` is ``rollout.request_timeout_s``.

        Raises:
            ServerGoneError: There was no answer in time, or the connection broke.
            ServerError: The server failed.
            RefusedError: It refuses.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        method, headers = "GET" if body is None else "POST", self._keys.headers(admin=admin)
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._control_client.request(method, path, json=body, headers=headers)
        except TimeoutError as error:
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

    async def control(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """POST a control call as ``call``."""
        await self.call(path, body, admin=True, timeout_s=timeout_s)

    async def call_again(self, path: str, body: dict[str, Any], *, admin: bool) -> httpx.Response:
        """POST as ``call``; repeat it if the connection breaks."""
        for backoff_s in _BACKOFFS_S:
            with contextlib.suppress(BrokenConnectionError):
                return await self.call(path, body, admin=admin)
            await asyncio.sleep(backoff_s)
        return await self.call(path, body, admin=admin)

    def _check_status(self, reply: httpx.Response, path: str, *, admin: bool) -> None:
        status = reply.status_code
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            problem = "the key was refused" if self._keys.headers(admin=admin) else "needs a key"
            raise RefusedError(
                f"{self.address}{path}: {problem} (HTTP {status}); set "
                f"{self._keys.variable(admin=admin)} to the server's key"
            )
        if status != httpx.codes.OK:
            text = f"{self.address}{path}: HTTP {status}: {_reason(reply)}"
            if status >= httpx.codes.INTERNAL_SERVER_ERROR:
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
