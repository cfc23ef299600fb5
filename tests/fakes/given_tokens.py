"""Tokens whose log-probs and entropies are given: a loss stage without a model.

Shape legend: T = response tokens, K = micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from bapo_megatron.algorithm.objective import TokenBatch
from bapo_megatron.config.schema import AlgorithmConfig, OpsConfig
from bapo_megatron.ops.logprob import TokenLogprobs, importance_ratio
from bapo_megatron.policy.model import PolicyOutput
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.trainer.loss import LossStage, UpdateContext
from bapo_megatron.types import MicroBatch

CPU = torch.device("cpu")
CONTEXT = UpdateContext(num_updates=0, rollout_version=None, num_samples=16)


@contextmanager
def one_rank(device: torch.device = CPU) -> Iterator[ProcessGroups]:
    """Process groups of this process alone, without Megatron; left at the end of the block."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield ProcessGroups(
            tensor=world,
            context=world,
            data=world,
            pipeline=world,
            expert=world,
            expert_tensor=world,
            expert_data=world,
            control=world,
            device=device,
            rank=0,
            world_size=1,
            data_rank=0,
            data_size=1,
            virtual_size=1,
        )
    finally:
        dist.destroy_process_group()


class GivenLogprobs(PolicyOutput):
    """Takes ``TokenLogprobs`` for the model's output."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__(OpsConfig(), vocab_size=1, temperature=1.0, groups=groups, head=None)

    def differentiable(self, logits_NV: Any, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return them as they are."""
        assert isinstance(logits_NV, TokenLogprobs)
        assert len(logits_NV.logprob_T) == len(micro_batch.target_T)
        return logits_NV


def make_stage(groups: ProcessGroups, algorithm: dict[str, Any]) -> LossStage:
    """The trainer's loss stage with an algorithm section, for ``GivenLogprobs``."""
    config = AlgorithmConfig.model_validate(algorithm)
    return LossStage(config, GivenLogprobs(groups), groups)


def make_micro_batch(**values_T: Tensor) -> MicroBatch:
    """A micro-batch of one response; fields other than ``behaviour_logprob_T`` have defaults."""
    behaviour_T = values_T["behaviour_logprob_T"]
    num_tokens, device = len(behaviour_T), behaviour_T.device

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_tokens,), value, dtype=dtype, device=device)

    mask_T = values_T.get("mask_T", full(1))
    place_T = torch.arange(num_tokens, device=device)
    fields: dict[str, Tensor] = {
        "token_ids_N": torch.zeros(num_tokens + 1, dtype=torch.int64, device=device),
        "position_ids_N": torch.arange(num_tokens + 1, device=device),
        "cu_seqlens": torch.tensor([0, num_tokens + 1], dtype=torch.int32, device=device),
        "rows_T": place_T,
        "target_T": full(0, torch.int64),
        "rollout_logprob_T": behaviour_T,
        "advantage_T": full(1),
        "reward_T": full(0),
        "mask_T": mask_T,
        "importance_T": full(1),
        "loss_weight_T": mask_T / max(1, num_tokens),
        "sample_T": full(0, torch.int64),
        "response_tokens_T": (mask_T > 0).sum().float().expand(num_tokens),
        "position_T": place_T,
        "version_T": full(0, torch.int64),
    }
    return MicroBatch(**{**fields, **values_T})


def make_tokens(
    logprob_T: Tensor,
    behaviour_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    **changes: Any,
) -> TokenBatch:
    """Tokens of one response as an objective sees them; all their values are finite."""
    zero_T, ones_T = torch.zeros_like(logprob_T), torch.ones_like(logprob_T)
    mask_T = ones_T if mask_T is None else mask_T
    entropy_T = zero_T if entropy_T is None else entropy_T
    values: dict[str, Any] = {
        "logprob": logprob_T,
        "behaviour_logprob": behaviour_logprob_T,
        "rollout_logprob": behaviour_logprob_T,
        "ratio": importance_ratio(logprob_T.detach(), behaviour_logprob_T),
        "advantage": advantage_T,
        "reward": zero_T,
        "mask": mask_T,
        "entropy": entropy_T,
        "collected_entropy": entropy_T.detach(),
        "response": torch.zeros(len(logprob_T), dtype=torch.int64, device=logprob_T.device),
        "response_tokens": ones_T * mask_T.sum(),
        "response_sums": None,
        "decision": None,
        "update": 0,
    }
    return TokenBatch(**{**values, **changes})
