"""Two models have one vocabulary if every token has the same id."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.config.load import ConfigError
from bapo_megatron.data import vocabulary
from bapo_megatron.data.vocabulary import check_same_vocabulary

KEY = "algorithm.kl.reference.path"


def changed(source: Path, directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a tokenizer whose ``tokenizer.json`` is changed."""
    shutil.copytree(source, directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    change(content)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_a_copy_has_the_same_vocabulary_whatever_else_differs(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    def change(content: dict[str, Any]) -> None:
        content["post_processor"] = None
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = dict(reversed(vocabulary.items()))

    check_same_vocabulary(tokenizer_dir, changed(tokenizer_dir, tmp_path / "other", change), KEY)


def test_tokens_that_changed_places_are_named_though_their_number_is_equal(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]

    other = changed(tokenizer_dir, tmp_path / "other", swap)
    with pytest.raises(ConfigError) as caught:
        check_same_vocabulary(tokenizer_dir, other, KEY)
    ids = json.loads((tokenizer_dir / "tokenizer.json").read_text())["model"]["vocab"]
    assert str(caught.value) == (
        f"{KEY}: must have the policy's vocabulary, got id {ids['A']} for 'B' in '{other}', where "
        f"'{tokenizer_dir}' has id {ids['B']}; choose a model with the same tokenizer"
    )


@pytest.mark.parametrize("policy_has_it", [False, True])
def test_an_added_token_that_only_one_model_has_is_named(
    tokenizer_dir: Path, tmp_path: Path, policy_has_it: bool
) -> None:
    def add(content: dict[str, Any]) -> None:
        last = content["added_tokens"][-1]
        content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<tool>"})

    other = changed(tokenizer_dir, tmp_path / "other", add)
    pair = (other, tokenizer_dir) if policy_has_it else (tokenizer_dir, other)
    there = "got no such token for" if policy_has_it else r"got id 259 for"
    with pytest.raises(ConfigError, match=rf"^{KEY}: .*{there} '<tool>' in"):
        check_same_vocabulary(*pair, KEY)


def test_a_refusal_takes_no_longer_than_reading_the_vocabularies(
    monkeypatch: pytest.MonkeyPatch, tokenizer_dir: Path
) -> None:
    policy = {f"token {number}": number for number in range(12_000)}
    swapped = {**policy, "token 7": 8, "token 8": 7}
    both = iter([policy, swapped])
    monkeypatch.setattr(vocabulary, "_ids", lambda directory, key: next(both))
    began_s = time.process_time()  # waiting for a processor does not count
    with pytest.raises(ConfigError, match=r"got id 7 for 'token 8' in .* has id 8; choose"):
        check_same_vocabulary(tokenizer_dir, tokenizer_dir, KEY)
    assert time.process_time() - began_s < 3  # squared, it was 30 s, and over an hour for 150,000


def test_a_model_without_a_usable_tokenizer_is_refused(tokenizer_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=rf"^{KEY}: '{empty}' must have a tokenizer \(.*; save"):
        check_same_vocabulary(tokenizer_dir, empty, KEY)
    (empty / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^{KEY}: '{empty}' must have a tokenizer \(.*; save"):
        check_same_vocabulary(tokenizer_dir, empty, KEY)
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        check_same_vocabulary(empty, tokenizer_dir, KEY)
