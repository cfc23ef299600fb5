"""Configuration of prompts: where they come from and how they are rendered."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from bapo_megatron.config.section import LIST_TAG, SET_TAG, AbsolutePath, Section


def is_pattern(path: Path) -> bool:
    """Return whether a set's file name is a pattern for several files."""
    return not set("*?[").isdisjoint(path.name)


class DatasetConfig(Section):
    """One set of prompts: a file, several files, or a data set of the Hugging Face Hub."""

    path: AbsolutePath | None = None
    """A jsonl, json or parquet file; ``*``, ``?`` and ``[]`` in its name match several files."""
    hub: str = ""
    """Instead of ``path``: an id on the Hugging Face Hub, such as ``openai/gsm8k``."""
    subset: str = ""
    """The data set's subset on the Hub (``main`` of GSM8K), where it has several."""
    split: str = ""
    """The data set's split on the Hub: ``train``, ``test`` … or a slice, ``train[:1000]``."""
    row_format: Literal["auto", "columns", "verl", "gsm8k", "math"] = "auto"
    """Where question and answer are: ``verl`` (also Skywork-OR1 and DAPO-Math), ``gsm8k``,
    ``math``, ``columns`` (those below); ``auto`` recognises it from the first row's columns."""
    prompt_column: str | None = None
    """Column with the question: a string, or chat messages (a list of role/content). Either column
    implies ``row_format: columns``, whose defaults are ``prompt`` and ``answer``."""
    answer_column: str | None = None
    """Column with the reference answer; ``reward_model.ground_truth`` reaches into a struct."""
    row_columns: tuple[str, ...] | None = None
    """Other columns to pass to reward functions; null: all. They stay in memory."""
    name: str = ""
    """Name in metrics (``eval/<name>/…``, ``data/<name>/…``); if empty, the file's stem or the last
    part of the Hub's id."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if (self.path is None) == (not self.hub):
            raise ValueError(
                f"must have either path or hub, got {self.path or 'neither'}"
                f"{f' and {self.hub}' if self.hub else ''}; set one of them"
            )
        if bool(self.hub) != bool(self.split) or (self.subset and not self.hub):
            raise ValueError(
                f"needs split with hub, and takes split and subset only with hub, got hub: "
                f"'{self.hub}', split: '{self.split}', subset: '{self.subset}'; correct them"
            )
        if self.path is not None and is_pattern(self.path) and not self.name:
            raise ValueError(
                f"must have a name, since path = '{self.path}' matches several files; set name"
            )
        columns = self.prompt_column or self.answer_column
        if columns and self.row_format not in ("auto", "columns"):
            raise ValueError(
                f"row_format must be auto or columns with prompt_column or answer_column, got "
                f"{self.row_format}; leave out one or the other"
            )
        return self

    def files(self) -> list[Path]:
        """The files of ``path``, sorted by name; whether a single one exists is not checked."""
        if self.path is None:
            return []
        if is_pattern(self.path):
            return sorted(self.path.parent.glob(self.path.name))
        return [self.path]

    @property
    def label(self) -> str:
        """The set's name in metrics and messages."""
        if self.name:
            return self.name
        return self.hub.rpartition("/")[2] if self.path is None else self.path.stem


class TrainSetConfig(DatasetConfig):
    """One set of training prompts."""

    weight: float = Field(1.0, gt=0)
    """In a list of sets: its share of the drawn prompts is weight over sum of weights."""


def _kind_of(value: Any) -> str:
    return LIST_TAG if isinstance(value, list | tuple) else SET_TAG


TrainSets = Annotated[
    Annotated[TrainSetConfig, Tag(SET_TAG)]
    | Annotated[tuple[TrainSetConfig, ...], Tag(LIST_TAG), Field(min_length=1)],
    Discriminator(_kind_of),
]
"""One set, or a list of them."""


class DataConfig(Section):
    """Training prompts."""

    train: TrainSets | None = None
    """The training prompts, one set or a list of sets; needed unless ``replay`` is set."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Limit of a prompt; longer ones are left out and counted."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """When a training row cannot be used: end with its place and reason, or leave it out and count
    it. Evaluation sets are read whole, or not at all."""
    on_duplicate: Literal["keep", "drop"] = "keep"
    """When an earlier row of the training set has the same rendered prompt; counted either way."""
    system_prompt: str = ""
    """Put before the question as a system message, unless empty."""
    prompt_suffix: str = ""
    """Appended to the question ("Put your answer in \\boxed{}."), unless empty."""
    chat_template: AbsolutePath | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    chat_template_arguments: dict[str, Any] = Field({})
    """Values for the template's variables, such as ``enable_thinking: false``."""
    shuffle: bool = True
    """Shuffle each epoch of each set with the run's seed."""

    @property
    def train_sets(self) -> tuple[TrainSetConfig, ...]:
        """The training sets; none where ``train`` is null."""
        if isinstance(self.train, tuple):
            return self.train
        return () if self.train is None else (self.train,)
