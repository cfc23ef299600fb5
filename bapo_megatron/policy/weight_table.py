"""Every weight of a model and its shapes, from which FLOPs and memory follow; imports no torch."""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from bapo_megatron.policy.architecture import HfConfig, LayerWeights, Weight
from bapo_megatron.policy.families import FAMILIES
from bapo_megatron.policy.hf_config import padded_vocab_size

if TYPE_CHECKING:
    from bapo_megatron.data.packing import SequenceFlops

EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    ("model.embed_tokens.weight",),
    ("vocab hidden",),
    0,
    "vocab",
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden",))
OUTPUT = Weight("output_layer.weight", ("lm_head.weight",), ("vocab hidden",), 0, "vocab")


@functools.cache
def weight_table(hf: HfConfig) -> tuple[Weight, ...]:
    """Return every parameter and buffer of the model, in the order of the layers."""
    layers = (_in_layer(w, hf, layer) for layer in range(hf.num_layers) for w in _layer(hf, layer))
    first, last = (replace(w, hf=hf_names(w, hf)) for w in (EMBEDDING, FINAL_NORM))
    return (first, *layers, last, *(() if hf.tied_embeddings else (OUTPUT,)))


def hf_names(weight: Weight, hf: HfConfig) -> tuple[str, ...]:
    """Return the names of a weight outside the layers as the model has them."""
    names = _renamed(weight, hf).hf
    return tuple(name.replace("model.", f"{hf.tensor_prefix}.", 1) for name in names)


def _renamed(weight: Weight, hf: HfConfig) -> Weight:
    names = weight.hf
    for usual, of_model in hf.tensor_names:
        names = tuple(name.replace(usual, of_model, 1) for name in names)
    return replace(weight, hf=names)


def layer_weights(hf: HfConfig, layer: int) -> LayerWeights:
    """Return the weights of a layer under names that lack it."""
    weights = FAMILIES[hf.model_type].layer(hf, layer)
    parts = (weights.shared, weights.expert)
    return LayerWeights(*(tuple(_renamed(w, hf) for w in part) for part in parts))


def _layer(hf: HfConfig, layer: int) -> Iterator[Weight]:
    weights = layer_weights(hf, layer)
    yield from weights.shared
    experts = range(hf.experts.num if hf.experts else 0)
    pairs: Iterable[tuple[int, Weight]] = product(experts, weights.expert)
    if any(weight.is_stacked for weight in weights.expert):  # tensor by tensor
        pairs = ((expert, weight) for weight, expert in product(weights.expert, experts))
    for expert, weight in pairs:
        yield replace(
            weight,
            megatron=weight.megatron.format(expert=expert),
            hf=tuple(name.format(expert=expert) for name in weight.hf),
            expert=expert,
            loads_with_previous=weight.loads_with_previous or (weight.is_stacked and expert > 0),
        )


def _in_layer(weight: Weight, hf: HfConfig, layer: int) -> Weight:
    return replace(
        weight,
        megatron=f"decoder.layers.{layer}.{weight.megatron}",
        hf=tuple(f"{hf.tensor_prefix}.layers.{layer}.{name}" for name in weight.hf),
        layer=layer,
    )


@functools.cache
def sequence_flops(hf: HfConfig) -> "SequenceFlops":
    """Return the FLOPs of a forward pass: two per weight and token, and causal attention.

    Of the experts a token visits ``per_token``. Attention multiplies queries with keys and scores
    with values, half of the L² pairs each: 2 · L²/2 · channels FLOPs per layer and product. The
    embedding is a lookup.
    """
    from bapo_megatron.data.packing import SequenceFlops  # imports numpy

    weights = hf.vocab_size * hf.hidden_size
    for layer in range(hf.num_layers):
        parts = layer_weights(hf, layer)
        visited = hf.experts.per_token if hf.experts else 0
        for times, group in ((1, parts.shared), (visited, parts.expert)):
            shapes = [shape for w in group for shape in hf_shapes(w, hf).values()]
            weights += times * sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    per_token, per_pair = map(sum, zip(*(mixer.flops(hf) for mixer in hf.mixers), strict=True))
    return SequenceFlops(per_token=2 * weights + per_token, per_pair=per_pair)


def hf_shapes(weight: Weight, hf: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each Hugging Face tensor of ``weight``, or of its part of a stack."""
    dimensions = hf.dimensions
    return {
        name: tuple(_size(dimension, dimensions) for dimension in shape.split())
        for name, shape in zip(weight.hf, weight.shapes, strict=True)
    }


def stored_shapes(weight: Weight, hf: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each Hugging Face tensor of ``weight``, as files have it."""
    shapes = hf_shapes(weight, hf)
    if weight.is_stacked and hf.experts is not None:
        return {name: (hf.experts.num, *reversed(shape)) for name, shape in shapes.items()}
    return shapes


def section_rows(weight: Weight, hf: HfConfig) -> list[list[int]]:
    """Return the rows of each section of each Hugging Face tensor of ``weight``."""
    dimensions = hf.dimensions
    return [
        [_size(part, dimensions) for part in shape.split()[0].split("+")] for shape in weight.shapes
    ]


def _size(dimension: str, dimensions: dict[str, int]) -> int:
    parts = dimension.split("+")
    return sum(int(part) if part.isdecimal() else dimensions[part] for part in parts)


def shard_shape(weight: Weight, hf: HfConfig, size: int) -> tuple[int, ...]:
    """Return the shape of the part that one of ``size`` tensor-parallel ranks holds."""
    shapes = list(hf_shapes(weight, hf).values())
    whole = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
    if weight.form == "vocab":
        whole[0] = padded_vocab_size(hf.vocab_size, size)
    if weight.axis is not None:
        whole[weight.axis] //= size
    return tuple(whole)
