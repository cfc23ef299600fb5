"""Make the tiny model and its data: deterministic, and complete or absent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from bapo_megatron.files import atomic_directory
from bapo_megatron.tiny.model import TinyQwen2, build_tokenizer, save_model, tiny_config
from bapo_megatron.tiny.task import SolutionMixture, split_problems
from bapo_megatron.tiny.warmup import WarmupSettings, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bapo_megatron.tiny.task import Problem

RECIPE_NAME = "tiny.json"
"""Says how a directory was made; its presence marks the directory as one of ours."""

FORMAT_VERSION = 1
"""Raised whenever the same settings would give another result."""


@dataclass(frozen=True, slots=True)
class TinySettings:
    """Everything but the seed that decides the result."""

    num_train: int = 2048
    """Prompts of train.jsonl."""
    num_heldout: int = 512
    """Prompts of heldout.jsonl."""
    mixture: SolutionMixture = field(default_factory=SolutionMixture)
    """How the solutions of the warm-up are written."""
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    """How the warm-up is optimised."""


@dataclass(frozen=True, slots=True)
class TinyReport:
    """What ``make_tiny`` made."""

    model_dir: Path
    """Hugging Face directory of the warmed-up model."""
    train_file: Path
    """JSON lines with "prompt" and "answer", for reinforcement learning."""
    heldout_file: Path
    """The same for evaluation; no prompt of training or warm-up is in it."""
    num_parameters: int
    """Parameters of the model."""
    warmup_s: float
    """Seconds of the supervised warm-up."""
    final_loss: float
    """Mean cross entropy in nats per response token at the end of the warm-up."""
    reused: bool
    """Whether an earlier result with the same seed and settings was kept."""


def make_tiny(
    out_dir: Path,
    seed: int,
    *,
    settings: TinySettings | None = None,
    reuse: bool = False,
    console: Console | None = None,
) -> TinyReport:
    """Make a tiny model with a supervised warm-up, and its training and held-out prompts.

    The same seed and settings give the same bytes of weights and data on the same machine,
    whatever torch's thread count outside. The result appears under ``out_dir`` at once when it is
    complete and replaces an earlier one.

    Args:
        out_dir: Gets model/, train.jsonl, heldout.jsonl and tiny.json.
        seed: Decides the split of the problems, the initial weights and the warm-up.
        settings: Sizes and optimisation; the demo's by default.
        reuse: Keep a complete earlier result with the same seed and settings.
        console: Where progress is shown; standard error by default.

    Raises:
        ValueError: ``out_dir`` holds something that this function did not make.
        OSError: ``out_dir`` cannot be written.
    """
    settings = settings or TinySettings()
    out_dir = out_dir.resolve()
    recipe = {"format_version": FORMAT_VERSION, "seed": seed} | asdict(settings)
    earlier = _read_earlier(out_dir)
    if reuse and earlier is not None and earlier["recipe"] == recipe:
        return _report(out_dir, earlier["result"], reused=True)
    splits = split_problems(settings.num_train, settings.num_heldout, seed)
    tokenizer = build_tokenizer()
    model = TinyQwen2(tiny_config(tokenizer), seed)
    warmup = warm_up(
        model,
        tokenizer,
        splits.warmup,
        settings.mixture,
        settings.warmup,
        seed,
        console or Console(stderr=True),
    )
    result = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "warmup_s": warmup.elapsed_s,
        "final_loss": warmup.final_loss,
    }
    with atomic_directory(out_dir) as temporary_dir:
        (temporary_dir / "model").mkdir()
        save_model(model, tokenizer, temporary_dir / "model")
        _write_problems(temporary_dir / "train.jsonl", splits.train)
        _write_problems(temporary_dir / "heldout.jsonl", splits.heldout)
        about = {"recipe": recipe, "torch": torch.__version__, "result": result}
        (temporary_dir / RECIPE_NAME).write_text(json.dumps(about, indent=2) + "\n")
    return _report(out_dir, result, reused=False)


def _read_earlier(out_dir: Path) -> dict[str, Any] | None:
    """Return what an earlier call recorded, or None where nothing is.

    Raises:
        ValueError: There is something else, which would be lost.
    """
    if not out_dir.exists():
        return None
    if not out_dir.is_dir():
        raise ValueError(f"{out_dir} is a file; name a directory")
    if not any(out_dir.iterdir()):
        return None
    try:
        earlier = json.loads((out_dir / RECIPE_NAME).read_text(encoding="utf-8"))
        if {"recipe", "result"} <= earlier.keys():
            return dict(earlier)
    except (OSError, ValueError, AttributeError):
        pass
    raise ValueError(
        f"{out_dir} is not empty and holds no {RECIPE_NAME} of an earlier make-tiny, so its "
        "content would be lost; name another directory or remove this one"
    )


def _report(out_dir: Path, result: dict[str, Any], *, reused: bool) -> TinyReport:
    return TinyReport(
        model_dir=out_dir / "model",
        train_file=out_dir / "train.jsonl",
        heldout_file=out_dir / "heldout.jsonl",
        reused=reused,
        **result,
    )


def _write_problems(path: Path, problems: Iterable[Problem]) -> None:
    """Write one JSON object with "prompt" and "answer" per line."""
    lines = [
        json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
