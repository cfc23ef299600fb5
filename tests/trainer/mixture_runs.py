"""Runs that draw from a mixture, with the real collector, on one rank and on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.dump import read_batch
from bapo_megatron.runtime.distributed import shutdown_distributed
from tests.distributed_launch import take_port
from tests.trainer.whole_run import train_whole_run

if TYPE_CHECKING:
    from pathlib import Path

GROUPS_PER_STEP = 4


def settings(
    model: Path, data: list[dict[str, Any]], address: str, run_dir: Path
) -> dict[str, Any]:
    """Batches of four groups from a server; two more are under way when one is complete."""
    return {
        "name": "mixture",
        "seed": 11,
        "run_dir": str(run_dir),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": data, "max_prompt_tokens": 32},
        "rollout": {
            "servers": [address],
            "groups_per_step": GROUPS_PER_STEP,
            "samples_per_group": 2,
            "max_response_tokens": 16,
            "oversample_groups": 2,
            "weight_sync": {"method": "disk", "verify": "none"},
        },
        "reward": {"workers": 1},
        "algorithm": {"updates_per_batch": 2},
        "train": {"steps": 2, "max_tokens_per_micro_batch": 128},
        "log": {"tensorboard": False, "console": False},
    }


def run(config: dict[str, Any], steps: int) -> None:
    """Train up to ``steps`` on the ranks of this process group; resumes what is there."""
    shortened = {**config["train"], "steps": steps}
    take_port()
    try:
        resumed = RunConfig.model_validate({**config, "train": shortened, "resume": True})
        train_whole_run(resumed)
    finally:
        shutdown_distributed()


def two_ranks(config: dict[str, Any]) -> None:
    """Two steps with two data-parallel ranks."""
    run(config, 2)


def one_rank(config: dict[str, Any]) -> None:
    """Another step with one rank."""
    run(config, 3)


def prompts_by_group(run_dir: Path) -> dict[int, str]:
    """Prompt id of every group that a run trained on."""
    batches = [read_batch(path) for path in sorted((run_dir / "rollouts").glob("step_*.parquet"))]
    return {
        group.group_id: group.samples[0].prompt.prompt_id
        for batch in batches
        for group in batch.groups
    }
