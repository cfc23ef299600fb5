"""Which key a server wants for which call, and what it answers about itself."""

import asyncio
from typing import Any

import pytest

from bapo_megatron.engine.sglang.keys import (
    ADMIN_API_KEY_VARIABLE,
    API_KEY_VARIABLE,
    ApiKeys,
    InfoAnswers,
    KeyCheck,
)

BODY = [
    {"type": "http.request", "body": b"{", "more_body": True},
    {"type": "http.request", "body": b"}", "more_body": False},
]


class Scheduler:
    """SGLang's application: updates of weights end when the test says so."""

    def __init__(self) -> None:
        self.is_done = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/update_weights"):
            self.bodies += [(await receive())["body"] for _ in BODY]
            await self.is_done.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})


async def call(
    application: Any,
    path: str,
    key: str = "",
    *,
    kind: str = "http",
    client: str = "10.0.0.8",
    is_gone: asyncio.Event | None = None,
) -> list[dict[str, Any]]:
    """What a caller of the server 10.0.0.7 gets, who leaves when ``is_gone``."""
    sent: list[dict[str, Any]] = []
    body = list(BODY)

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop(0)
        await (is_gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"x/health?"), (b"authorization", f"Bearer {key}".encode())]
    scope = {"type": kind, "path": path, "headers": headers if key else headers[:1]}
    scope |= {"client": (client, 50000), "server": ("10.0.0.7", 30000)}
    await application(scope, receive, send)
    return sent


def _status(
    path: str, key: str = "", keys: tuple[str, str] = ("user", "admin"), **caller: str
) -> int:
    """The status of an answer, or the code that a websocket is closed with."""
    check = KeyCheck(Scheduler(), api_key=keys[0], admin_api_key=keys[1])
    first, *_ = asyncio.run(call(check, path, key, **caller))
    return int(first.get("status", first.get("code", 0)))


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/generate", (401, 200, 401)),
        ("/model_info", (401, 200, 401)),
        ("/ready", (200, 200, 200)),
        ("/server_info", (401, 401, 200)),
        ("/load_lora_adapter_from_tensors", (401, 401, 200)),
        ("/what/nobody/knows", (401, 401, 200)),
        ("/generate/", (401, 401, 200)),
    ],
)
def test_all_but_generation_takes_the_admin_key(path: str, statuses: tuple[int, ...]) -> None:
    assert tuple(_status(path, key) for key in ("", "user", "admin")) == statuses


@pytest.mark.parametrize(
    ("path", "key", "options", "status"),
    [
        # A key that is not set leaves generation open, or has the other one stand in.
        ("/generate", "", {"keys": ("", "admin")}, 200),
        ("/server_info", "", {"keys": ("", "admin")}, 401),
        ("/server_info", "user", {"keys": ("user", "")}, 200),
        ("/server_info", "", {"keys": ("user", "")}, 401),
        # What a server calls itself needs no key from there.
        ("/freeze_gc", "", {"client": "127.0.0.1"}, 200),
        ("/freeze_gc", "", {"client": "10.0.0.7"}, 200),
        ("/freeze_gc", "", {"client": "10.0.0.8"}, 401),
        ("/v1/realtime", "user", {"kind": "websocket"}, 1008),
        ("/v1/realtime", "admin", {"kind": "websocket"}, 200),
    ],
)
def test_keys_that_are_not_set_own_calls_and_websockets(
    path: str, key: str, options: dict[str, Any], status: int
) -> None:
    assert _status(path, key, **options) == status


@pytest.mark.parametrize("name", [API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE])
@pytest.mark.parametrize("key", ["", "secret-of-fifte"])
def test_a_short_key_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    monkeypatch.setenv(name, key)
    with pytest.raises(
        ValueError, match=f"^{name}: .* 16 bytes, this one has {len(key)}"
    ) as caught:
        ApiKeys.from_environment()
    assert "secret" not in str(caught.value)


def test_a_key_that_is_not_in_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_API_KEY_VARIABLE, raising=False)
    monkeypatch.setenv(API_KEY_VARIABLE, "k" * 16)
    assert ApiKeys.from_environment() == ApiKeys("k" * 16, "")


@pytest.mark.parametrize("end", ["answer", "caller is gone", "cancelled"])
async def test_the_scheduler_is_not_asked_while_a_caller_waits_for_weights(end: str) -> None:
    scheduler, is_gone = Scheduler(), asyncio.Event()
    answers = InfoAnswers(scheduler)
    update = asyncio.create_task(call(answers, "/update_weights_from_distributed", is_gone=is_gone))
    while len(scheduler.bodies) < 2:
        await asyncio.sleep(0)
    assert b"".join(scheduler.bodies) == b"{}"
    assert (await call(answers, "/server_info"))[0]["status"] == 503
    assert (await call(answers, "/ready"))[0]["status"] == 200
    if end == "answer":
        scheduler.is_done.set()
        assert [message["status"] for message in (await update)[:1]] == [200]
    elif end == "caller is gone":
        is_gone.set()
    else:
        update.cancel()
        await asyncio.wait([update])
    while (await call(answers, "/server_info"))[0]["status"] == 503:
        await asyncio.sleep(0)
    assert update.done() == (end != "caller is gone")  # the scheduler still takes weights
    scheduler.is_done.set()
    await asyncio.wait([update])


async def test_the_scheduler_is_asked_again_with_the_answer_before_the_application_returns() -> (
    None
):
    scheduler, statuses = Scheduler(), []
    scheduler.is_done.set()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await scheduler(scope, receive, send)
        if scope["path"] != "/server_info":  # the caller of this one has the answer
            statuses.append((await call(answers, "/server_info"))[0]["status"])

    answers = InfoAnswers(application)
    await call(answers, "/update_weights_from_disk")
    assert statuses == [200]


async def test_the_answer_has_the_settings_of_nccl_that_the_server_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = InfoAnswers(Scheduler())
    for value in ("0", "1"):  # SGLang sets it after its start, by its own arguments
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
        told = b'{"NCCL_CUMEM_ENABLE": "%s"}' % value.encode()
        start, _ = await call(answers, "/server_info")
        assert start["headers"] == [(b"a", b"b"), (b"x-nccl-settings", told)]
    start, _ = await call(answers, "/model_info")
    assert start["headers"] == [(b"a", b"b")]
