"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES, Recurrence, Share, weight

_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


def delta_input(hf: Mapping[str, str], form: Literal["sections", "sections_by_head"]) -> Weight:
    """Return the fused input projection of a gated delta net.

    ``hf`` are shapes by name of the Hugging Face tensors, whose sections are those of Megatron:
    query, key, value, output gate, beta, alpha.
    """
    names = tuple(f"linear_attn.{name}.weight" for name in hf)
    shapes = tuple(f"{rows} hidden" for rows in hf.values())
    megatron = "self_attention.in_proj.weight"
    return Weight(megatron, names, shapes, 0, form, sections=_SECTIONS)


_WEIGHTS = (
    weight("in_proj.layer_norm_weight", "input_layernorm.weight", "hidden"),
    weight(
        "conv1d.weight",
        "linear_attn.conv1d.weight",
        "recurrent_keys+recurrent_keys+recurrent_values one kernel",
        0,
        form="sections",
        sections=_SECTIONS[:3],
    ),
    weight("dt_bias", "linear_attn.dt_bias", "recurrent_heads", 0),
    weight("A_log", "linear_attn.A_log", "recurrent_heads", 0),
    weight("out_norm.weight", "linear_attn.norm.weight", "recurrent_head"),
    weight("out_proj.weight", "linear_attn.out_proj.weight", "hidden recurrent_values", 1),
)


@dataclass(frozen=True)
class DeltaNet(Recurrence):
    """Several heads of values share a key head, a group."""

    input: Weight
    """From ``delta_input``."""

    title = "gated delta nets"
    groups_title = "key heads"
    gates_per_head = 2
    needs_sequence_parallel = True

    def weights(self, hf: HfConfig) -> tuple[Weight, ...]:
        return (self.input, *_WEIGHTS)

    def megatron_options(self, hf: HfConfig) -> dict[str, Any]:
        return {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(mixer is self) for mixer in hf.mixers],
            "linear_conv_kernel_dim": self.kernel_size,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_num_key_heads": self.num_groups,
            "linear_num_value_heads": self.num_heads,
        }

    def put_into(self, layer: Any, hf: HfConfig, *, is_fused: bool) -> None:
        from megatron.core.extensions import transformer_engine as te
        from megatron.core.ssm.gated_delta_net import HAVE_FLA, GatedDeltaNetSubmodules
        from megatron.core.tensor_parallel.layers import RowParallelLinear
        from megatron.core.transformer.spec_utils import ModuleSpec

        from bapo_megatron.policy import local_layers
        from bapo_megatron.policy.mixers.delta_rule import PackedGatedDeltaNet, use_twins

        if is_fused:
            if not HAVE_FLA:
                raise ValueError(
                    "flash-linear-attention: must be installed for a model with gated delta nets "
                    "on a GPU with Transformer Engine; install it (docs/launch.md)"
                )
            modules = te.TELayerNormColumnParallelLinear, te.TENorm, te.TERowParallelLinear
        else:
            use_twins()
            linear, norm = local_layers.NormColumnParallelLinear, local_layers.RMSNorm
            modules = linear, norm, RowParallelLinear
        in_proj, norm, out_proj = modules

        class OutNorm:  # Megatron calls classes, but not functions
            def __new__(cls, config: Any, **options: Any) -> Any:
                plain = copy.copy(config)
                plain.layernorm_zero_centered_gamma = False  # the only norm with weights around 1
                return norm(plain, **options)

        submodules = GatedDeltaNetSubmodules(in_proj, OutNorm, out_proj)
        layer.submodules.self_attention = ModuleSpec(PackedGatedDeltaNet, submodules=submodules)

    def flops(self, hf: HfConfig) -> tuple[int, int]:
        """See ``Mixer``; it reads its state twice and writes it once for each token."""
        return 6 * self.state_size, 0

    def saved(self, share: Share, *, is_recomputed: bool) -> dict[str, float]:
        """See ``Mixer``; read off its modules.

        With FLA: the projection, what the convolution returns, queries and keys repeated for each
        value head, a chunk's 64 × 64 system per head, and the output before and after its gated
        norm. Our twin keeps float32 copies; 48 K + 20 V + K V / 16 + 1295 bytes per token and head
        were measured.
        """
        heads = self.num_heads // (share.tensor * share.context)
        heads *= share.context  # of a context rank's own tokens: all-to-alls exchange the two
        key, value = self.key_dim, self.value_dim
        keys = share.divided(2 * self.num_keys)
        values = share.divided(self.num_values)
        tensors: dict[str, float] = {
            "projection": keys + 2 * values + 2 * share.element_bytes * heads,
            "output of the convolution": keys + values,
            "normalised queries and keys": keys,
            "queries and keys of value heads": 2 * share.element_bytes * heads * key,
            "output, before and after its norm": 3 * values,
            "gate": values + FLOAT32_BYTES * heads * value,
        }
        if share.is_local:
            tensors["rule"] = heads * (48 * key + 20 * value + key * value / 16 + 1295)
        else:
            tensors["rule"] = heads * (64 * share.element_bytes + 2 * FLOAT32_BYTES)
        return tensors
