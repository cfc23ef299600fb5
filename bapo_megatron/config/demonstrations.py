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
    tools_column: str = "tools"
    """Column with the JSON schemas of the conversation's tools."""
    weight_column: str = "weight"
    """Column with the weight of the row's tokens in the loss, at least 0; 1 in rows without it."""


class DemonstrationsConfig(Section):
    """Demonstrations (docs/demonstrations.md), to train on without engines, or beside RL.

    With ``algorithm.objective: nll`` they are all that is trained on; ``algorithm.demonstrations``
    mixes them into other updates.
    """

    train: tuple[DemonstrationSetConfig, ...] = ()
    """What to train on: one set after the other in each epoch, unless shuffled."""
    heldout: tuple[DemonstrationSetConfig, ...] = ()
    """Sets whose loss and perplexity are measured when ``eval`` is due."""
    sequences_per_step: int = Field(64, ge=1)
    """Demonstrations of a step without others."""
    epochs: float | None = Field(None, gt=0)
    """Passes over the sets, which decide ``train.steps``; null: ``train.steps`` decides."""
    max_tokens: int = Field(4096, ge=2)
    """Limit of a demonstration, prompt included."""
    truncation: Literal["drop", "truncate"] = "drop"
    """What becomes of longer ones: left out, or cut; counted either way."""
    train_tool_calls: bool = True
    """Train the tokens of tool calls; false: only the other tokens of the assistant."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""


class MixedDemonstrationsConfig(Section):
    """Demonstrations in the updates of reinforcement learning."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of their loss, the mean of −log π over their tokens in the update; 0: none."""
    share: float = Field(0.25, gt=0)
    """Demonstrations of a step, over ``rollout.groups_per_step``."""
