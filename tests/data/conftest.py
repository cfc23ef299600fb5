"""A byte tokenizer, and loading a data set with it."""

from __future__ import annotations

import pytest

from bapo_megatron.config.data import DatasetConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import load_prompts


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def load(tokenizer):
    """Loads a set with the given settings; prompts keep their questions."""

    def load_file(path, max_prompt_tokens=4096, **settings):
        renderer = ChatRenderer(tokenizer)
        return load_prompts(DatasetConfig(path=path, **settings), renderer, max_prompt_tokens)

    return load_file
