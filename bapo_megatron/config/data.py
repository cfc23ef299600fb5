"""Configuration of prompt files."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from bapo_megatron.config.section import Section


class DatasetConfig(Section):
    """One file of prompts."""

    path: Path
    """jsonl, json or parquet."""
    prompt_column: str = "prompt"
    """Column with the question: a string, or chat messages (a list of role/content)."""
    answer_column: str = "answer"
    """Column with the reference answer; ``reward_model.ground_truth`` reaches into a struct."""
    name: str = ""
    """Name in metrics (``eval/<name>/…``); the file's stem if empty."""

    @property
    def label(self) -> str:
        """The set's name in metrics and messages."""
        return self.name or self.path.stem


class DataConfig(Section):
    """Training prompts."""

    train: DatasetConfig | None = None
    """The training file; needed unless ``replay`` is set."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are left out and counted."""
    system_prompt: str = ""
    """Put before the question as a system message, unless empty."""
    prompt_suffix: str = ""
    """Appended to the question ("Put your answer in \\boxed{}."), unless empty."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""
