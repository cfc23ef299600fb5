"""What the rank of test_in_place.py does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithm.advantage import Advantages
from bapo_megatron.config.rollout import StalenessConfig
from bapo_megatron.config.schema import (
    AlgorithmConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from bapo_megatron.data.dump import read_batch
from bapo_megatron.ops.logprob import (
    LossGradient,
    apply_token_loss,
    vocab_parallel_logprobs,
)
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.split import split_step
from bapo_megatron.types import MicroBatch
from tests.distributed_launch import joined
from tests.policy.parity_ranks import hf_gradients
from tests.trainer.dumps import ONE_RANK


def _build(model_dir: Path, dtype: str, groups: ProcessGroups) -> MegatronPolicy:
    model, optimizer = ModelConfig(path=model_dir, dtype=dtype), OptimizerConfig(lr=0.0)
    return MegatronPolicy.build(
        model, ParallelConfig(), optimizer, total_updates=1, seed=0, groups=groups
    )


def watch_the_logits(model_dir: Path, dump: Path) -> dict[str, Any]:
    """Train once in bfloat16 with and without overwriting; tell where the logits lived."""
    with joined() as groups:
        policy = _build(model_dir, "bfloat16", groups)
        config = AlgorithmConfig.model_validate({})
        (update,) = split_step(
            read_batch(dump),
            Advantages("grpo"),
            config,
            StalenessConfig(),
            ONE_RANK,
            zero_advantage="left_out",
        )
        watch = _Watch(policy)
        gradients = {}
        for overwrite in (False, True):
            policy.forward_backward(update.micro_batches, watch.loss_function(overwrite))
            gradients[overwrite] = hf_gradients(policy)
        return {"gradients": gradients, "seen": watch.seen}


class _Watch:
    """Remembers the output linear's result and compares the logits with it."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self.policy = policy
        self.seen: dict[str, Any] = {}
        self._produced: Tensor | None = None
        policy.chunks[-1].output_layer.register_forward_hook(self._remember)

    def _remember(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        self._produced = output[0]

    def loss_function(self, overwrite: bool) -> Any:
        def loss_fn(logits_NV: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, None]:
            produced = self._produced
            assert produced is not None
            assert produced.grad_fn is not None
            saved = produced.grad_fn.saved_tensors
            logprob_T, entropy_T = vocab_parallel_logprobs(
                logits_NV,
                micro_batch.target_T,
                vocab_size=self.policy.hf.vocab_size,
                rows_T=micro_batch.rows_T,
                group=self.policy.groups.tensor,
                overwrite_logits=overwrite,
            )

            def token_loss(logprob_T: Tensor, entropy_T: Tensor, part: slice) -> LossGradient:
                """Σ weight · (−A · ℓ − 0.1 · H)."""
                weight_T = micro_batch.loss_weight_T[part]
                by_logprob_T = -weight_T * micro_batch.advantage_T[part]
                loss = (by_logprob_T * logprob_T - 0.1 * weight_T * entropy_T).sum()
                return LossGradient(loss.double(), by_logprob_T, -0.1 * weight_T)

            loss = apply_token_loss(logprob_T, entropy_T, token_loss)
            self.seen = {
                "dtype": logits_NV.dtype,
                "same_storage": logits_NV.data_ptr() == produced.data_ptr(),
                "saved_by_linear": [t.data_ptr() == produced.data_ptr() for t in saved],
                "loss_is_view": loss._is_view(),
            }
            return loss, None

        return loss_fn


def refuse_multi_token_prediction(model_dir: Path) -> str:
    """What a policy says about a model with multi-token prediction."""
    with joined() as groups:
        policy = _build(model_dir, "float32", groups)
        policy.chunks[-1].mtp_process = True
        try:
            replace(policy)
        except AssertionError as error:
            return str(error)
        return ""
