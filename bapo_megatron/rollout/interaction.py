"""Between two turns of the policy: what ended a turn is answered by the environment."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from bapo_megatron.environment.base import EnvironmentFailedError, Task, Turn
from bapo_megatron.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.rollout import EpisodesConfig
    from bapo_megatron.data.chat import ChatRenderer
    from bapo_megatron.environment.base import Environment, Step
    from bapo_megatron.rollout.buffer import PendingSample

_LOG = logging.getLogger(__name__)


class Interaction:
    """Begins episodes and answers turns, within the limits of ``rollout.episodes``."""

    def __init__(
        self, environment: Environment, renderer: ChatRenderer, config: EpisodesConfig
    ) -> None:
        """Put the parts together.

        Args:
            environment: Its owner closes it.
            renderer: Makes tokens of an environment's messages, and text of the policy's tokens.
            config: The limits.
        """
        self._environment = environment
        self._renderer = renderer
        self._config = config
        self.errors: Counter[str] = Counter()
        """Episodes that ended because the environment failed, by kind."""

    async def go_on(self, pending: PendingSample, *, seed: int, max_response_tokens: int) -> None:
        """Begin an episode, or answer the turn that has ended.

        The sample changes only once the answer is there.

        Args:
            pending: Has not begun, or awaits an answer.
            seed: The episode's, the same after every resume.
            max_response_tokens: Longest response, what the environment writes included.

        Raises:
            EnvironmentFailedError: The environment failed, with ``on_error: raise``.
        """
        try:
            if not pending.has_begun:
                pending.state = await self._environment.start(_task(pending, seed))
                pending.has_begun = True
            else:
                await self._answer(pending, max_response_tokens)
        except EnvironmentFailedError as error:
            if self._config.on_error == "raise":
                raise
            if not self.errors[error.kind]:
                _LOG.warning("%s; the episode ends and is counted, as later ones are", error)
            self.errors[error.kind] += 1
            pending.finish(FinishReason.ENVIRONMENT)

    async def _answer(self, pending: PendingSample, max_response_tokens: int) -> None:
        pending.settle()
        sample = pending.sample
        remaining = max_response_tokens - pending.num_tokens

        def turn() -> Turn:
            token_ids = sample.segments()[-1].tolist()
            return Turn(
                number=sample.num_turns - 1,
                text=self._renderer.decode(token_ids, skips_special=True),
                token_ids=tuple(token_ids),
                remaining_tokens=remaining,
                prompt_id=pending.prompt.prompt_id,
            )

        step = await self._environment.step(pending.state, turn)
        token_ids = () if step.is_done else self._token_ids(step, pending)
        pending.state = step.state
        if step.is_done:
            pending.finish(FinishReason.STOP)
        elif sample.num_turns >= self._config.max_turns:
            pending.finish(FinishReason.TURNS)
        elif len(token_ids) >= remaining:
            pending.finish(FinishReason.LENGTH)
        else:
            pending.write(token_ids)

    def _token_ids(self, step: Step, pending: PendingSample) -> Sequence[int]:
        """What the environment writes.

        Raises:
            EnvironmentFailedError: A token is not the tokenizer's, or the chat template refuses the
                messages.
        """
        turn = pending.sample.num_turns - 1
        where = f"rollout.environment: its answer to turn {turn} of {pending.prompt.prompt_id}"
        if not step.messages:
            size = self._renderer.vocab_size
            unknown = [token for token in step.token_ids if not 0 <= token < size]
            if unknown:
                raise EnvironmentFailedError(
                    f"{where} must have tokens from 0 to {size - 1}, got {unknown[0]}; use the "
                    "model's own tokenizer, or set rollout.episodes.on_error=zero",
                    "tokens",
                )
            return step.token_ids
        try:
            return self._renderer.continuation(step.messages)
        except ValueError as error:
            raise EnvironmentFailedError(
                f"{where} {error}; correct its messages, give token_ids, or set "
                "rollout.episodes.on_error=zero",
                "tokens",
            ) from error


def _task(pending: PendingSample, seed: int) -> Task:
    prompt = pending.prompt
    return Task(
        prompt_id=prompt.prompt_id,
        source=prompt.source,
        prompt=prompt.text,
        answer=prompt.answer,
        row=prompt.row,
        seed=seed,
    )
