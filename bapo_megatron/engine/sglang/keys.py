"""A server's keys, and two ASGI middlewares around SGLang's application.

``KeyCheck`` replaces SGLang's own, which lets anyone who may generate read ``/server_info``, with
all settings and both keys, and call whatever is not marked as control. Here all but a few paths
require the admin key. The path is the one by which the call is routed, whatever its ``Host`` header
says.

``InfoAnswers`` makes ``/server_info`` show whether the scheduler, which answers it, is stuck: while
it loads weights it does not answer, which is no fault as long as a caller waits for the weights.

Standard library only: the launcher imports this.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

from bapo_megatron.runtime.processes import nccl_settings

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Any, Send], Awaitable[None]]

API_KEY_VARIABLE = "BAPO_MEGATRON_API_KEY"
"""Environment variable with the key of ``/generate`` for servers in ``rollout.servers``."""
ADMIN_API_KEY_VARIABLE = "BAPO_MEGATRON_ADMIN_API_KEY"
"""Environment variable with the key of control calls for servers in ``rollout.servers``."""

_MIN_KEY_BYTES = 16
"""Shorter keys could be guessed."""
NCCL_HEADER = "x-nccl-settings"
"""Header of an answer: the server's ``processes.nccl_settings`` as JSON."""

_GENERATION_PATHS = ("/generate", "/model_info")
"""Paths that require the API key; open to all if there is none."""
_PUBLIC_PATHS = ("/ready", "/health")
"""Paths that are always open."""
_OWN_PATHS = ("/freeze_gc",)
"""Paths that the server itself calls without a key: open to this machine."""
_LOOPBACK = ("127.0.0.1", "::1")
_UNAUTHORIZED = b'{"error": "Unauthorized"}'


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys of a server; empty where it requires none."""

    api_key: str = field(default="", repr=False)
    """For generation and the weights version."""
    admin_api_key: str = field(default="", repr=False)
    """For control calls: abort, weight updates, how the server was started."""

    @classmethod
    def from_environment(cls) -> Self:
        """Read the keys from the environment; one whose variable is not set is empty.

        Raises:
            ValueError: A variable holds a key that is too short.
        """
        names = (API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE)
        for name in names:
            if name in os.environ:
                check_key(os.environ[name], name, "unset the variable")
        return cls(*(os.environ.get(name, "") for name in names))

    @staticmethod
    def variable(path: str) -> str:
        """Name the environment variable with the key of a call."""
        return API_KEY_VARIABLE if path in _GENERATION_PATHS else ADMIN_API_KEY_VARIABLE

    def headers(self, path: str) -> dict[str, str]:
        """Return the HTTP headers of a call; without an admin key, use the API key."""
        is_generation = path in _GENERATION_PATHS
        key = self.api_key if is_generation else self.admin_api_key or self.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}


def check_key(key: str, place: str, remedy: str) -> None:
    """Raise a ``ValueError`` for a key that is too short; the message does not show it."""
    if (num_bytes := len(key.encode())) < _MIN_KEY_BYTES:
        raise ValueError(
            f"{place}: a key must have at least {_MIN_KEY_BYTES} bytes, this one has {num_bytes}; "
            f"make one with 'openssl rand -hex 16', or {remedy}"
        )


class KeyCheck:
    """Answers 401 if the key is missing or wrong."""

    def __init__(self, app: App, *, api_key: str | None, admin_api_key: str | None) -> None:
        """Guard an application; ``admin_api_key`` defaults to ``api_key``."""
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        """Pass one call on, or answer it."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _UNAUTHORIZED})

    def _is_allowed(self, scope: Message) -> bool:
        path = scope["path"]
        if path in _PUBLIC_PATHS:
            return True
        client, _ = scope.get("client") or ("", 0)
        host, _ = scope.get("server") or ("", 0)
        if path in _OWN_PATHS and client and (client == host or client in _LOOPBACK):
            return True
        key = self._api_key if path in _GENERATION_PATHS else self._admin_api_key
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return not key or any(secrets.compare_digest(v, f"Bearer {key}".encode()) for v in values)


class InfoAnswers:
    """ASGI middleware: answers 503 while a caller waits for weights, else adds ``NCCL_HEADER``."""

    def __init__(self, app: App) -> None:
        """Wrap an application."""
        self._app = app
        self._waiting: set[object] = set()

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        """Answer one call, or pass it on."""
        path = scope.get("path", "")
        if "weight" in path:
            await self._take_weights(scope, receive, send)
        elif path != "/server_info":
            await self._app(scope, receive, send)
        elif self._waiting:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"it takes new weights"})
        else:
            await self._app(scope, receive, lambda message: send(_with_settings(message)))

    async def _take_weights(self, scope: Message, receive: Any, send: Send) -> None:
        """Track a weight call until it is answered or its caller is gone."""
        caller = object()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._waiting.discard(caller)
            await send(message)

        body = [await receive()]
        while body[-1].get("more_body"):
            body.append(await receive())

        async def receive_again() -> Any:
            return body.pop(0) if body else await receive()

        work = asyncio.ensure_future(self._app(scope, receive_again, answer))
        is_gone = asyncio.ensure_future(receive())
        self._waiting.add(caller)
        try:
            await asyncio.wait((work, is_gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.discard(caller)
            is_gone.cancel()
        await work


def _with_settings(message: Message) -> Message:
    if message["type"] != "http.response.start":
        return message
    header = (NCCL_HEADER.encode(), json.dumps(nccl_settings()).encode())
    return {**message, "headers": [*message["headers"], header]}
