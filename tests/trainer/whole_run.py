"""Trains as the command does, in a process that has imported everything already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.trainer.loop import train
from bapo_megatron.trainer.opening import open_run
from bapo_megatron.trainer.stopping import Stopping

if TYPE_CHECKING:
    from bapo_megatron.config.schema import RunConfig


def train_whole_run(config: RunConfig, stopping: Stopping | None = None) -> None:
    """Train to the last step; without ``stopping`` no signal is heard."""
    stopping = stopping or Stopping(config.train)
    with open_run(config, stopping) as opening:
        train(config, stopping, opening)
