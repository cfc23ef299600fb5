"""One rank of this project that replays recorded rollouts, each batch at its turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from bapo_megatron.policy.megatron_import import import_megatron

import_megatron()

from bapo_megatron.config.load import load_config  # noqa: E402
from bapo_megatron.trainer import loop as loop_module  # noqa: E402
from bapo_megatron.trainer.step import BatchTrainer  # noqa: E402
from bapo_megatron.types import RolloutBatch, UpdateResult  # noqa: E402
from tests.benchmarks.turns import Turns  # noqa: E402
from tests.trainer.runs import train_whole_run  # noqa: E402


def main() -> None:
    spec = json.loads(sys.argv[1])
    turns = Turns(spec["cores"])
    results: list[UpdateResult] = []
    next_batch, train_batch = loop_module.Run.next_batch, BatchTrainer.train

    def wait(_: loop_module.Run) -> None:
        turns.wait(
            grad_norms=[result.grad_norm for result in results],
            losses=[result.sums["policy_loss"] for result in results],
        )

    def next_at_turn(self: loop_module.Run, step: int) -> RolloutBatch:
        wait(self)
        return next_batch(self, step)

    def noting_train(self: BatchTrainer, batch: RolloutBatch) -> list[UpdateResult]:
        results[:] = train_batch(self, batch)
        return results

    patches: list[Any] = [
        mock.patch.object(loop_module.Run, "next_batch", next_at_turn),
        mock.patch.object(loop_module.Run, "finish", wait),
        mock.patch.object(BatchTrainer, "train", noting_train),
    ]
    for patch in patches:
        patch.start()
    config = load_config(Path(spec["config"]), spec["overrides"])
    train_whole_run(config)


if __name__ == "__main__":
    main()
