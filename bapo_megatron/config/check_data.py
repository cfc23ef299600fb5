"""Rules about prompts; see ``check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.config.check_rollout import refuse_twice
from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config.data import DataConfig, DatasetConfig
    from bapo_megatron.config.schema import RunConfig

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""File formats of prompts."""


def check_train_data(data: DataConfig, needed: str) -> None:
    """There are training sets; their files exist and their names differ.

    Args:
        data: The section.
        needed: When a training set is needed, for the message.
    """
    sets = data.train_sets
    if not sets:
        raise ConfigError(f"data.train: needed {needed}, got null; set data.train.path=FILE")
    for number, dataset in enumerate(sets):
        key = f"data.train[{number}]" if isinstance(data.train, tuple) else "data.train"
        check_dataset(dataset, key)
    refuse_twice("data.train", [dataset.label for dataset in sets])


def check_data(config: RunConfig) -> None:
    """Hold the rules of prompts alone, as ``data show`` needs them.

    Raises:
        ConfigError: The first rule that is broken.
    """
    check_rendering(config.data)
    if config.data.train is not None or not config.eval.sets:
        check_train_data(config.data, "without eval.sets")
    for number, dataset in enumerate(config.eval.sets):
        check_dataset(dataset, f"eval.sets[{number}]")


def check_rendering(data: DataConfig) -> None:
    """The chat template exists."""
    if data.chat_template is not None and not data.chat_template.is_file():
        raise ConfigError(
            f"data.chat_template: no such file '{data.chat_template}'; paths are relative to the "
            "current directory"
        )


def check_dataset(dataset: DatasetConfig, key: str) -> None:
    """The files of a set exist and are of a known format.

    Args:
        dataset: The set; one of the Hub is looked for when it is read.
        key: Its place in the configuration.
    """
    if dataset.path is None:
        return
    files = dataset.files()
    if not files:
        raise ConfigError(
            f"{key}.path: no file matches '{dataset.path}'; "
            "paths are relative to the current directory"
        )
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{key}.path: no such file '{file}'; paths are relative to the current directory"
            )
        if file.suffix not in DATA_SUFFIXES:
            raise ConfigError(
                f"{key}.path: must end in {', '.join(DATA_SUFFIXES)}, got '{file}'; "
                "convert the file"
            )
