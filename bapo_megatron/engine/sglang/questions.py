"""How a server answers ``/server_info``, by which others find out whether its scheduler is stuck.

SGLang has the scheduler answer. A scheduler that takes weights answers nothing, as it should while
a caller waits for them. After a broken broadcast no caller waits, and SGLang does not notice.
Standard library only: the launcher imports this.
"""

import asyncio
import json
from typing import Any

from bapo_megatron.engine.sglang.keys import App, Message, Send
from bapo_megatron.runtime.processes import nccl_settings

NCCL_HEADER = "x-nccl-settings"
"""Header of an answer: the server's ``processes.nccl_settings`` as JSON."""


class InfoAnswers:
    """ASGI middleware: answers 503 while a caller waits for weights, else adds ``NCCL_HEADER``."""

    def __init__(self, app: App) -> None:
        """Stand before an application."""
        self._app = app
        self._waiting: set[object] = set()

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        """Answer one call, or let it through."""
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
        """Count a call about weights until it is answered, or its caller is gone.

        It is answered with the last part of the answer, not when the application returns: the
        caller's next call may come in between.
        """
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
