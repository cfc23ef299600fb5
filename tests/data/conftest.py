"""A byte tokenizer, and loading a data set with it."""

import pytest

from bapo_megatron.config.data import DataConfig, DatasetConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import load_set, log_warnings


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def load(tokenizer):
    """Loads a set with the given settings; prompts keep their questions."""

    def load_file(path, max_prompt_tokens=4096, **settings):
        data = DataConfig(max_prompt_tokens=max_prompt_tokens)
        loaded = load_set(DatasetConfig(path=path, **settings), ChatRenderer(tokenizer, data), data)
        log_warnings([loaded])
        return list(loaded.prompts)

    return load_file
