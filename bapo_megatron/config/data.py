"""Configuration of prompts: where they come from and how they are rendered."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from bapo_megatron.config.section import LIST_TAG, SET_TAG, AbsolutePath, Section


def is_pattern(path: Path) -> bool:
    """Return whether a set's file name is a pattern for several files."""
    return not set("*?[").isdisjoint(path.name)


UNSCORED_TASKS = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Tasks of reasoning-gym that have no reference answer, and score the one they give 0."""


class GymTaskConfig(Section):
    """A task of reasoning-gym, which generates problems."""

    name: str
    """As reasoning-gym registers it, such as ``chain_sum``."""
    weight: float = Field(1.0, gt=0)
    """Its fraction of the set's problems is weight over sum of weights."""
    options: dict[str, Any] = Field({})
    """Fields of the task's own configuration, such as ``max_terms``; not ``seed`` and ``size``."""

    @model_validator(mode="after")
    def _can_be_trained_on(self) -> Self:
        if self.name in UNSCORED_TASKS:
            raise ValueError(
                f"name must be a task with reference answers, got '{self.name}', which scores its "
                f"own answer 0, as do {', '.join(UNSCORED_TASKS)}; leave it out"
            )
        if self.name == "composite":
            raise ValueError("name must be a single task, got 'composite'; list its parts")
        for option in ("seed", "size"):
            if option in self.options:
                raise ValueError(
                    f"options must not hold {option}, which is the set's; set {option} beside gym"
                )
        return self


class DatasetConfig(Section):
    """One set of prompts: files, a data set of the Hugging Face Hub, or generated problems."""

    path: AbsolutePath | None = None
    """A jsonl, json or parquet file; ``*``, ``?`` and ``[]`` in its name match several files."""
    hub: str = ""
    """Instead of ``path``: an id on the Hugging Face Hub, such as ``openai/gsm8k``."""
    subset: str = ""
    """The data set's subset on the Hub (``main`` of GSM8K), where it has several."""
    split: str = ""
    """The data set's split on the Hub: ``train``, ``test`` … or a slice, ``train[:1000]``."""
    gym: tuple[GymTaskConfig, ...] = ()
    """Instead of ``path``: tasks of reasoning-gym, whose problems are generated at the start and
    scored by the reward function ``gym``."""
    size: int | None = Field(None, ge=1, le=100_000)
    """Number of problems of ``gym``."""
    seed: int = Field(0, ge=0, lt=4096)
    """Seed of the problems of ``gym``. Whatever it is, training sets and evaluation sets have no
    problem in common."""
    row_format: Literal["auto", "columns", "verl", "gsm8k", "math"] = "auto"
    """Where question and answer are: ``verl`` (also Skywork-OR1 and DAPO-Math), ``gsm8k``,
    ``math``, ``columns`` (those below); ``auto`` recognises it from the first row's columns."""
    prompt_column: str | None = None
    """Column with the question: a string, or chat messages (a list of role/content). Either column
    implies ``row_format: columns``, whose defaults are ``prompt`` and ``answer``."""
    answer_column: str | None = None
    """Column with the reference answer; ``reward_model.ground_truth`` reaches into a struct."""
    row_columns: tuple[str, ...] | None = None
    """Other columns to pass to reward functions; null: all. They stay in memory. The model need not
    see a column that is named here, such as ``context``."""
    name: str = ""
    """Name in metrics (``eval/<name>/…``, ``data/<name>/…``); if empty, the file's stem, the last
    part of the Hub's id, or ``gym``."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        places = {"path": self.path, "hub": self.hub, "gym": self.gym}
        if len(named := [name for name, place in places.items() if place]) != 1:
            raise ValueError(
                f"must have either path, hub or gym, got {' and '.join(named) or 'none'}; set one "
                "of them"
            )
        if bool(self.gym) != (self.size is not None) or (self.seed and not self.gym):
            raise ValueError(
                f"needs size with gym, and takes size and seed only with gym, got size: "
                f"{self.size}, seed: {self.seed}; correct them"
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
        if self.gym and (columns or self.row_columns is not None or self.row_format != "auto"):
            raise ValueError(
                "takes row_format, prompt_column, answer_column and row_columns only with path or "
                "hub, got one of them with gym; leave it out"
            )
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
        if self.path is not None:
            return self.path.stem
        return self.hub.rpartition("/")[2] or "gym"


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


class SourceConfig(Section):
    """Where ``fetch`` gets a model or a file that another key names."""

    path: AbsolutePath
    """The directory or file, as the other key names it."""
    repo: str = Field("", pattern=r"^([\w.-]+/[\w.-]+)?$")
    """Repository on the Hugging Face Hub, ``owner/name``: a model's, or with ``file`` a data
    set's."""
    revision: str = Field("main", min_length=1)
    """Branch, tag or commit of ``repo``; only the 40 digits of a commit always mean the same."""
    file: str = ""
    """The file of the data set; empty: all files of a model, at the top level."""
    url: str = Field("", pattern=r"^(https?://\S+)?$")
    """Instead of ``repo``: the address of a single file."""
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """Checksum of ``url``; the Hub lists those of ``repo``."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if bool(self.repo) == bool(self.url) or bool(self.url) != bool(self.sha256):
            raise ValueError(
                f"must have either repo, or url and sha256, got repo: '{self.repo}', url: "
                f"'{self.url}', sha256: '{self.sha256}'; correct them"
            )
        if self.url and (self.file or self.revision != "main"):
            raise ValueError(
                f"takes file and revision only with repo, got url: '{self.url}'; leave them out"
            )
        return self


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
