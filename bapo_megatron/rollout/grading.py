"""From response tokens to a reward."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.data.chat import decode
from bapo_megatron.reward.base import Response, SampleFacts, Score
from bapo_megatron.reward.composition import Rewards
from bapo_megatron.reward.shaping import ShapedReward, Shaping
from bapo_megatron.rollout.buffer import PendingGroup, PendingSample
from bapo_megatron.types import FinishReason, Sample


@dataclass(eq=False)
class Grader:
    """Decodes responses and has them scored in worker processes, which others start and close."""

    tokenizer: Any
    rewards: Rewards
    shaping: Shaping | None = None
    """What is added to the rewards of a training; None in evaluations."""
    sees_groups: bool = field(default=False, kw_only=True)
    """Whether rewards depend on the whole group."""
    num_timeouts: int = 0
    """Samples scored 0 because grading them took too long."""
    num_errors: int = 0
    """Samples scored 0 because a reward function failed."""

    async def score(self, pending: PendingSample, group: PendingGroup) -> None:
        """Fill in texts and reward of a finished sample, unless it was begun again meanwhile.

        With ``sees_groups``, those of the whole ``group`` once its last sample is graded.

        Raises:
            RewardError: A reward function failed.
        """
        sample, prompt = pending.sample, pending.prompt
        texts = tuple(
            decode(self.tokenizer, token_ids.tolist(), skips_special=True)
            for token_ids in sample.segments()
        )
        facts = SampleFacts(
            prompt_id=prompt.prompt_id,
            source=prompt.source,
            prompt=prompt.text,
            finish_reason=sample.finish_reason.value,
            num_tokens=len(sample.response_token_ids),
            num_turns=sample.num_turns,
            environment_tokens=sample.num_written,
        )
        turns = texts if len(texts) > 1 else ()
        response = Response(texts[-1], prompt.answer, facts, prompt.row, turns, pending.state)
        score = await self.rewards.score(response)
        if pending.sample is not sample:
            return
        pending.graded = response, score
        members = group.samples if self.sees_groups else [pending]
        if all(member.graded is not None for member in members):
            await self._reward(members)

    async def _reward(self, members: Sequence[PendingSample]) -> None:
        """Give graded samples their rewards, all at once, unless one is begun again meanwhile."""
        samples = [member.sample for member in members]
        graded = [member.graded for member in members if member.graded is not None]
        responses = [response for response, _ in graded]
        scores = [score for _, score in graded]
        if self.sees_groups:
            scores = await self.rewards.score_group(responses, scores)
        shaped = await asyncio.gather(*map(self._shape, samples, responses, scores))
        if any(member.sample is not s for member, s in zip(members, samples, strict=True)):
            return
        for pending, response, score, final in zip(members, responses, scores, shaped, strict=True):
            self.num_timeouts += score.timed_out or final.timed_out
            self.num_errors += score.failed
            sample = pending.sample
            sample.reward = final.reward
            sample.reward_components = {**score.components, **score.metrics, **final.terms}
            sample.answer_found = score.answer_found
            pending.texts = response.turns or (response.text,)
            pending.extracted, pending.reason = map(_storable, (score.extracted, score.reason))

    async def _shape(self, sample: Sample, response: Response, score: Score) -> ShapedReward:
        if self.shaping is None or sample.finish_reason is FinishReason.ENVIRONMENT:
            return ShapedReward(score.reward, {})
        return await self.shaping.apply(score, response, sample.sampled_token_ids)


def _storable(text: str) -> str:
    """What a user's function said; half a surrogate pair, which no file holds, becomes ``?``."""
    return text.encode("utf-8", "replace").decode()
