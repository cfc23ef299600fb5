"""From response tokens to a score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from bapo_megatron.reward.base import Response, SampleFacts
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    import numpy as np

    from bapo_megatron.reward.base import Score
    from bapo_megatron.reward.shaping import Shaping
    from bapo_megatron.rollout.buffer import PendingSample
    from bapo_megatron.types import Prompt


class Scorer(Protocol):
    """Scores decoded responses; ``reward.composition.Rewards`` does, in worker processes."""

    async def score(self, response: Response) -> Score:
        """The reward without shaping."""
        ...


class Grader:
    """Decodes responses and has them scored in worker processes."""

    def __init__(self, tokenizer: Any, rewards: Scorer, shaping: Shaping | None = None) -> None:
        """Keep the parts.

        Args:
            tokenizer: The model's Hugging Face tokenizer.
            rewards: The reward functions; their owner closes them.
            shaping: What is added for training samples, if anything.
        """
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._shaping = shaping
        self.num_timeouts = 0
        """Training samples scored 0 because grading them took too long."""
        self.num_errors = 0
        """Training samples scored 0 because a reward function failed."""

    async def score(self, pending: PendingSample) -> None:
        """Fill in text and reward of a finished sample, unless it was begun again meanwhile.

        Raises:
            RewardError: A reward function failed.
        """
        sample, prompt = pending.sample, pending.prompt
        text = self._decode(sample.response_token_ids)
        num_tokens = len(sample.response_token_ids)
        response = _response(text, prompt, sample.finish_reason, num_tokens)
        score = await self._rewards.score(response)
        reward, timed_out = score.reward, score.timed_out
        components = {**score.components, **score.metrics}
        if self._shaping is not None:
            shaped = await self._shaping.apply(score, response, sample.response_token_ids)
            reward, timed_out = shaped.reward, timed_out or shaped.timed_out
            components |= shaped.terms
        self.num_timeouts += timed_out
        self.num_errors += score.failed
        sample.reward = reward
        sample.reward_components = components
        sample.answer_found = score.answer_found
        if pending.sample is sample:
            pending.response_text = response.text

    async def grade(
        self,
        response_token_ids: np.ndarray,
        prompt: Prompt,
        finish_reason: FinishReason = FinishReason.STOP,
    ) -> tuple[str, Score]:
        """The decoded response and its score, without the shaping of training.

        Args:
            response_token_ids: [R].
            prompt: What it answers.
            finish_reason: Why it ended, which reward functions may ask for.

        Raises:
            RewardError: A reward function failed.
        """
        text = self._decode(response_token_ids)
        num_tokens = len(response_token_ids)
        return text, await self.grade_text(text, prompt, finish_reason, num_tokens)

    async def grade_text(
        self,
        response_text: str,
        prompt: Prompt,
        finish_reason: FinishReason = FinishReason.STOP,
        num_tokens: int = 0,
    ) -> Score:
        """The score of a response that was decoded before, without the shaping of training.

        Args:
            response_text: The response, without special tokens.
            prompt: What it answers.
            finish_reason: Why it ended, which reward functions may ask for.
            num_tokens: How long it was, likewise.

        Raises:
            RewardError: A reward function failed.
        """
        return await self._rewards.score(
            _response(response_text, prompt, finish_reason, num_tokens)
        )

    def _decode(self, response_token_ids: np.ndarray) -> str:
        text: str = self._tokenizer.decode(
            response_token_ids.tolist(),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text


def _response(text: str, prompt: Prompt, finish_reason: FinishReason, num_tokens: int) -> Response:
    facts = SampleFacts(
        prompt_id=prompt.prompt_id,
        source=prompt.source,
        prompt=prompt.text,
        finish_reason=finish_reason.value,
        num_tokens=num_tokens,
    )
    return Response(text, prompt.answer, facts, prompt.row)
