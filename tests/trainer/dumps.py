"""Rollout dumps made from a model by transformers, so that training can be replayed anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.data.dump import write_batch
from bapo_megatron.data.packing import PackingRules, SequenceFlops
from bapo_megatron.trainer.split import SplitShape
from bapo_megatron.types import (
    FinishReason,
    Group,
    PromptTokens,
    RolloutBatch,
    Sample,
    VersionSpan,
    WrittenSpan,
)
from examples.tiny.model import build_tokenizer
from tests.policy.tiny_models import load_reference, make_model

ONE_RANK = SplitShape(PackingRules(data_size=1, max_tokens=4096, flops=SequenceFlops(1, 0)))
"""Everything on one rank, in micro-batches of 4,096 tokens."""

MANY_STEPS = 60
"""Steps of the fixture ``many_dumps``."""


def make_random_model(directory: Path, **changes: Any) -> Path:
    """Write a random Qwen2 of four layers with the tiny tokenizer; returns the directory."""
    tokenizer = build_tokenizer()
    settings = {
        "num_hidden_layers": 4,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    make_model("qwen2", directory, **settings | changes)
    tokenizer.save_pretrained(directory)
    return directory


def replay_settings(model_dir: Path, dumps: Path, run_dir: Path) -> dict[str, Any]:
    """A configuration: five steps of two updates in float32 from ``dumps``."""
    return {
        "name": "replay",
        "run_dir": str(run_dir),
        "replay": str(dumps),
        "model": {"path": str(model_dir), "dtype": "float32"},
        "algorithm": {"updates_per_batch": 2, "bapo": {"target": 0.38}},
        "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_updates": 2},
        "train": {"steps": 5, "max_tokens_per_micro_batch": 128},
        "log": {"tensorboard": False},
    }


def write_dumps(
    directory: Path,
    model_dir: Path,
    *,
    steps: int,
    groups: int = 4,
    samples_per_group: int = 4,
    noise: float = 0.1,
    episodes: bool = False,
    branches: bool = False,
    top_k: int = 0,
) -> Path:
    """Random prompts and responses with log-probs of ``model_dir`` plus noise.

    Half of the samples of every group are right.
    ``episodes``: all but the first response of a group have two or three turns.
    ``branches``: response i of a group is an episode of 1 + i % 4 sequences.
    ``top_k``: likeliest tokens of a sampler whose logits have noise of 0.5.
    """
    model = load_reference("qwen2", model_dir).eval()
    rng = np.random.default_rng(7)
    vocab = model.config.vocab_size
    for step in range(steps):
        step_groups = []
        for number in range(groups):
            group_id = step * groups + number
            prompt = PromptTokens(f"made:{group_id}", rng.integers(3, vocab, 6).astype(np.int32))
            samples = []
            for index in range(samples_per_group):
                length = int(rng.integers(3, 20)) + 6 * index
                response = rng.integers(3, vocab, length)
                mu = _logprobs(model, prompt.token_ids, response) + rng.normal(0, noise, length)
                sample = Sample(
                    group_id=group_id,
                    index=index,
                    prompt=prompt,
                    response_token_ids=response.astype(np.int32),
                    behaviour_logprobs=mu.astype(np.float32),
                    versions=(VersionSpan(step, length),),
                    finish_reason=FinishReason.STOP,
                    reward=float(2 * index < samples_per_group),
                    answer_found=True,
                )
                samples.append(_as_episode(sample) if episodes else sample)
                if top_k:
                    sample.columns = _likeliest(model, sample, top_k)
                for _ in range(index % 4 if branches else 0):
                    _add_branch(sample, model, rng, noise)
            step_groups.append(Group(group_id, tuple(samples)))
        batch = RolloutBatch(step=step + 1, version=step, groups=tuple(step_groups))
        write_batch(directory / f"step_{batch.step:06d}.parquet", batch)
    return directory


def _as_episode(sample: Sample) -> Sample:
    """The same tokens, of which an environment wrote some: never in the first of a group."""
    length = len(sample.response_token_ids)
    if sample.index == 0:
        return sample
    if sample.index == 1:
        sample.written = (WrittenSpan(length // 3, length // 3),)
    else:
        sample.written = (WrittenSpan(2, length // 8), WrittenSpan(length // 2, length // 8))
    sample.behaviour_logprobs = sample.behaviour_logprobs[sample.loss_mask]
    sample.versions = (VersionSpan(sample.versions[0].version, sample.num_sampled),)
    return sample


def _add_branch(
    sample: Sample, model: torch.nn.Module, rng: np.random.Generator, noise: float
) -> None:
    """One more sequence, which forks from the latest; the third has a prompt rendered anew."""
    number, latest = 1 + len(sample.branches), sample.sequences[-1]
    length = int(rng.integers(3, 9))
    kept = latest.response_token_ids[: len(latest.response_token_ids) // 2]
    prompt = np.concatenate([latest.prompt.token_ids, kept])
    response = rng.integers(3, model.config.vocab_size, length)
    if number == 3:
        prompt = rng.integers(3, model.config.vocab_size, 5).astype(np.int32)
    mu = _logprobs(model, prompt, response) + rng.normal(0, noise, length)
    branch = Sample(
        group_id=sample.group_id,
        index=sample.index,
        prompt=PromptTokens(sample.prompt.prompt_id, prompt),
        response_token_ids=response.astype(np.int32),
        behaviour_logprobs=np.delete(mu, 1).astype(np.float32),
        versions=(VersionSpan(sample.versions[0].version, length - 1),),
        finish_reason=FinishReason.STOP,
        written=(WrittenSpan(1, 1),),
        number=number,
    )
    sample.branches += (branch,)


def _likeliest(model: torch.nn.Module, sample: Sample, top_k: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((sample.group_id, sample.index))
    log_p = _distributions(model, sample.prompt.token_ids, sample.response_token_ids)
    moved = log_p + torch.from_numpy(rng.normal(0, 0.5, log_p.shape)).float()
    top = moved.log_softmax(-1)[torch.from_numpy(sample.loss_mask)].topk(top_k)
    return {
        "sampler_top_ids": top.indices.numpy().astype(np.int32),
        "sampler_top_logprobs": top.values.numpy(),
    }


def _logprobs(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    log_p = _distributions(model, prompt, response)
    return log_p.gather(1, torch.tensor(response.tolist())[:, None])[:, 0].numpy()


def _distributions(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray) -> Tensor:
    """[response, V] log-probs before each token of the response."""
    ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
