"""A base configuration whose files exist, and sweeps of it."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.reward.own_functions import EVEN_LENGTH
from tests.trainer.dumps import make_random_model

VARIANTS = {"grpo": ["algorithm.objective=clip"], "bapo": ["algorithm.objective=bapo"]}


def write_base(directory: Path) -> Path:
    """A run of three small steps on the local engine; the model and the data are there."""
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(9) for b in range(9)]
    for name, part in (("train", rows[:60]), ("heldout", rows[60:70])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))
    settings = {
        "name": "base",
        "run_dir": str(directory / "unused"),
        "model": {"path": str(make_random_model(directory / "model")), "dtype": "float32"},
        "data": {"train": {"path": str(directory / "train.jsonl")}, "max_prompt_tokens": 32},
        "rollout": {
            "engine": "local",
            "groups_per_step": 2,
            "samples_per_group": 4,
            "max_response_tokens": 8,
        },
        "algorithm": {"updates_per_batch": 1},
        "reward": {"functions": [EVEN_LENGTH], "workers": 1},
        "train": {"steps": 3, "max_tokens_per_micro_batch": 512},
        "checkpoint": {"at_end": False},
        "eval": {
            "sets": [{"path": str(directory / "heldout.jsonl"), "name": "sums"}],
            "max_response_tokens": 8,
            "at_start": False,
            "bootstrap_resamples": 100,
        },
        "log": {"tensorboard": False},
    }
    path = directory / "base.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def write_sweep(directory: Path, base: Path, **changes: Any) -> Path:
    """GRPO and BAPO by two seeds, two runs at a time, unless ``changes`` say otherwise."""
    sweep = {
        "config": str(base),
        "dir": str(directory / "sweep"),
        "variants": VARIANTS,
        "seeds": [0, 1],
        "jobs": 2,
        **changes,
    }
    settings = {key: value for key, value in sweep.items() if value is not None}
    path = directory / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path
