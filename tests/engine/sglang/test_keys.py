"""Which key a server wants for which call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.engine.sglang.keys import KeyCheck

if TYPE_CHECKING:
    from collections.abc import MutableMapping


def _status(path: str, key: str, *, kind: str = "http", **keys: str) -> int:
    """What a call gets: 200 from the application, else the refusal's number."""
    sent: list[MutableMapping[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"x/health?"), (b"authorization", f"Bearer {key}".encode())]
    scope = {"type": kind, "path": path, "headers": headers if key else headers[:1]}
    check = KeyCheck(application, **{"api_key": "user", "admin_api_key": "admin", **keys})
    asyncio.run(check(scope, receive, send))
    return int(sent[0].get("status", sent[0].get("code", 0)))


@pytest.mark.parametrize(
    ("path", "status_by_key"),
    [
        ("/generate", {"": 401, "user": 200, "admin": 401}),
        ("/model_info", {"": 401, "user": 200, "admin": 401}),
        ("/ready", {"": 200, "user": 200, "admin": 200}),
        ("/server_info", {"": 401, "user": 401, "admin": 200}),
        ("/update_weights_from_disk", {"": 401, "user": 401, "admin": 200}),
        ("/load_lora_adapter_from_tensors", {"": 401, "user": 401, "admin": 200}),
        ("/what/nobody/knows", {"": 401, "user": 401, "admin": 200}),
        ("/generate/", {"": 401, "user": 401, "admin": 200}),
    ],
)
def test_all_but_generation_takes_the_admin_key(path: str, status_by_key: dict[str, int]) -> None:
    assert {key: _status(path, key) for key in status_by_key} == status_by_key


def test_without_an_api_key_generation_is_open_and_nothing_else() -> None:
    assert _status("/generate", "", api_key="") == 200
    assert _status("/server_info", "", api_key="") == 401


def test_without_an_admin_key_the_other_one_opens_all() -> None:
    assert _status("/server_info", "user", admin_api_key="") == 200
    assert _status("/server_info", "", admin_api_key="") == 401


def test_websockets_take_the_admin_key_too() -> None:
    assert _status("/v1/realtime", "user", kind="websocket") == 1008
    assert _status("/v1/realtime", "admin", kind="websocket") == 200
