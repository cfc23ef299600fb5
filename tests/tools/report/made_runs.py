"""Run directories for the tests of the page, with texts that attack it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bapo_megatron.data.dump import write_batch, write_texts
from bapo_megatron.data.staleness import spans_of
from bapo_megatron.data.token_dump import token_dump_path, write_token_dump
from bapo_megatron.types import Group, PromptTokens, RolloutBatch, SampleText
from tests.data.samples import make_sample

ESCAPES = "\x1b]0;attacked\x07\x1b[2J\x9b31m\u202e"
"""What would rename, clear, colour and reverse a terminal."""
SCRIPT = (
    "</script><script>document.title='attacked'</script><img src=x onerror=document.title=1>"
    + ESCAPES
)
SECRET = "sk-not-for-others"
WORDS = [SCRIPT, " 1", " 2", "=", " answer", " is", " 3", "."]
"""The tokenizer's vocabulary; the first token is markup."""
RATIOS = [1.0, 2.0, 0.5, 1.25]
"""π/μ of the first response in the token dump."""


def make_run(
    path: Path,
    *,
    seed: int = 0,
    steps: int = 6,
    rewards: tuple[float, ...] = (0.0, 1.0),
    changes: dict[str, Any] | None = None,
    columns: dict[str, list[float]] | None = None,
    metrics: Callable[[int], dict[str, float]] = lambda step: {},
) -> Path:
    """Write a run with an evaluation at both ends, one dump of rollouts and one of tokens.

    ``columns`` are token columns of each group's first response; ``metrics`` has more values of the
    row of a step.
    """
    path.mkdir(parents=True)
    config = {
        "name": "made",
        "run_dir": str(path),
        "seed": seed,
        "model": {"path": str(path / "model")},
        "data": {"train": {"path": f"{path}/sums.jsonl"}},
        "rollout": {"groups_per_step": 2, "samples_per_group": 2, "max_response_tokens": 8},
        "reward": {"functions": [{"name": "math", "function": "math", "url": None}]},
        "algorithm": {"objective": "bapo", "advantage": "grpo", "updates_per_batch": 1},
        "optimizer": {"lr": 1e-4},
        "train": {"steps": steps},
        **(changes or {}),
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [_evaluation(0, 0.25)]
    rows += [_row(step, rewards, seed) | metrics(step) for step in range(1, steps + 1)]
    rows[-1] |= _evaluation(steps, 0.75)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "model").mkdir()
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    Tokenizer(WordLevel(vocabulary, unk_token=WORDS[0])).save(str(path / "model/tokenizer.json"))
    _write_rollouts(path, rewards, columns or {})
    return path


def _row(step: int, rewards: tuple[float, ...], seed: int) -> dict[str, float]:
    row = {
        "step": step,
        "reward/mean": float(np.mean(rewards)) + 0.1 * seed,
        "policy/entropy": 1.0 / step,
        "policy/grad_norm_max": 1.0,
        "train/updates": 1.0,
        "weight_sync/syncs": 1.0,
        "time/rollout_s": 2.0,
        "time/training_s": 6.0,
    }
    return row if step == 1 else {**row, "time/checkpoint_s": 0.0}


def _evaluation(step: int, score: float) -> dict[str, float]:
    start = "eval/heldout/avg_at_k"
    return {"step": step, start: score, f"{start}_low": score - 0.05, f"{start}_high": score + 0.05}


def _write_rollouts(
    path: Path, rewards: tuple[float, ...], columns: dict[str, list[float]]
) -> None:
    groups, texts = [], []
    for group_id in range(2):
        prompt = PromptTokens(
            f"sums.jsonl:{group_id}{SCRIPT}", np.array([1, 2], np.int32), f"sums{SCRIPT}"
        )
        samples = []
        for index, reward in enumerate(rewards):
            sample = make_sample(2, 4, group_id, index)
            sample.prompt = prompt
            sample.response_token_ids = np.array([0, 4, 5, 6 - index], np.int32)
            logprobs = -np.arange(1, 5, dtype=np.float32) / (1 + group_id + 2 * index)
            sample.behaviour_logprobs = logprobs
            sample.versions = spans_of(np.array([1, 1, 2, 3]))
            sample.reward, sample.answer_found = reward, True
            sample.reward_components = {f"math{SCRIPT}": reward}
            samples.append(sample)
            texts.append(
                SampleText(
                    *(group_id, index, f"What is 1+2? {SCRIPT}", "3", f"{SCRIPT} answer is 3"),
                    extracted=f"3{SCRIPT}",
                    reason=f"equal_text{SCRIPT}",
                )
            )
        groups.append(Group(group_id, tuple(samples)))
    for group in groups:
        group.samples[0].columns = {n: np.array(v, np.float32) for n, v in columns.items()}
    batch = RolloutBatch(step=1, version=4, groups=tuple(groups))
    dump = path / "rollouts/step_000001.parquet"
    write_batch(dump, batch)
    write_texts(dump, 1, texts)
    first = groups[0].samples[0]
    token_dump = {
        "group_id": np.zeros(4, np.int64),
        "index": np.zeros(4, np.int64),
        "position": np.arange(4, dtype=np.int32),
        "logprob": first.behaviour_logprobs + np.log(np.array(RATIOS, np.float32)),
        "behaviour_logprob": first.behaviour_logprobs,
        "advantage": np.full(4, -1, np.float32),
        "entropy": np.ones(4, np.float32),
        "mask": np.ones(4, np.float32),
    }
    # Another response's tokens come next, with the same log-probs.
    both = {name: np.concatenate([column, column]) for name, column in token_dump.items()}
    both["index"][4:] = 1
    both["logprob"][4:] = both["behaviour_logprob"][4:]
    write_token_dump(token_dump_path(path, 1, 0), both)
