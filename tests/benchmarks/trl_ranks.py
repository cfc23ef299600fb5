"""One rank of TRL's GRPOTrainer that trains on recorded rollouts; runs in TRL's environment.

Generation is replaced through ``rollout_func``, the trainer's own argument for it; nothing is
subclassed. One function is patched: the shuffle of a batch between generation and training, which
becomes the identity, so that every update has the samples that it has in the other trainer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from tests.benchmarks.turns import Turns


def read_rollouts(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of every group, in the order of their index, by "dump:group_id"."""
    groups: dict[str, list[dict[str, Any]]] = {}
    columns = ["group_id", "prompt_token_ids", "response_token_ids", "behaviour_logprobs", "reward"]
    for path in sorted(directory.glob("step_*.parquet")):
        for row in pq.read_table(path, columns=columns).to_pylist():
            groups.setdefault(f"{path.stem}:{row['group_id']}", []).append(row)
    return groups


def recorded_reward(recorded: list[float], **_: Any) -> list[float]:
    return recorded


def main() -> None:
    spec = json.loads(sys.argv[1])
    turns = Turns(spec["cores"])
    rollouts = read_rollouts(Path(spec["dumps"]))
    order, samples, group_size = spec["order"], spec["samples"], spec["group_size"]
    updates, ranks, rows = spec["updates"], spec["ranks"], spec["micro_batch"]
    per_update = samples // updates // ranks
    assert per_update % rows == 0, f"{per_update} samples of an update are no multiple of {rows}"
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    begun: dict[str, int] = {}

    def rollout(prompts: list[str], _: GRPOTrainer) -> dict[str, list[Any]]:
        turns.wait(
            grad_norms=[float(norm) for norm in norms],
            losses=[
                float(sum(losses[start : start + per_update // rows]))
                for start in range(0, len(losses), per_update // rows)
            ],
        )
        losses.clear()
        norms.clear()
        begun.clear()
        rows_of_turn = []
        for name in prompts:
            rows_of_turn.append(rollouts[name][begun.setdefault(name, 0)])
            begun[name] += 1
        return {
            "prompt_ids": [row["prompt_token_ids"] for row in rows_of_turn],
            "completion_ids": [row["response_token_ids"] for row in rows_of_turn],
            "logprobs": [row["behaviour_logprobs"] for row in rows_of_turn],
            "recorded": [row["reward"] for row in rows_of_turn],
        }

    trainer = GRPOTrainer(
        model=spec["model"],
        reward_funcs=recorded_reward,
        # One more batch than is trained: its turn never comes.
        train_dataset=Dataset.from_dict({"prompt": [*order, *order[: samples // group_size]]}),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        rollout_func=rollout,
        args=GRPOConfig(
            output_dir=spec["scratch"],
            use_cpu=True,
            bf16=False,
            ddp_backend="gloo" if ranks > 1 else None,
            ddp_find_unused_parameters=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=per_update // rows,
            generation_batch_size=samples,
            num_generations=group_size,
            max_completion_length=spec["max_response_tokens"],
            num_train_epochs=1,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            loss_type="dapo",
            epsilon=0.2,
            beta=0.0,
            scale_rewards="none",
            temperature=1.0,
            learning_rate=spec["lr"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=updates,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    clip, compute_loss = trainer.accelerator.clip_grad_norm_, trainer.compute_loss

    def noting_clip(*arguments: Any, **options: Any) -> Any:
        norms.append(clip(*arguments, **options))
        return norms[-1]

    def noting_loss(*arguments: Any, **options: Any) -> Any:
        loss = compute_loss(*arguments, **options)
        losses.append(loss.detach())
        return loss

    with (
        mock.patch.object(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch),
        mock.patch.object(trainer.accelerator, "clip_grad_norm_", noting_clip),
        mock.patch.object(trainer, "compute_loss", noting_loss),
    ):
        trainer.train()


if __name__ == "__main__":
    main()
