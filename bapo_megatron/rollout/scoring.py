"""A teacher behind engines, which scores finished responses (``algorithm.distillation``).

Its engines are not in ``EnginePool``: they sample nothing, and their weights never change. An
engine that fails is left out and polled until it answers; its requests move to others, or wait.

Shape legend: Q = tokens of a response that the policy sampled, R = all tokens of the response,
K = ``top_k``.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bapo_megatron.config.rollout import HealthConfig, RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.scorers import TEACHER_KEY, DistillationConfig
from bapo_megatron.config.teacher import as_policy, naming_teacher, teacher_text
from bapo_megatron.data.token_columns import (
    COLUMNS,
    TEACHER,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
)
from bapo_megatron.engine.base import NO_WEIGHTS, Engine, Scores
from bapo_megatron.engine.load import load_kind
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.telemetry.console import reporting
from bapo_megatron.types import Sample

_LOG = logging.getLogger(__name__)
_MAX_PER_ENGINE = 16
"""Requests in flight per engine; a few long responses fill a prefill batch."""
_MAX_FAILURES = 10
"""Failed attempts to score one response after which the run ends."""
_NOT_ASKED = "it has not answered yet"


async def connect_teacher(config: RunConfig, device: str) -> list[Engine]:
    """Return the teacher's engines without calling them; a local one loads its model.

    Raises:
        RolloutError: The model cannot be loaded.
    """
    run = as_policy(config)
    with naming_teacher():
        backend = load_kind(run.rollout.engine).open(run, device, awaits_weights=False)
        return [await backend.connect(address) for address in backend.addresses()]


@dataclass(eq=False)
class _TeacherEngine:
    engine: Engine
    reason: str = _NOT_ASKED
    """Why it is left out; empty if it is usable."""
    lost_s: float = field(default_factory=time.monotonic)
    """When it was left out."""
    version: str | None = None
    """Its weights version, which must not change."""
    requests: set[asyncio.Timeout] = field(default_factory=set)
    """The time limits of requests in flight; the health check ends them."""


class TeacherPool:
    """The teacher's engines as one; fills the teacher's columns of finished samples."""

    def __init__(self, config: DistillationConfig, rollout: RolloutConfig, vocab_size: int) -> None:
        """Prepare; call ``start`` before the first ``score``.

        ``vocab_size`` is one more than the tokenizer's largest id. Ids beyond it are padding of the
        teacher's embedding, and removed from its likeliest tokens.
        """
        self.num_lost_requests = 0
        """Requests that moved to another engine because theirs failed."""
        self.num_waiting = 0
        """Samples that are not scored yet."""
        self._top_k = config.top_k if config.loss == "top_k" else 0
        self._patience_s = config.teacher.patience_s
        self._health: HealthConfig = rollout.health
        self._request_timeout_s = rollout.request_timeout_s
        self._vocab_size = vocab_size
        self._engines: Sequence[_TeacherEngine] = ()
        self._watchers: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held by the request to be sent next."""

    async def start(
        self, engines: Sequence[Engine], report: Callable[[str], None] = lambda line: None
    ) -> None:
        """Check every engine that answers, and wait until one does.

        Raises:
            RolloutError: One is unusable as it is, or none answers for ``teacher.patience_s``.
        """
        self._engines = [_TeacherEngine(engine) for engine in engines]
        await asyncio.gather(*map(self._ask, self._engines))
        self._watchers = [asyncio.create_task(self._watch(entry)) for entry in self._engines]
        with reporting(lambda: report(f"waiting for the teacher: {self._describe()}")):
            await self._choose()

    async def close(self) -> None:
        """Stop watching, and close every connection."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for entry in self._engines:
            await entry.engine.close()

    def has_scored(self, sample: Sample) -> bool:
        """Whether a sample has the columns that ``score`` returns."""
        # Columns that a checkpoint lacked for a sample are NaN, and have width 0.
        has_logprobs = bool(np.isfinite(COLUMNS[TEACHER].of(sample)).all())
        width = COLUMNS[TEACHER_TOP_LOGPROBS].of(sample).shape[1]
        return has_logprobs and (width == self._top_k or not sample.num_sampled)

    async def score(self, sample: Sample) -> dict[str, np.ndarray]:
        """Return the teacher's columns of a finished sample, [Q] and [Q, K].

        Raises:
            RolloutError: The request was refused, no engine was usable for ``teacher.patience_s``,
                or too many attempts failed.
        """
        self.num_waiting += 1
        try:
            scores = await self._score(sample)
        finally:
            self.num_waiting -= 1
        mask_R = sample.loss_mask
        columns = {TEACHER: scores.logprobs[mask_R]}
        if self._top_k:
            ids_QK, logprobs_QK = scores.top_ids[mask_R], scores.top_logprobs[mask_R]
            is_padding_QK = ids_QK >= self._vocab_size
            ids_QK[is_padding_QK] = COLUMNS[TEACHER_TOP_IDS].default
            logprobs_QK[is_padding_QK] = COLUMNS[TEACHER_TOP_LOGPROBS].default
            columns |= {TEACHER_TOP_IDS: ids_QK, TEACHER_TOP_LOGPROBS: logprobs_QK}
        return columns

    async def _score(self, sample: Sample) -> Scores:
        num_failures = 0
        where = f"{sample.place}, {sample.prompt.prompt_id}"
        while True:
            async with self._turn:
                entry = await self._choose()
            try:
                return await self._request(entry, sample)
            except ServerError as error:
                num_failures += 1
                self.num_lost_requests += 1
                self._leave_out(entry, error)
                if num_failures == _MAX_FAILURES:
                    raise RolloutError(
                        f"{TEACHER_KEY}: {teacher_text(error)}; {num_failures} attempts to score "
                        f"{where} failed; see the servers' logs"
                    ) from error
            except RolloutError as error:
                raise RolloutError(f"{TEACHER_KEY}: {teacher_text(error)} ({where})") from error

    async def _request(self, entry: _TeacherEngine, sample: Sample) -> Scores:
        prompt_ids = sample.prompt.token_ids.tolist()
        limit = asyncio.timeout(None)
        entry.requests.add(limit)
        try:
            async with limit:
                scores = await entry.engine.score(
                    [*prompt_ids, *sample.response_token_ids.tolist()],
                    self._request_timeout_s,
                    start=len(prompt_ids),
                    top_k=self._top_k,
                )
        except TimeoutError as error:
            raise ServerGoneError(f"{entry.engine.address}: {entry.reason}") from error
        finally:
            entry.requests.discard(limit)
            self._wake()
        if not (np.isfinite(scores.logprobs).all() and np.isfinite(scores.top_logprobs).all()):
            raise ServerError(
                f"{entry.engine.address}: a log-prob is not finite; check the teacher's weights "
                "and dtype"
            )
        return scores

    async def _choose(self) -> _TeacherEngine:
        """Wait for an engine that can take a request; return the least busy one."""
        while True:
            for watcher in self._watchers:
                if watcher.done():
                    watcher.result()  # raises its bug
            usable = [entry for entry in self._engines if not entry.reason]
            free = [entry for entry in usable if len(entry.requests) < _MAX_PER_ENGINE]
            if free:
                return min(free, key=lambda entry: len(entry.requests))
            limit_s = None
            if not usable:
                last_s = max(entry.lost_s for entry in self._engines)
                limit_s = last_s + self._patience_s - time.monotonic()
            if limit_s is not None and limit_s <= 0:
                raise RolloutError(
                    f"no usable teacher for {self._patience_s:g} s ({TEACHER_KEY}.patience_s): "
                    f"{self._describe()}; start it again and continue with resume=true"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._news.wait()

    def _describe(self) -> str:
        """Name the engines that are left out, with reasons."""
        return "; ".join(
            f"{entry.engine.address}: {entry.reason.removeprefix(f'{entry.engine.address}: ')}"
            for entry in self._engines
            if entry.reason
        )

    async def _watch(self, entry: _TeacherEngine) -> None:
        while True:
            await asyncio.sleep(self._health.interval_s)
            try:
                await self._ask(entry)
            except RolloutError as error:
                self._leave_out(entry, error)

    async def _ask(self, entry: _TeacherEngine) -> None:
        """Poll an engine; leave it out if it does not answer, raise if it is unusable as it is."""
        engine, address = entry.engine, entry.engine.address
        try:
            async with asyncio.timeout(self._health.timeout_s):
                version = await engine.version(self._health.timeout_s)
                if entry.reason:
                    with naming_teacher():
                        await engine.capabilities()
                        await engine.check()
        except (ServerError, TimeoutError) as error:
            self._leave_out(entry, error)
            for limit in entry.requests:
                if not limit.expired():
                    limit.reschedule(time.monotonic())
            return
        if version == NO_WEIGHTS:
            raise RolloutError(
                f"{TEACHER_KEY}.servers: {address} has no weights; start it with serve --teacher"
            )
        if entry.version not in (None, version):
            raise RolloutError(
                f"{TEACHER_KEY}.servers: the weights of {address} must not change, got version "
                f"{version} after {entry.version}: a run syncs weights to it; give the teacher "
                "servers of its own"
            )
        if entry.version is not None and entry.reason:
            _LOG.warning("the teacher at %s answers again", address)
        entry.version, entry.reason = version, ""
        self._wake()

    def _leave_out(self, entry: _TeacherEngine, error: BaseException) -> None:
        if entry.reason in ("", _NOT_ASKED):
            _LOG.warning(
                "the teacher at %s is left out: %s", entry.engine.address, teacher_text(error)
            )
        if not entry.reason:
            entry.lost_s = time.monotonic()
        entry.reason = teacher_text(error)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
