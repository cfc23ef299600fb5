"""What a server answers about itself, while its scheduler takes weights and otherwise."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bapo_megatron.engine.sglang.questions import InfoAnswers

if TYPE_CHECKING:
    from collections.abc import Callable

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
    answers: InfoAnswers, path: str, is_gone: asyncio.Event | None = None
) -> list[dict[str, Any]]:
    """What a caller gets, who leaves when ``is_gone``."""
    sent: list[dict[str, Any]] = []
    body = list(BODY)

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop(0)
        await (is_gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await answers({"type": "http", "path": path, "headers": []}, receive, send)
    return sent


def play(use: Callable[[InfoAnswers, Scheduler], Any]) -> None:
    async def run() -> None:
        scheduler = Scheduler()
        async with asyncio.timeout(60):
            await use(InfoAnswers(scheduler), scheduler)

    asyncio.run(run())


def test_the_scheduler_is_not_asked_while_a_caller_waits_for_weights() -> None:
    async def use(answers: InfoAnswers, scheduler: Scheduler) -> None:
        update = asyncio.create_task(call(answers, "/update_weights_from_disk"))
        while len(scheduler.bodies) < 2:
            await asyncio.sleep(0)
        assert (await call(answers, "/server_info"))[0]["status"] == 503
        assert (await call(answers, "/ready"))[0]["status"] == 200
        scheduler.is_done.set()
        assert [message["type"] for message in await update] == [
            "http.response.start",
            "http.response.body",
        ]
        assert b"".join(scheduler.bodies) == b"{}"
        assert (await call(answers, "/server_info"))[0]["status"] == 200

    play(use)


def test_the_scheduler_is_asked_again_once_the_caller_is_gone_though_it_still_takes_weights() -> (
    None
):
    async def use(answers: InfoAnswers, scheduler: Scheduler) -> None:
        is_gone = asyncio.Event()
        update = asyncio.create_task(call(answers, "/update_weights_from_distributed", is_gone))
        while len(scheduler.bodies) < 2:
            await asyncio.sleep(0)
        is_gone.set()
        while (await call(answers, "/server_info"))[0]["status"] == 503:
            await asyncio.sleep(0)
        assert not update.done()
        scheduler.is_done.set()
        await update

    play(use)


def test_the_scheduler_is_asked_again_with_the_answer_before_the_application_returns() -> None:
    async def use(answers: InfoAnswers, scheduler: Scheduler) -> None:
        scheduler.is_done.set()
        statuses = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":  # the caller has it, and asks at once
                statuses.append((await call(answers, "/server_info"))[0]["status"])

        body = list(BODY)

        async def receive() -> dict[str, Any]:
            return body.pop(0) if body else await asyncio.Event().wait()

        await answers({"type": "http", "path": "/update_weights_from_disk"}, receive, send)
        assert statuses == [200]

    play(use)


def test_the_scheduler_is_asked_again_once_a_call_about_weights_is_cancelled() -> None:
    async def use(answers: InfoAnswers, scheduler: Scheduler) -> None:
        update = asyncio.create_task(call(answers, "/update_weights_from_disk"))
        while len(scheduler.bodies) < 2:
            await asyncio.sleep(0)
        update.cancel()
        await asyncio.wait([update])
        assert (await call(answers, "/server_info"))[0]["status"] == 200

    play(use)


def test_the_answer_has_the_settings_of_nccl_that_the_server_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(answers: InfoAnswers, scheduler: Scheduler) -> None:
        for value in ("0", "1"):  # SGLang sets it after its start, by its own arguments
            monkeypatch.setenv("NCCL_CUMEM_ENABLE", value)
            start, _ = await call(answers, "/server_info")
            told = b'{"NCCL_CUMEM_ENABLE": "%s"}' % value.encode()
            assert start["headers"] == [(b"a", b"b"), (b"x-nccl-settings", told)]
        start, _ = await call(answers, "/model_info")
        assert start["headers"] == [(b"a", b"b")]

    play(use)
