"""The ``grade`` command."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bapo_megatron.config.reward import RewardConfig

CLOSED_PIPE = 141
"""Exit status when whoever read the output has ended, as after SIGPIPE."""


def grade(
    file: Annotated[
        Path, typer.Argument(help="JSON lines with response and answer; - is standard input.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of a run, for its reward section; default: math answers."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: reward.workers=8"),
    ] = None,
) -> None:
    """Score the responses in FILE by the code that trains: a JSON line per line, in order."""
    rewards = _reward_config(config, overrides or [])
    from bapo_megatron.data.schemas import parse_answer
    from bapo_megatron.reward.grade_file import grade_file
    from bapo_megatron.telemetry.progress import ProgressLine

    # Results on the same terminal would be in its way.
    shows_progress = sys.stderr.isatty() and not sys.stdout.isatty()
    try:
        with ProgressLine() if shows_progress else nullcontext() as progress:

            def report(num_graded: int) -> None:
                if progress is not None:
                    progress.update(f"{num_graded} responses graded")

            grade_file(
                file,
                rewards,
                parse_answer=parse_answer,
                output=sys.stdout.fileno(),
                report=report,
            )
    except BrokenPipeError:
        raise typer.Exit(CLOSED_PIPE) from None


def _reward_config(config: Path | None, overrides: list[str]) -> RewardConfig:
    from bapo_megatron.config.check_reward import check_rewards
    from bapo_megatron.config.load import ConfigError, load_config
    from bapo_megatron.config.reward import RewardConfig

    if config is None:
        if overrides:
            raise ConfigError(
                f"override '{overrides[0]}': needs --config, whose reward section it changes; give "
                "the file of a run"
            )
        return RewardConfig()
    rewards = load_config(config, overrides).reward
    check_rewards(rewards.functions)
    return rewards
