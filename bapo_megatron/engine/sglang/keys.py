"""The keys of a server, and which one it requires for which call.

``KeyCheck`` is an ASGI middleware in place of SGLang's own. SGLang lets whoever may generate read
``/server_info``, which has all settings including both keys, and call whatever its authors did not
mark as control. Here all but a few paths require the admin key. The path is the one by which the
call is routed, whatever its ``Host`` header says.

Standard library only: the launcher imports this.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Any, Send], Awaitable[None]]

API_KEY_VARIABLE = "BAPO_MEGATRON_API_KEY"
"""Environment variable with the key of ``/generate`` for servers in ``rollout.servers``."""
ADMIN_API_KEY_VARIABLE = "BAPO_MEGATRON_ADMIN_API_KEY"
"""Environment variable with the key of control calls for servers in ``rollout.servers``."""

MIN_KEY_BYTES = 16
"""Shorter keys could be guessed."""

_GENERATION_PATHS = ("/generate", "/model_info")
"""Paths that the API key opens; open to everybody if there is none."""
_PUBLIC_PATHS = ("/ready", "/health")
"""Paths that are always open to everybody."""
_UNAUTHORIZED = b'{"error": "Unauthorized"}'


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys of a server; empty where it requires none."""

    api_key: str = field(default="", repr=False)
    """For generation and the weights version."""
    admin_api_key: str = field(default="", repr=False)
    """For control calls: abort, weight updates, how the server was started."""

    @classmethod
    def from_environment(cls, min_bytes: int = 1) -> Self:
        """Read the keys from the environment; one whose variable is not set is empty.

        Raises:
            ValueError: A variable is set to fewer than ``min_bytes`` bytes.
        """
        keys = []
        for name in (API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE):
            if name in os.environ:
                check_key(os.environ[name], name, "unset the variable", min_bytes)
            keys.append(os.environ.get(name, ""))
        return cls(*keys)

    @staticmethod
    def variable(*, admin: bool) -> str:
        """Name the environment variable with the key of one call."""
        return ADMIN_API_KEY_VARIABLE if admin else API_KEY_VARIABLE

    def headers(self, *, admin: bool) -> dict[str, str]:
        """Return the HTTP headers of one call; without an admin key, the other one stands in."""
        key = (self.admin_api_key or self.api_key) if admin else self.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}


def check_key(key: str, place: str, remedy: str, min_bytes: int = MIN_KEY_BYTES) -> None:
    """Raise a ``ValueError`` for a key that is too short; the message does not show it."""
    num_bytes = len(key.encode())
    if num_bytes < min_bytes:
        raise ValueError(
            f"{place}: a key must have at least {min_bytes} bytes, this one has {num_bytes}; make "
            f"one with 'openssl rand -hex 16', or {remedy}"
        )


class KeyCheck:
    """Answers 401 if the key is missing or wrong."""

    def __init__(self, app: App, *, api_key: str | None, admin_api_key: str | None) -> None:
        """Guard an application; without ``admin_api_key``, ``api_key`` stands in."""
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        """Let one call through, or answer it."""
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
        key = self._api_key if path in _GENERATION_PATHS else self._admin_api_key
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return not key or any(secrets.compare_digest(v, f"Bearer {key}".encode()) for v in given)
