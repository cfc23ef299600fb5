"""Scores the episodes of training and evaluation, and has the teacher score their tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.token_columns import COLUMNS
from bapo_megatron.reward.base import Response, SampleFacts, Score
from bapo_megatron.reward.composition import Rewards, ShapedReward, Shaping
from bapo_megatron.rollout.buffer import Episode, PendingGroup
from bapo_megatron.rollout.scoring import TeacherPool
from bapo_megatron.types import FinishReason, Sample


@dataclass(eq=False)
class Grader:
    """Decodes and scores responses; the caller starts and closes ``rewards``."""

    renderer: ChatRenderer
    rewards: Rewards
    shaping: Shaping | None = None
    """Added to rewards in training; None in evaluations."""
    sees_groups: bool = field(default=False, kw_only=True)
    """Whether rewards depend on the whole group."""
    teacher: TeacherPool | None = field(default=None, kw_only=True)
    """Scores each response while it is graded."""
    num_timeouts: int = 0
    """Samples scored 0 because grading them took too long."""
    num_errors: int = 0
    """Samples scored 0 because a reward function failed."""

    async def score(self, episode: Episode, group: PendingGroup) -> None:
        """Set texts, reward and columns of a finished episode, unless it was restarted meanwhile.

        With ``sees_groups`` the whole ``group`` gets its rewards once its last sample is graded.

        Raises:
            RewardError: A reward function failed.
            RolloutError: The teacher failed.
        """
        sample, prompt = episode.finished(), episode.prompt
        texts = tuple(
            self.renderer.decode(token_ids.tolist(), skips_special=True)
            for sequence in sample.sequences
            for token_ids in sequence.segments()
        )
        facts = SampleFacts(
            prompt_id=prompt.prompt_id,
            source=prompt.source,
            prompt=prompt.text,
            finish_reason=sample.finish_reason.value,
            num_tokens=sample.episode_tokens,
            num_turns=sample.episode_turns,
            environment_tokens=sample.episode_tokens - sample.episode_sampled,
        )
        turns = texts if len(texts) > 1 else ()
        response = Response(texts[-1], prompt.answer, facts, prompt.row, turns, episode.state)
        score, *columns = await asyncio.gather(
            self.rewards.score(response), *map(self._teacher_columns, sample.sequences)
        )
        if episode.sample is not sample:
            return
        for sequence, values in zip(sample.sequences, columns, strict=True):
            sequence.columns = values
        episode.graded = response, score
        members = group.episodes if self.sees_groups else [episode]
        if all(member.graded is not None for member in members):
            await self._reward(members)

    async def _teacher_columns(self, sequence: Sample) -> dict[str, np.ndarray]:
        if self.teacher is None or self.teacher.has_scored(sequence):
            return sequence.columns
        columns = await self.teacher.score(sequence)
        return {n: v for n, v in sequence.columns.items() if COLUMNS[n].is_sampled} | columns

    async def _reward(self, members: Sequence[Episode]) -> None:
        """Set the rewards of graded episodes together, unless one is restarted meanwhile."""
        samples = [member.finished() for member in members]
        graded = [member.graded for member in members if member.graded is not None]
        responses = [response for response, _ in graded]
        scores = [score for _, score in graded]
        if self.sees_groups:
            scores = await self.rewards.score_group(responses, scores)
        shaped = await asyncio.gather(*map(self._shape, samples, responses, scores))
        if any(member.sample is not s for member, s in zip(members, samples, strict=True)):
            return
        parts = zip(members, samples, responses, scores, shaped, strict=True)
        for episode, sample, response, score, final in parts:
            self.num_timeouts += score.timed_out or final.timed_out
            self.num_errors += score.failed
            sample.reward = final.reward
            sample.reward_components = {**score.components, **score.metrics, **final.terms}
            sample.answer_found = score.answer_found
            episode.texts = response.turns or (response.text,)
            episode.extracted, episode.reason = (
                text.encode("utf-8", "replace").decode()  # no file can hold lone surrogates
                for text in (score.extracted, score.reason)
            )

    async def _shape(self, sample: Sample, response: Response, score: Score) -> ShapedReward:
        if self.shaping is None or sample.finish_reason is FinishReason.ENVIRONMENT:
            return ShapedReward(score.reward, {})
        token_ids_Q = np.concatenate([s.sampled_token_ids for s in sample.sequences])
        return await self.shaping.apply(score, response, token_ids_Q)
