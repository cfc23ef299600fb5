"""Rules about prompt files; see ``check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config.data import DatasetConfig

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""File formats of prompts."""


def check_dataset(dataset: DatasetConfig, key: str) -> None:
    """The file of one data set, under ``key``, is there and of a known format."""
    if not dataset.path.is_file():
        raise ConfigError(
            f"{key}.path: no such file '{dataset.path}'; "
            "paths are relative to the current directory"
        )
    if dataset.path.suffix not in DATA_SUFFIXES:
        raise ConfigError(
            f"{key}.path: must end in {', '.join(DATA_SUFFIXES)}, got '{dataset.path}'; "
            "convert the file"
        )
