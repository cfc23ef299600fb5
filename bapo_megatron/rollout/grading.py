"""From response tokens to a score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

    from bapo_megatron.reward.base import Score
    from bapo_megatron.reward.pool import RewardPool
    from bapo_megatron.rollout.buffer import PendingSample
    from bapo_megatron.types import Prompt


class Grader:
    """Decodes responses and has them scored in worker processes."""

    def __init__(self, tokenizer: Any, rewards: RewardPool) -> None:
        """Keep the parts.

        Args:
            tokenizer: The model's Hugging Face tokenizer.
            rewards: Worker processes; their owner closes them.
        """
        self._tokenizer = tokenizer
        self._rewards = rewards
        self.num_timeouts = 0
        """Training samples scored 0 because grading them took too long."""

    async def score(self, pending: PendingSample) -> None:
        """Fill in text and reward of a finished sample, unless it was begun again meanwhile."""
        sample = pending.sample
        text, score = await self.grade(sample.response_token_ids, sample.prompt)
        self.num_timeouts += score.timed_out
        sample.response_text = text
        sample.reward = score.reward
        sample.answer_found = score.answer_found
        if pending.sample is sample:
            pending.is_scored = True

    async def grade(
        self,
        response_token_ids: np.ndarray,
        prompt: Prompt,
        finish_reason: FinishReason = FinishReason.STOP,
    ) -> tuple[str, Score]:
        """The decoded response and its score.

        Args:
            response_token_ids: [R].
            prompt: What it answers.
            finish_reason: Why it ended, which reward functions may ask for.

        Raises:
            RewardError: The reward function failed.
        """
        text: str = self._tokenizer.decode(
            response_token_ids.tolist(),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        num_tokens = len(response_token_ids)
        return text, await self.grade_text(text, prompt, finish_reason, num_tokens)

    async def grade_text(
        self,
        response_text: str,
        prompt: Prompt,
        finish_reason: FinishReason = FinishReason.STOP,
        num_tokens: int = 0,
    ) -> Score:
        """The score of a response that was decoded before.

        Args:
            response_text: The response, without special tokens.
            prompt: What it answers.
            finish_reason: Why it ended, which reward functions may ask for.
            num_tokens: How long it was, likewise.

        Raises:
            RewardError: The reward function failed.
        """
        return await self._rewards.score(response_text, prompt.answer)
