"""A GPTModel that ends before its language-model head, and that head for whoever applies it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.ops.chunked import OutputHead

if TYPE_CHECKING:
    import torch.distributed as dist
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor


def return_hidden_states(gpt: GPTModel) -> None:
    """Make the model return what its output layer is given, instead of logits.

    That is [1, N, H] after the final norm, under sequence parallelism this rank's [1, N / tensor,
    H]; nothing is copied. The layer stays where it is, with its weight, name and hooks.

    Args:
        gpt: A model of the last pipeline stage.
    """
    assert gpt.post_process, "only the last pipeline stage has an output layer"
    # These compute more logits, or their gradients, inside the model.
    assert not gpt.mtp_process, "multi-token prediction is not supported"
    assert not gpt.config.defer_embedding_wgrad_compute

    def forward(
        hidden_N1H: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        del weight, runtime_gather_output
        return hidden_N1H, None

    gpt.output_layer.forward = forward


def output_head(gpt: GPTModel, tensor_group: dist.ProcessGroup) -> OutputHead:
    """Return the head of a model of the last pipeline stage.

    Args:
        gpt: The model; before or after it is wrapped for data parallelism.
        tensor_group: The ranks that share its vocabulary.
    """
    # The method that finds a shared weight returns the embedding's where nothing is shared, too.
    tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    return OutputHead(
        weight=weight,
        tensor_group=tensor_group,
        sequence_parallel=gpt.config.sequence_parallel,
    )
