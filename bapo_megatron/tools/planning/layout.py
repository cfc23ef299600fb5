"""Parallel layouts: how ranks are numbered, which layouts a model allows, what a rank holds.

Parameters are counted exactly: they are those of the model that Megatron builds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.policy.hf_config import HfConfig, check_division, padded_vocab_size

Group = Literal["tensor", "context", "pipeline", "data"]

MAX_GPUS = 1 << 16
MAX_VIRTUAL = 8
"""Limit of chunks per stage in listed layouts."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks divide what. Ranks are numbered tensor first, then context, data, pipeline."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    data: int = 1

    @property
    def parallel(self) -> ParallelConfig:
        """The section of the configuration that asks for this layout."""
        return ParallelConfig(
            tensor=self.tensor,
            sequence=self.sequence,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual,
            context=self.context,
        )

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: the optimizer's state is divided over them."""
        return self.data * self.context

    @property
    def sequence_ranks(self) -> int:
        """Ranks that divide the tokens between matrix products."""
        return self.tensor if self.sequence else 1

    def layers_per_chunk(self, hf: HfConfig) -> int:
        """Layers of each chunk."""
        return hf.num_layers // (self.pipeline * self.virtual)

    @property
    def group_ranks(self) -> dict[Group, int]:
        """Ranks of each group, where ``data`` has those that sum gradients: data × context."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "pipeline": self.pipeline,
            "data": self.replicas,
        }

    def within_node(self, group: Group, node_gpus: int) -> bool:
        """Whether the ranks of a group share one node, counted from its first to its last."""
        span = {
            "tensor": self.tensor,
            "context": self.tensor * self.context,
            "data": self.tensor * self.replicas,
            "pipeline": self.gpus,
        }
        return span[group] <= node_gpus


def configured_layout(parallel: ParallelConfig, gpus: int | None) -> Layout:
    """Return the layout of a configuration on ``gpus`` GPUs; None: those of one replica.

    Raises:
        ValueError: The GPUs cannot be divided so.
    """
    replica = parallel.tensor * parallel.pipeline * parallel.context
    gpus = replica if gpus is None else gpus
    if replica > MAX_GPUS:
        raise ValueError(
            f"parallel: tensor × pipeline × context must be at most {MAX_GPUS}, got {replica}; "
            "lower them"
        )
    if gpus < 1 or gpus % replica:
        raise ValueError(
            f"--gpus: must be a multiple of parallel.tensor × pipeline × context = {replica}, got "
            f"{gpus}; give {-(-max(gpus, 1) // replica) * replica}, or change parallel"
        )
    return Layout(
        parallel.tensor,
        parallel.sequence,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        gpus // replica,
    )


def possible_layouts(hf: HfConfig, gpus: int, *, node_gpus: int, max_data: int) -> Iterator[Layout]:
    """Yield every layout of ``gpus`` GPUs that the model allows.

    Tensor parallel stays within a node, since its messages are between the products of every layer;
    it is listed with sequence parallel, which costs nothing.

    ``max_data`` is the number of samples of an update: more data-parallel ranks would have nothing
    to do.
    """
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    for tensor, pipeline, context in product(divisors, repeat=3):
        data, rest = divmod(gpus, tensor * pipeline * context)
        if rest or data > max_data or tensor > node_gpus:
            continue
        for virtual in range(1, MAX_VIRTUAL + 1 if pipeline > 1 else 2):
            layout = Layout(tensor, tensor > 1, pipeline, virtual, context, data)
            try:
                check_division(hf, layout.parallel)
            except ValueError:  # the model cannot be divided so
                continue
            yield layout


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
    """Return the parameters of a stage's chunk of layers on one rank.

    The first stage's first chunk has the embedding; the last stage's last one the final norm and
    the output layer, which tied models have only where it is not on the rank of the embedding.
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
