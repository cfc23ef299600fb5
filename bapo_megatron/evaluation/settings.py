"""The evaluation sets of a configuration, and the settings that samples were made with.

Settings are kept beside the samples: only an evaluation with the same ones may add to them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from bapo_megatron.config.evaluation import MAX_SAMPLES, EvalConfig, EvalSamplingConfig, eval_reward
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import MAX_INTEGER
from bapo_megatron.data.chat import ChatRenderer
from bapo_megatron.data.prompts import load_eval_set, log_warnings
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import atomic_write_text, parse_json, read_regular
from bapo_megatron.types import Prompt

MAX_NUMBER = 1e15
"""Limit of rewards and times in samples and results: sums of them stay finite."""

_NUM_CHUNKS = 64
_CHUNK_BYTES = 1 << 14


@dataclass(frozen=True)
class _Settings:
    """What readers of settings rely on; the rest is only compared."""

    num_prompts: Annotated[int, Field(ge=1)]
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int | None = None
    max_response_tokens: int = 0
    weights: str = ""
    name: str = ""
    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] = 0
    reward: dict[str, Any] = field(default_factory=dict)


class ResultsError(ValueError):
    """Results that cannot be used; one line with file, reason and remedy."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A named list of prompts, and how they are sampled."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: EvalSamplingConfig


def load_sets(
    config: EvalConfig, renderer: ChatRenderer, max_prompt_tokens: int, *, warns: bool = True
) -> tuple[EvalSet, ...]:
    """Read every set of ``eval.sets``; ``warns``: log what a user should know about them.

    Raises:
        DataError: A row cannot be used, or a prompt is too long.
        OSError: A file cannot be read.
    """
    sets = []
    for dataset in config.sets:
        sampling = config.sampling_of(dataset)
        loaded = load_eval_set(dataset, renderer, max_prompt_tokens)
        if warns:
            log_warnings([loaded])
        sets.append(EvalSet(dataset.label, loaded.prompts[: sampling.max_prompts], sampling))
    return tuple(sets)


def settings_of(eval_set: EvalSet, config: RunConfig, weights: str) -> dict[str, Any]:
    """Return everything that decides the samples of a set and their scores, as JSON values.

    ``weights`` names the weights, such as by the ``fingerprint`` of their files.
    """
    rollout = config.rollout
    return {
        "name": eval_set.name,
        "weights": weights,
        "prompts": prompts_digest(eval_set.prompts),
        "num_prompts": len(eval_set.prompts),
        **eval_set.sampling.model_dump(mode="json", exclude={"max_prompts"}),
        "reward": comparable_reward(eval_reward(config.reward, config.eval)),
        "seed": config.seed,
        "environment": rollout.environment if rollout.has_environment else None,
        "max_turns": rollout.episodes.max_turns if rollout.has_environment else None,
    }


def comparable_reward(reward: RewardConfig) -> dict[str, Any]:
    """Return the reward section, as JSON values, without what changes no score of an evaluation."""
    left_out = dict.fromkeys(("workers", "truncated", "overlong", "format", "repetition"), True)
    return reward.model_dump(mode="json", exclude={**left_out, "functions": {"__all__": {"http"}}})


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Hash ids, tokens, answers and rows: the data, the chat template and the tokenizer."""
    digest = hashlib.sha256()
    for prompt in prompts:
        entry: list[Any] = [prompt.prompt_id, list(prompt.token_ids), prompt.answer]
        if prompt.row:  # reward functions may read tests or a budget of tokens there
            entry.append(prompt.row)
        digest.update(json.dumps(entry, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def fingerprint(model_dir: Path) -> str:
    """Hash what tells models apart, of whatever size, in milliseconds.

    That is all of config.json and, of each weight file, its name, its size and 64 pieces of 16 KiB,
    spread evenly. Training changes nearly every number, so that two steps of a run differ.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            if size <= _NUM_CHUNKS * _CHUNK_BYTES:
                digest.update(stream.read())
                continue
            for number in range(_NUM_CHUNKS):
                stream.seek((size - _CHUNK_BYTES) * number // (_NUM_CHUNKS - 1))
                digest.update(stream.read(_CHUNK_BYTES))
    return digest.hexdigest()[:16]


def settings_path(path: Path) -> Path:
    """Return where the settings of a samples file are."""
    return path.with_suffix(".settings.json")


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a samples file beside it; OSError where that fails."""
    atomic_write_text(settings_path(path), json.dumps(settings, indent=2) + "\n")


def read_settings(path: Path) -> dict[str, Any]:
    """Read a settings file; ResultsError where it is missing or damaged."""
    remedy = "put it back, or change run_dir"
    try:
        content = read_regular(path)
        decode_json(_Settings, content)
        settings: dict[str, Any] = parse_json(content)
    except FileNotFoundError as error:
        raise ResultsError(
            f"{path}: is missing; what the samples beside it were made with is unknown; {remedy}"
        ) from error
    except ValueError as error:
        raise ResultsError(f"{path}: damaged ({error}); {remedy}") from error
    return settings


def check_same(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with the samples file ``path`` if other settings made it.

    Raises:
        ResultsError: A setting differs, or those of the file are missing.
    """
    before = read_settings(settings_path(path))
    titles = {"weights": "model", "prompts": "prompts (hash)"}
    for name, value in settings.items():
        if before.get(name) != value:
            then, now = (
                f"{titles.get(name, name)} {each if isinstance(each, str) else json.dumps(each)}"
                for each in (before.get(name), value)
            )
            raise ResultsError(
                f"{path}: its samples were made with {then}, now it would be {now}; resume with "
                "the same, or change run_dir"
            )
