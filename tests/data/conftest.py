"""A byte tokenizer, and loading a data set with it."""

import pytest

from bapo_megatron.config.data import DataConfig, DatasetConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import load_set


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def load(tokenizer):
    """Loads a file by rules of the ``data`` section."""

    def load_file(path, max_prompt_tokens=4096, **rules):
        data = DataConfig(max_prompt_tokens=max_prompt_tokens, **rules)
        return load_set(DatasetConfig(path=path), ChatRenderer(tokenizer, data), data)

    return load_file
