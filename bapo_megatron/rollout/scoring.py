"""A teacher behind engines, which scores finished responses (``algorithm.distillation``).

Its engines are not in ``EnginePool``: they sample nothing, and their weights never change
(``engine.pooled.TeacherStates``). Requests of a lost engine move to others, or wait.

Shape legend: Q = tokens of a response that the policy sampled, R = all tokens of the response,
K = ``top_k``.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.scorers import TEACHER_KEY, DistillationConfig
from bapo_megatron.config.section import with_values
from bapo_megatron.config.teacher import as_policy, naming_teacher, teacher_text
from bapo_megatron.data.token_columns import COLUMNS, TEACHER, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS
from bapo_megatron.engine.base import Engine, Scores
from bapo_megatron.engine.load import load_kind
from bapo_megatron.engine.pooled import PooledEngine, TeacherStates
from bapo_megatron.errors import RolloutError, ServerError, ServerGoneError
from bapo_megatron.types import Sample

_MAX_PER_ENGINE = 16
"""Requests in flight per engine; a few long responses fill a prefill batch."""
_MAX_FAILURES = 10
"""Failed attempts to score one response after which the run ends."""


async def connect_teacher(config: RunConfig, device: str) -> list[Engine]:
    """Return the teacher's engines without calling them; a local one loads its model.

    Raises:
        RolloutError: The model cannot be loaded.
    """
    run = as_policy(config)
    with naming_teacher():
        backend = load_kind(run.rollout.engine).open(run, device, awaits_weights=False)
        return [await backend.connect(address) for address in backend.addresses()]


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
        self._top_k = config.num_top
        self._rollout = with_values(rollout, health={"patience_s": config.teacher.patience_s})
        self._vocab_size = vocab_size
        self._states = TeacherStates((), rollout)
        self._turn = asyncio.Lock()
        """Held by the request to be sent next."""

    async def start(
        self, engines: Sequence[Engine], report: Callable[[str], None] = lambda line: None
    ) -> None:
        """Check every engine that answers, and wait until one does.

        Raises:
            RolloutError: One is unusable as it is, or none answers for ``teacher.patience_s``.
        """
        self._states = TeacherStates(engines, self._rollout)
        with naming_teacher():
            await self._states.wait_for_engines(report)

    async def close(self) -> None:
        """Stop watching, and close every connection."""
        await self._states.close()

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
                self._states.leave_out(entry, str(error))
                if num_failures == _MAX_FAILURES:
                    raise RolloutError(
                        f"{TEACHER_KEY}: {teacher_text(error)}; {num_failures} attempts to score "
                        f"{where} failed; see the servers' logs"
                    ) from error
            except RolloutError as error:
                raise RolloutError(f"{TEACHER_KEY}: {teacher_text(error)} ({where})") from error

    async def _request(self, entry: PooledEngine, sample: Sample) -> Scores:
        prompt_ids = sample.prompt.token_ids.tolist()
        limit = asyncio.timeout(None)
        self._states.requests[entry].add(limit)
        try:
            async with limit:
                scores = await entry.engine.score(
                    [*prompt_ids, *sample.response_token_ids.tolist()],
                    self._rollout.request_timeout_s,
                    start=len(prompt_ids),
                    top_k=self._top_k,
                )
        except TimeoutError as error:
            raise ServerGoneError(f"{entry.address}: {entry.reason}") from error
        finally:
            self._states.requests[entry].discard(limit)
            self._states.news.wake()
        if not (np.isfinite(scores.logprobs).all() and np.isfinite(scores.top_logprobs).all()):
            raise ServerError(
                f"{entry.address}: a log-prob is not finite; check the teacher's weights and dtype"
            )
        return scores

    async def _choose(self) -> PooledEngine:
        """Wait for an engine that can take a request; return the least busy one."""
        requests = self._states.requests
        while True:
            with naming_teacher():
                usable = await self._states.wait_usable()
            entry = min(usable, key=lambda entry: len(requests[entry]))
            if len(requests[entry]) < _MAX_PER_ENGINE:
                return entry
            await self._states.news.wait()
