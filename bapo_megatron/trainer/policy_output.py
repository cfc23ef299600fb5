"""The model's output as log-probs and entropies of the response tokens.

Shape legend: N = packed tokens, V = local vocabulary columns, H = hidden size, T = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.config.schema import OpsConfig
from bapo_megatron.ops.chunked import Chunks, OutputHead, Teacher, chunked_logprobs
from bapo_megatron.ops.extension import check_kernels
from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs
from bapo_megatron.policy.model import Model
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.types import MicroBatch


@dataclass(eq=False, repr=False)
class PolicyOutput:
    """The model's output as log-probs of the response tokens.

    The output is logits [N, V], or with ``ops.logits_chunk_tokens`` hidden states [N, H], from
    which logits are computed chunk by chunk.

    Raises:
        ValueError: The kernels were not built for the groups' device.
    """

    ops: OpsConfig
    vocab_size: int
    temperature: float
    """Sampling temperature, by which logits are divided."""
    groups: ProcessGroups
    head: OutputHead | None
    """Set if the model returns hidden states."""

    def __post_init__(self) -> None:
        check_kernels(self.groups.device)

    @classmethod
    def of(cls, model: Model, ops: OpsConfig, temperature: float) -> PolicyOutput:
        """Return the output of a model, which was built with the same ops section."""
        return cls(ops, model.hf.vocab_size, temperature, model.groups, model.head)

    def read(self, output: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return ℓ and H [T] of the response tokens, without gradient."""
        if self.head is None:
            with torch.no_grad():
                return self.differentiable(output, micro_batch)
        return chunked_logprobs(output, self.chunks(micro_batch))

    def differentiable(self, logits_NV: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return ℓ and H [T] with a graph; their backward pass overwrites the logits."""
        return vocab_parallel_logprobs(
            logits_NV,
            micro_batch.target_T,
            vocab_size=self.vocab_size,
            rows_T=micro_batch.rows_T,
            temperature=self.temperature,
            group=self.groups.tensor,
            overwrite_logits=True,
        )

    def chunks(self, micro_batch: MicroBatch, teacher: Teacher | None = None) -> Chunks:
        """Return the response tokens, for hidden states as output."""
        assert self.head is not None
        return Chunks(
            self.head,
            micro_batch.target_T,
            micro_batch.rows_T,
            self.vocab_size,
            self.temperature,
            self.ops.logits_chunk_tokens,
            teacher,
        )
