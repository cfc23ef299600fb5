"""What describes a model: its architecture, its weights, and the family that reads both.

A family is one file of ``policy.families``. It says which fields of config.json it reads, what they
mean (``HfConfig``), and which tensors a layer has (``LayerWeights``); loading, export, weight sync,
conversion, FLOPs and ``plan`` follow from these.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

if TYPE_CHECKING:
    from bapo_megatron.policy.families.config_json import ConfigJson
    from bapo_megatron.policy.mixers.base import Mixer

Positive = Annotated[float, Field(gt=0, lt=1e30, strict=True)]


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Frequency scaling of rotary embeddings, ``rope_type: llama3``."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positive


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Frequencies divided by one factor, ``rope_type: linear``."""

    factor: Positive


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), ``rope_type: yarn``: frequencies and attention."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    factor: Annotated[float, Field(ge=1, lt=1e30, strict=True)]
    original_max_position_embeddings: Positive
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: Annotated[bool, Field(strict=True)] = True
    """Whether the range of interpolated channels ends at whole numbers."""

    @property
    def attention_factor(self) -> float:
        """Factor of the cosines and sines of queries and of keys."""
        numerator, denominator = self.mscale, self.mscale_all_dim
        if numerator is None or denominator is None:
            numerator, denominator = 1.0, 0.0
        log = 0.1 * math.log(self.factor)
        return (1 + numerator * log) / (1 + denominator * log)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and how its router chooses among them.

    A token goes to the ``per_token`` experts of highest score; their outputs are summed with the
    scores, without ``expert_bias``, as weights.
    """

    num: int
    """Routed experts of a layer."""
    per_token: int
    """Routed experts of a token (top-k)."""
    intermediate_size: int
    """Channels of one routed expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to scores."""
    normalizes: bool = True
    """Whether the weights of a token's experts sum to ``scale``."""
    scale: float = 1.0
    """Factor of the weights."""
    has_bias: bool = False
    """Whether ``expert_bias``, a float32 buffer, is added to the scores for the choice alone."""
    num_groups: int = 1
    """Groups of experts, of which a token's experts are from ``groups_per_token``."""
    groups_per_token: int = 1
    shared_intermediate_size: int = 0
    """Channels of the shared experts, which every token visits, together."""
    has_shared_gate: bool = False
    """Whether the shared experts' output is multiplied by a sigmoid of the token."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with a dense MLP in place of experts."""
    swiglu_limit: float | None = None
    """Bound of gate and |up| in gpt-oss's SwiGLU, gate σ(1.702 gate) (up + 1); None: SwiGLU."""
    has_linear_biases: bool = False
    """Whether the router and the linears of experts have biases."""


