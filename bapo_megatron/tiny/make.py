"""Make the tiny model and its data: deterministic, and complete or absent."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from bapo_megatron.runtime.files import atomic_directory, naming
from bapo_megatron.tiny.model import build_model, build_tokenizer, save_model
from bapo_megatron.tiny.task import Problem, SolutionMixture, split_problems
from bapo_megatron.tiny.warmup import WarmupSettings, warm_up

NUM_TRAIN, NUM_HELDOUT = 2048, 512
"""Prompts of train.jsonl and heldout.jsonl; the warm-up has the other problems."""

RECIPE_NAME = "tiny.json"
"""Says how a directory was made, and so marks it as one of ours."""


class TinyReport(NamedTuple):
    """What ``make_tiny`` made."""

    model_dir: Path
    """Hugging Face directory of the warmed-up model."""
    num_parameters: int
    warmup_s: float
    final_loss: float
    """Mean cross entropy in nats per response token at the end of the warm-up."""


def make_tiny(out_dir: Path, seed: int, settings: WarmupSettings | None = None) -> TinyReport:
    """Make a tiny model with a supervised warm-up, and its training and held-out prompts.

    On the same machine, the same seed and settings give the same bytes of weights and data,
    whatever torch's thread count. The complete result appears at once and replaces an earlier one.

    Args:
        out_dir: Gets model/, tiny.json, and the prompts of training and evaluation: train.jsonl and
            heldout.jsonl, JSON lines with "prompt" and "answer".
        seed: Determines the split of the problems, the initial weights and the warm-up.
        settings: How the warm-up is optimised; the demo's by default.

    Raises:
        ValueError: ``out_dir`` holds something else, which would be lost.
        OSError: ``out_dir`` cannot be written.
    """
    settings, mixture = settings or WarmupSettings(), SolutionMixture()
    out_dir = Path(os.path.realpath(out_dir))
    _refuse_foreign(out_dir)
    splits = split_problems(NUM_TRAIN, NUM_HELDOUT, seed)
    with naming(out_dir), atomic_directory(out_dir) as temporary_dir:
        # First, so that a directory that cannot be written costs no warm-up.
        _write_problems(temporary_dir / "train.jsonl", splits.train)
        _write_problems(temporary_dir / "heldout.jsonl", splits.heldout)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, seed)
        started_s = time.monotonic()
        final_loss = warm_up(model, tokenizer, splits.warmup, mixture, settings, seed)
        warmup_s = time.monotonic() - started_s
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        about = {
            "recipe": {
                "seed": seed,
                "num_train": NUM_TRAIN,
                "num_heldout": NUM_HELDOUT,
                "mixture": asdict(mixture),
                "warmup": asdict(settings),
            },
            "torch": torch.__version__,
            "result": {
                "num_parameters": num_parameters,
                "elapsed_s": warmup_s,
                "final_loss": final_loss,
            },
        }
        (temporary_dir / "model").mkdir()
        save_model(model, tokenizer, temporary_dir / "model")
        (temporary_dir / RECIPE_NAME).write_text(json.dumps(about, indent=2) + "\n")
    return TinyReport(out_dir / "model", num_parameters, warmup_s, final_loss)


def _refuse_foreign(out_dir: Path) -> None:
    if not os.path.lexists(out_dir):
        return
    if not out_dir.is_dir():
        raise ValueError(f"{out_dir}: not a directory; name another one")
    try:
        is_ours = "recipe" in json.loads((out_dir / RECIPE_NAME).read_text())
    except (OSError, ValueError, TypeError):
        is_ours = False
    if any(out_dir.iterdir()) and not is_ours:
        raise ValueError(
            f"{out_dir} is not empty and holds no {RECIPE_NAME} of an earlier make-tiny, so its "
            "content would be lost; name another directory or remove this one"
        )


def _write_problems(path: Path, problems: Iterable[Problem]) -> None:
    rows = ({"prompt": problem.prompt, "answer": problem.answer} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
