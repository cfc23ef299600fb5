"""A teacher's engine in this process, whose scores a test holds back or foresees."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.scorers import DistillationConfig
from bapo_megatron.engine.base import Scores
from bapo_megatron.rollout.scoring import TeacherPool
from bapo_megatron.types import Sample
from tests.fakes.fake_engine import FakeEngine


def teacher_logprob(token_id: int, position: int) -> float:
    """The log-prob that a token has at a position of prompt and response."""
    return -(token_id % 512) / 16 - position / 1024


def make_teacher(
    *, top_k: int = 0, vocab_size: int = 4096, patience_s: float = 30.0, **rollout: Any
) -> TeacherPool:
    """A pool without engines, of ``loss: top_k`` or ``tokens``."""
    teacher = {"path": "teacher", "engine": "local", "patience_s": patience_s}
    distillation: dict[str, Any] = {"coefficient": 1.0, "teacher": teacher}
    if top_k:
        distillation |= {"loss": "top_k", "top_k": top_k}
    health = {"interval_s": 0.1, "timeout_s": 1.0}
    return TeacherPool(
        DistillationConfig.model_validate(distillation),
        RolloutConfig.model_validate({"health": health, **rollout}),
        vocab_size,
    )


def has_columns(sample: Sample) -> bool:
    """Whether a sample has the columns of ``FakeTeacher``, and each token its own values."""
    if "teacher_logprob" not in sample.columns:
        return False
    num_prompt = len(sample.prompt.token_ids)
    positions_Q = num_prompt + np.flatnonzero(sample.loss_mask)
    token_ids = sample.sampled_token_ids.tolist()
    expected = list(map(teacher_logprob, token_ids, positions_Q.tolist()))
    assert sample.columns["teacher_logprob"].tolist() == expected
    if "teacher_top_ids" in sample.columns:
        ids_QK = sample.columns["teacher_top_ids"]
        assert ids_QK[:, :1].reshape(-1).tolist() == positions_Q.tolist()
        assert sample.columns["teacher_top_logprobs"].shape == ids_QK.shape
    return True


class FakeTeacher(FakeEngine):
    """The likeliest tokens at a position are position, position + 1, …"""

    def __init__(self, delay: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__()
        self.scored: list[list[int]] = []
        """The tokens of each request."""
        self.held: asyncio.Event | None = None
        """Requests wait for it."""
        self._delay = delay

    async def score(
        self, token_ids: Sequence[int], timeout_s: float, *, start: int = 1, top_k: int = 0
    ) -> Scores:
        self.scored.append(list(token_ids))
        if self._delay is not None:
            await self._delay()
        if self.held is not None:
            await self.held.wait()
        positions_R1 = np.arange(start, len(token_ids), dtype=np.int32)[:, None]
        rank_K = np.arange(top_k, dtype=np.int32)
        values = [teacher_logprob(token_ids[p], p) for p in range(start, len(token_ids))]
        return Scores(
            np.array(values, np.float32),
            positions_R1 + rank_K,
            (-positions_R1 / 8 - rank_K).astype(np.float32),
        )
