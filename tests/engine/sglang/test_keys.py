"""Which key a server wants for which call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.engine.sglang.keys import (
    ADMIN_API_KEY_VARIABLE,
    API_KEY_VARIABLE,
    MIN_KEY_BYTES,
    ApiKeys,
    KeyCheck,
)

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


@pytest.mark.parametrize("name", [API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE])
@pytest.mark.parametrize(("key", "num_bytes"), [("", 0), ("secret-of-fifte", 15)])
def test_a_short_key_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str, num_bytes: int
) -> None:
    monkeypatch.setenv(name, key)
    with pytest.raises(ValueError, match="at least 16 bytes") as caught:
        ApiKeys.from_environment(MIN_KEY_BYTES)
    assert str(caught.value) == (
        f"{name}: a key must have at least 16 bytes, this one has {num_bytes}; make one with "
        "'openssl rand -hex 16', or unset the variable"
    )


def test_the_keys_of_servers_of_others_may_be_short_but_not_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADMIN_API_KEY_VARIABLE, raising=False)
    monkeypatch.setenv(API_KEY_VARIABLE, "short")
    assert ApiKeys.from_environment() == ApiKeys("short", "")
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(ValueError, match="at least 1 bytes, this one has 0"):
        ApiKeys.from_environment()
