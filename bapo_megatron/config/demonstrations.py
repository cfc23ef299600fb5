"""Configuration of demonstrations: responses that somebody else wrote, to imitate."""

from typing import Literal

from pydantic import Field

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.config.section import Section


class DemonstrationSetConfig(DatasetConfig):
    """One set of demonstrations: files, or a data set of the Hugging Face Hub."""

    messages_column: str = "messages"
    """Column with the whole conversation, whose assistant turns are imitated."""
    response_column: str = "response"
    """Column with the response to ``prompt_column``, where rows have no messages."""


class DemonstrationsConfig(Section):
    """Demonstrations (docs/demonstrations.md), to train on without engines, or beside RL.

    With ``algorithm.objective: nll`` the run trains on nothing else; ``algorithm.demonstrations``
    mixes them into other updates.
    """

    train: tuple[DemonstrationSetConfig, ...] = ()
    """What to train on: all rows once in each epoch, in an order of its own unless
    ``data.shuffle`` is false."""
    heldout: tuple[DemonstrationSetConfig, ...] = ()
    """Sets whose loss and perplexity are measured when ``eval`` is due."""
    sequences_per_step: int = Field(64, ge=1)
    """Demonstrations per step of a run that trains on them alone."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the sets, which decide ``train.steps``; null: ``train.steps`` decides."""
    max_tokens: int = Field(4096, ge=2)
    """Limit of a demonstration, prompt included."""
    truncation: Literal["drop", "truncate"] = "drop"
    """Whether longer ones are left out or cut; counted either way."""
    train_tool_calls: bool = True
    """Train the tokens of tool calls; false: only the other tokens of the assistant."""


class MixedDemonstrationsConfig(Section):
    """Demonstrations in the updates of reinforcement learning."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of their loss, the mean of −log π over their tokens in the update; 0: none."""
    share: float = Field(0.25, gt=0)
    """Demonstrations per step, as a fraction of ``rollout.groups_per_step``."""
