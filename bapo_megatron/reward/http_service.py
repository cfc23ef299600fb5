"""Rewards from an HTTP service: batches, retried on transient failures (docs/rewards.md).

    POST url
    → [{"response": …, "answer": …, "sample": {…}, "row": {…}, "turns": […], "state": …}, …]
    ← [1.0, {"reward": 0.5, "clarity": 0.7}, …]

Fields are those of ``base.Response``; one result per response, in order, each as a Python function
may return it.
"""

import asyncio
import functools
import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import aiohttp

from bapo_megatron.config.reward import HttpRewardConfig
from bapo_megatron.errors import describe_cause
from bapo_megatron.reward.base import Response, RewardError, Score
from bapo_megatron.reward.functions import as_score
from bapo_megatron.runtime.files import parse_json

Waiting = tuple[Response, asyncio.Future[Score]]

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_MAX_REASON = 200
_RETRIED_STATUS = (408, 425, 429)
"""Besides 5xx: the service asks to try again."""


class HttpReward:
    """One service; belongs to the event loop that first calls ``score``."""

    def __init__(self, name: str, url: str, config: HttpRewardConfig) -> None:
        """Prepare the connections; nothing is sent.

        ``name`` is the component's, for messages. ``config.check`` has seen that the environment
        has the token.
        """
        self._url, self._config = url, config
        self._place = f"reward '{name}'"
        self._waiting: deque[Waiting] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made by the first request, because it belongs to the event loop."""
        headers = {"Content-Type": "application/json"}
        if variable := self._config.token_variable:
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        # A proxy would see responses and token: no ``trust_env``.
        return aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
            connector=aiohttp.TCPConnector(limit=self._config.connections),
        )

    async def close(self) -> None:
        """End requests in flight; pending calls of ``score`` raise ``RewardError``."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        _fail(self._waiting, self._closed())
        await self._session.close()

    async def score(self, response: Response) -> Score:
        """Score one response, in a batch with others that wait.

        Raises:
            RewardError: The service gave no answer for ``patience_s``, or an unusable one.
        """
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((response, future))
        self._senders = {sender for sender in self._senders if not sender.done()}
        if len(self._senders) < self._config.connections:
            self._senders.add(asyncio.create_task(self._send_waiting()))
        return await future

    async def _send_waiting(self) -> None:
        await asyncio.sleep(self._config.gather_s)  # so that a batch has more than the first
        while self._waiting:
            size = min(self._config.batch_size, len(self._waiting))
            taken = [self._waiting.popleft() for _ in range(size)]
            batch = [(response, future) for response, future in taken if not future.done()]
            if not batch:
                continue
            try:
                scores = await self._send([response for response, _ in batch])
            except RewardError as error:
                _fail(batch, error)
            except BaseException:
                _fail(batch, self._closed())
                raise
            else:
                for (_, future), score in zip(batch, scores, strict=True):
                    if not future.done():
                        future.set_result(score)

    async def _send(self, responses: list[Response]) -> list[Score]:
        body = await asyncio.to_thread(lambda: json.dumps([*map(_item, responses)]).encode())
        end_s = time.monotonic() + self._config.patience_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                reply = await self._post(body)
                return await asyncio.to_thread(self._scores, reply, len(responses))
            except TimeoutError:
                problem = f"no answer within {self._config.timeout_s:g} s"
            except aiohttp.ClientError as error:
                problem = describe_cause(error)
            if time.monotonic() + backoff_s > end_s:
                raise RewardError(
                    f"{self._place}: {self._url} gave no scores for {self._config.patience_s:g} s "
                    f"({problem}); see the service's log, or raise http.patience_s"
                )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _post(self, body: bytes) -> bytes:
        """Return the answer; raise ``aiohttp.ClientError`` where a retry may help."""
        async with self._session.post(self._url, data=body, allow_redirects=False) as reply:
            content = await reply.read()
        if reply.status == HTTPStatus.OK:
            return content
        text = " ".join(content.decode(errors="replace").split())[:_MAX_REASON] or "no text"
        problem = f"HTTP {reply.status}: {text}"
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR or reply.status in _RETRIED_STATUS:
            raise aiohttp.ClientError(problem)
        remedy = "correct the url"
        if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            remedy = "set the variable of http.token_variable to its token"
        raise RewardError(f"{self._place}: {self._url} refuses ({problem}); {remedy}")

    def _scores(self, reply: bytes, num_responses: int) -> list[Score]:
        try:
            results = parse_json(reply)
            if not isinstance(results, list) or len(results) != num_responses:
                length = f"{len(results)} results" if isinstance(results, list) else "no list"
                raise ValueError(f"must be a list of {num_responses} results, got {length}")
            return [as_score(result) for result in results]
        except (ValueError, TypeError, OverflowError) as error:
            raise RewardError(
                f"{self._place}: unusable answer of {self._url}: {error}; correct the service"
            ) from error

    def _closed(self) -> RewardError:
        return RewardError(f"{self._place}: the service was closed")


def _fail(waiting: Iterable[Waiting], error: RewardError) -> None:
    for _, future in waiting:
        if not future.done():
            future.set_exception(error)
            future.exception()  # marks it as retrieved: perhaps nobody waits any more


def _item(response: Response) -> dict[str, Any]:
    item = asdict(response)
    item["response"] = item.pop("text")
    return item
