"""What a token mixer is: attention of some kind, or a recurrence, that families name.

One file describes a kind: its weights, how Megatron builds it, and what it costs, from which
training, ``plan`` and FLOPs follow. Without Transformer Engine it needs twins of the kernels that
Megatron takes from elsewhere; ``engine.local.cache`` has what the local engine keeps of a sequence.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bapo_megatron.policy.architecture import Weight

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import ParallelConfig
    from bapo_megatron.policy.architecture import HfConfig

FLOAT32_BYTES = 4


def weight(megatron: str, hf: str, shape: str, axis: int | None = None, **options: Any) -> Weight:
    """Return a mixer's ``Weight`` of one Hugging Face tensor; Megatron calls it an attention's."""
    return Weight(f"self_attention.{megatron}", (hf,), (shape,), axis, **options)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of a layer, for ``plan``; sizes are in bytes per token of the rank."""

    hf: "HfConfig"
    element_bytes: int
    """Bytes of an element of weights and activations."""
    tensor: int
    context: int
    sequence_ranks: int
    """Ranks that divide the tokens between GEMMs."""
    is_local: bool
    """Whether layers are our own, not Transformer Engine's."""
    has_adapters: bool

    def divided(self, channels: int) -> int:
        """Channels that tensor-parallel ranks divide (query, key, MLP, vocabulary)."""
        return self.element_bytes * channels // self.tensor

    def norm(self, channels: int) -> float:
        """What a norm and the GEMM after it keep.

        The norm's input (local zero-centered norms: in float32), its output, which is the product's
        input, and 1/rms in float32.
        """
        is_widened = self.is_local and self.hf.zero_centered_norms
        input_bytes = FLOAT32_BYTES if is_widened else self.element_bytes
        num_bytes = (input_bytes + self.element_bytes) * channels + FLOAT32_BYTES
        return num_bytes / self.sequence_ranks


class Mixer(ABC):
    """One kind. Instances are compared and hashed by their sizes."""

    title: str
    """What messages call it, in the plural."""
    is_mixing = True
    """Whether it is a mixer, not the lack of one."""
    needs_sequence_parallel = False
    """Whether tensor parallel needs ``parallel.sequence``."""
    stacks = True
    """Whether all layers of a model have it, so that Megatron's checkpoints stack them."""

    @abstractmethod
    def weights(self, hf: "HfConfig") -> tuple[Weight, ...]:
        """Return its weights, with the norm before it, under names that lack the layer."""

    def dimensions(self, hf: "HfConfig") -> dict[str, int]:
        """Return sizes by the names that its weights' shapes use, beyond those of all models."""
        return {}

    def layout_error(self, parallel: "ParallelConfig") -> str | None:
        """Return why it cannot be divided so, as the text of a ``ConfigError``."""
        return None

    def megatron_options(self, hf: "HfConfig") -> dict[str, Any]:
        """Return its fields of Megatron's ``TransformerConfig``."""
        return {}

    def spec_options(self, hf: "HfConfig") -> dict[str, Any]:
        """Return what Megatron's functions for a layer's spec get."""
        return {"qk_layernorm": hf.qk_norm}

    @abstractmethod
    def put_into(self, layer: Any, hf: "HfConfig", *, is_fused: bool) -> None:
        """Change Megatron's spec of a layer; ``is_fused``: it is Transformer Engine's."""

    def flops(self, hf: "HfConfig") -> tuple[int, int]:
        """Return a layer's FLOPs per token, beyond its matrices', and per pair of tokens."""
        return 0, 0

    def cached_channels(self, hf: "HfConfig") -> int:
        """Return the channels of a token in the KV cache of a layer."""
        return 0

    divides_cache = True
    """Whether tensor-parallel ranks of a server divide the KV cache."""

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a sequence's state in a layer, whatever its length."""
        return 0

    @abstractmethod
    def saved(self, share: Share, *, is_recomputed: bool) -> dict[str, float]:
        """Return the bytes per token that a layer keeps for the backward pass, by tensor.

        ``is_recomputed``: with ``megatron.recompute: selective``.
        """

    def context_channels(self, hf: "HfConfig", tensor: int, context: int) -> float:
        """Return the channels of a token that a context-parallel rank sends in a forward pass.

        Here those of one ring pass of keys and values, the latter as wide as keys.
        """
        return 2 * hf.num_kv_heads * hf.head_dim // tensor * (context - 1)


@dataclass(frozen=True)
class Recurrence(Mixer):
    """A mixer with a state [key_dim, value_dim] per head, after a causal convolution.

    Context-parallel ranks exchange tokens for heads, and back.
    """

    num_groups: int
    """Groups of heads that share a key and a query: what writes and what reads their states."""
    num_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    """Tokens that the convolution over queries, keys and values, or C, B and x, sees."""

    stacks = False
    groups_title: ClassVar[str]
    """What messages call the groups."""
    gates_per_head: ClassVar[int]
    """Channels of the projection that are a token's rate and decay of a head."""

    @property
    def num_keys(self) -> int:
        """Channels of the keys of all groups."""
        return self.num_groups * self.key_dim

    @property
    def num_values(self) -> int:
        """Channels of the values of all heads."""
        return self.num_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers in a sequence's state."""
        return self.num_values * self.key_dim

    def dimensions(self, hf: "HfConfig") -> dict[str, int]:
        return {
            "recurrent_keys": self.num_keys,
            "recurrent_values": self.num_values,
            "recurrent_groups": self.num_groups,
            "recurrent_heads": self.num_heads,
            "recurrent_head": self.value_dim,
            "kernel": self.kernel_size,
            "one": 1,  # the convolution is over each channel alone
        }

    def layout_error(self, parallel: "ParallelConfig") -> str | None:
        count, tensor, context = self.num_groups, parallel.tensor, parallel.context
        if count % (tensor * context) == 0:
            return None
        key, value = ("context", context) if count % tensor == 0 else ("tensor", tensor)
        return (
            f"parallel.{key}: tensor × context must divide the {count} {self.groups_title} of "
            f"the model's {self.title}, got {value} with tensor × context = {tensor * context}; "
            "lower it"
        )

    def state_bytes(self, element_bytes: int) -> int:
        """See ``Mixer``: float32 states, and convolved inputs."""
        inputs = (2 * self.num_keys + self.num_values) * (self.kernel_size - 1)
        return FLOAT32_BYTES * self.state_size + element_bytes * inputs

    def context_channels(self, hf: "HfConfig", tensor: int, context: int) -> float:
        """See ``Mixer``: all tokens for a share of the heads, of the projection and the output."""
        gates = self.gates_per_head * self.num_heads
        exchanged = 2 * self.num_keys + 3 * self.num_values + gates
        return exchanged / tensor * (context - 1) / context


@dataclass(frozen=True)
class NoMixer(Mixer):
    """For layers that are an MLP alone."""

    title = "layers without a token mixer"
    is_mixing = False

    def weights(self, hf: "HfConfig") -> tuple[Weight, ...]:
        return ()

    def put_into(self, layer: Any, hf: "HfConfig", *, is_fused: bool) -> None:
        from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

        layer.submodules.input_layernorm = layer.submodules.self_attention = IdentityOp
        layer.submodules.self_attn_bda = IdentityFuncOp

    def saved(self, share: Share, *, is_recomputed: bool) -> dict[str, float]:
        return {}

    def context_channels(self, hf: "HfConfig", tensor: int, context: int) -> float:
        return 0
