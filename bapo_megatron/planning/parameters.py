"""How many parameters a rank holds: exactly those of the model that Megatron builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.policy.hf_config import padded_vocab_size

if TYPE_CHECKING:
    from bapo_megatron.planning.layout import Layout
    from bapo_megatron.policy.hf_config import HfConfig


def layer_parameters(hf: HfConfig, tensor: int) -> int:
    """Return the parameters of one layer on one of ``tensor`` ranks.

    With hidden size h, query channels q, key (and value) channels k and MLP channels f, all but the
    norms divided over t ranks:

        2h + [D + D] + ((q + 2k)·h + [q + 2k] + q·h + 3·h·f) / t

    where the bracketed norms over the D channels of a head and biases are those of models that have
    them.
    """
    query, key = hf.num_heads * hf.head_dim, hf.num_kv_heads * hf.head_dim
    projections = (2 * query + 2 * key + 3 * hf.intermediate_size) * hf.hidden_size
    biases = query + 2 * key if hf.qkv_bias else 0
    norms = 2 * hf.hidden_size + (2 * hf.head_dim if hf.qk_norm else 0)
    return norms + (projections + biases) // tensor


def embedding_parameters(hf: HfConfig, tensor: int) -> int:
    """Return the parameters of the embedding, or of the output layer: padded vocabulary · h / t."""
    return padded_vocab_size(hf.vocab_size, tensor) // tensor * hf.hidden_size


def chunk_parameters(hf: HfConfig, layout: Layout, stage: int, chunk: int) -> int:
    """Return the parameters of a chunk of layers on one rank.

    The first stage's first chunk has the embedding; the last stage's last one the final norm and
    the output layer, which tied models have only where it is not on the rank of the embedding.

    Args:
        hf: The architecture.
        layout: The layout.
        stage: Pipeline stage of the rank.
        chunk: Which of its chunks.
    """
    is_first = stage == 0 and chunk == 0
    is_last = stage == layout.pipeline - 1 and chunk == layout.virtual - 1
    total = layout.layers_per_chunk(hf) * layer_parameters(hf, layout.tensor)
    if is_first:
        total += embedding_parameters(hf, layout.tensor)
    if is_last:
        total += hf.hidden_size
        if not (hf.tied_embeddings and is_first):
            total += embedding_parameters(hf, layout.tensor)
    return total


def stage_parameters(hf: HfConfig, layout: Layout, stage: int) -> int:
    """Return the parameters of a rank of a pipeline stage."""
    return sum(chunk_parameters(hf, layout, stage, chunk) for chunk in range(layout.virtual))


def model_parameters(hf: HfConfig) -> int:
    """Return the parameters of the whole model as published, its vocabulary without padding."""
    embeddings = 1 if hf.tied_embeddings else 2
    layers = hf.num_layers * layer_parameters(hf, 1)
    return layers + hf.hidden_size + embeddings * hf.vocab_size * hf.hidden_size
