"""Log-probs and entropies of the response tokens, from what the model returns for a micro-batch.

That is the logits [N, V], or with ``ops.logits_chunk_tokens`` the hidden states [N, H] from which
logits are made chunk by chunk.

Shape legend: N = packed tokens, V = local vocabulary columns, H = hidden size, T = response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_megatron.config.schema import OpsConfig
from bapo_megatron.ops.backend import select_kernels
from bapo_megatron.ops.chunked import OutputHead, chunked_logprobs
from bapo_megatron.ops.logprob import TokenLogprobs, vocab_parallel_logprobs
from bapo_megatron.policy.megatron_policy import MegatronPolicy
from bapo_megatron.runtime.distributed import ProcessGroups
from bapo_megatron.types import MicroBatch


@dataclass(eq=False, repr=False)
class PolicyOutput:
    """The model's output as log-probs, with the kernels of this run.

    Raises:
        ValueError: ``ops.backend`` names kernels that this machine does not have.
    """

    ops: OpsConfig
    vocab_size: int
    temperature: float
    """That of the sampling, by which logits are divided."""
    groups: ProcessGroups
    head: OutputHead | None
    """Given where the model returns hidden states."""

    def __post_init__(self) -> None:
        self.kernels = select_kernels(self.ops.backend, self.groups.device)

    @classmethod
    def of(cls, policy: MegatronPolicy, ops: OpsConfig, temperature: float) -> PolicyOutput:
        """Return the output of a policy, which was built with the same ops section."""
        return cls(ops, policy.hf.vocab_size, temperature, policy.groups, policy.head)

    def read(self, output: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return ℓ and H [T] of the response tokens, without gradient."""
        if self.head is None:
            with torch.no_grad():
                return self.differentiable(output, micro_batch)
        return chunked_logprobs(
            output,
            self.head,
            micro_batch.target_T,
            rows_T=micro_batch.rows_T,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            chunk_tokens=self.ops.logits_chunk_tokens,
            kernels=self.kernels,
        )

    def differentiable(self, logits_NV: Tensor, micro_batch: MicroBatch) -> TokenLogprobs:
        """Return ℓ and H [T] with a graph; their backward pass overwrites the logits."""
        return vocab_parallel_logprobs(
            logits_NV,
            micro_batch.target_T,
            vocab_size=self.vocab_size,
            rows_T=micro_batch.rows_T,
            temperature=self.temperature,
            group=self.groups.tensor,
            kernels=self.kernels,
            overwrite_logits=True,
        )