@dataclass(frozen=True)
class HfConfig:
    """The architecture of a decoder-only model, as its config.json describes it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Channels of a dense MLP."""
    mixers: "tuple[Mixer, ...]"
    """What mixes the tokens of each layer."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Channels of a head's query and key; but for MLA also of its value."""
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: LinearRope | Llama3Rope | YarnRope | None
    tied_embeddings: bool
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    qk_norm: bool
    """RMSNorm over each head's query and key."""
    joint_qk_norm: bool = False
    """Whether it is over the queries, and the keys, of all heads together."""
    output_bias: bool = False
    """Bias on the output projection of attention."""
    rotary_share: float = 1.0
    """Share of a head's channels, the first ones, that are rotated."""
    local_rope_theta: float | None = None
    """Base of the unscaled rotary embeddings of layers with a window; None: as other layers."""
    attention_scale: float | None = None
    """Factor of the products of queries and keys; None: head_dim^-0.5."""
    activation: Literal["silu", "gelu", "relu2"] = "silu"
    """Of the MLP, which with relu2 is not gated; gelu is the tanh approximation."""
    scales_embeddings: bool = False
    """Whether embeddings, but not the output layer, are multiplied by sqrt(hidden_size)."""
    output_gate: bool = False
    """Whether attention's output is multiplied by the sigmoid of a gate, a part of ``q_proj``."""
    zero_centered_norms: bool = False
    """Whether RMSNorm multiplies by 1 + weight; that of a delta net's output never does."""
    norms_before: bool = True
    """Whether a layer's attention and MLP have a norm before them."""
    norms_after: bool = False
    """Whether they have one after them, before the residual is added."""
    experts: Experts | None = None
    has_single_blocks: bool = False
    """Whether a layer with a token mixer has no MLP."""
    tensor_prefix: str = "model"
    """What names of Hugging Face tensors begin with, but for the output layer's."""
    tensor_names: tuple[tuple[str, str], ...] = ()
    """Parts of names of Hugging Face tensors: what ``Weight.hf`` has, and what the model has."""

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self.mixers)

    @cached_property
    def mixer_kinds(self) -> "tuple[Mixer, ...]":
        """Each mixer once."""
        return tuple(dict.fromkeys(self.mixers))

    @property
    def stacks_layers(self) -> bool:
        """Whether Megatron's checkpoints stack the layers' parameters."""
        return self.experts is None and all(mixer.stacks for mixer in self.mixers)

    @property
    def is_gated(self) -> bool:
        """Whether MLPs and experts have a gate."""
        return self.activation != "relu2"

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of a dense MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return not (self.has_single_blocks and self.mixers[layer].is_mixing)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated; 0: there are no rotary embeddings."""
        return int(self.head_dim * self.rotary_share)

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """Sizes by the names that ``Weight.shapes`` uses."""
        experts, sizes = self.experts, dict[str, int]()
        for mixer in self.mixer_kinds:
            sizes |= mixer.dimensions(self)
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "intermediate": self.intermediate_size,
            "query": self.num_heads * self.head_dim,
            "gate": self.num_heads * self.head_dim,
            "key": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "experts": experts.num if experts else 0,
            "expert": experts.intermediate_size if experts else 0,
            "shared": experts.shared_intermediate_size if experts else 0,
            **sizes,
        }

    @property
    def division_fields(self) -> dict[str, int]:
        """The config.json fields that ``config.check.check_heads`` reads."""
        return {"num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads}


@dataclass(frozen=True, slots=True)
class Weight:
    """One Megatron parameter (or buffer) and the Hugging Face tensors it holds.

    Tensor-parallel ranks, for an expert expert-tensor-parallel ranks, hold equal parts of it along
    ``axis``.
    """

    megatron: str
    """Name in GPTModel; layers and experts are numbered over the whole model."""
    hf: tuple[str, ...]
    """Names in the Hugging Face model, in fused order."""
    shapes: tuple[str, ...]
    """Shape of each: names of ``HfConfig.dimensions``, or numbers; the rows of ``a+b hidden`` are
    of two parts, the first a, the others b."""
    axis: int | None = None
    """Axis that tensor-parallel ranks divide; None: every rank holds all of it."""
    form: Literal[
        "plain", "qkv", "gate_up", "interleaved", "vocab", "sections", "sections_by_head"
    ] = "plain"
    """How the tensors are fused (``policy.hf_weights``)."""
    sections: tuple[str, ...] = ()
    """What Megatron's checkpoints call the parts of the tensors, with the forms ``sections``."""
    layer: int | None = None
    """Number of its layer in the whole model; None: embedding, final norm or output."""
    expert: int | None = None
    """Number of its expert in the layer; None: every expert-parallel rank holds it."""
    loads_with_previous: bool = False
    """Whether a server must get it in one call with the weight before: SGLang fuses them."""
    is_stacked: bool = False
    """Whether its tensor holds all experts of the layer, [experts, inputs, outputs] or [experts,
    outputs]; ``shapes`` are [outputs, inputs] or [outputs] of this expert."""
    is_buffer: bool = False
    """Whether it is a float32 buffer: stored and exported, but not trained."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer holds, under names that lack the layer."""

    shared: tuple[Weight, ...]
    """On every expert-parallel rank."""
    expert: tuple[Weight, ...] = ()
    """Of each expert; ``{expert}`` in the names stands for its number."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one ``model_type``."""

    model_type: str
    architecture: str
    """The only entry of config.json's ``architectures``."""
    fields: "type[ConfigJson]"
    """What is read from config.json."""
    understand: Callable[[Any], HfConfig]
    """Returns the architecture that ``fields`` describe; raises ``ValueError`` naming a field."""
    layer: Callable[[HfConfig, int], LayerWeights]
    """Returns the weights of a layer."""
    is_kept: Callable[[HfConfig, str], bool] = lambda hf, name: False
    """Whether a tensor of published checkpoints is not trained, but copied to exports."""
