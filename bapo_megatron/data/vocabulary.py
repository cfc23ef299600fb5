"""Checks that two models share a vocabulary: their log-probs are compared by token id."""

from pathlib import Path

from bapo_megatron.config.load import ConfigError
from bapo_megatron.data.chat import load_tokenizer
from bapo_megatron.runtime.names import shown

_FILE = "tokenizer.json"


def check_same_vocabulary(policy_dir: Path, other_dir: Path, key: str) -> None:
    """Check that two tokenizers give every token the same id; padding of embeddings may differ.

    Takes half a second for 150,000 tokens, or several seconds without a ``tokenizer.json``.

    Raises:
        ConfigError: A token differs, or a tokenizer cannot be read; ``key`` names ``other_dir``.
    """
    policy, other = _ids(policy_dir, "model.path"), _ids(other_dir, key)
    if policy == other:
        return
    either = policy | other
    token = min((t for t in either if policy.get(t) != other.get(t)), key=either.__getitem__)
    other_id, policy_id = (
        "no such token" if ids.get(token) is None else f"id {ids[token]}" for ids in (other, policy)
    )
    raise ConfigError(
        f"{key}: must have the policy's vocabulary, got {other_id} for {token!r} in '{other_dir}', "
        f"where '{policy_dir}' has {policy_id}; choose a model with the same tokenizer"
    )


def _ids(directory: Path, key: str) -> dict[str, int]:
    """Return the id of each token, added ones included."""
    from tokenizers import Tokenizer

    try:
        if not (directory / _FILE).is_file():
            vocabulary: dict[str, int] = load_tokenizer(directory).get_vocab()
            return vocabulary
        return Tokenizer.from_file(str(directory / _FILE)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(
            f"{key}: '{directory}' must have a tokenizer ({shown(error)}); save the model's there"
        ) from error
