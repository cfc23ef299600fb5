"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), as Nemotron-H has it."""

from dataclasses import dataclass
from typing import Any

from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES, Recurrence, Share, weight

_SECTIONS = ("z", "x", "B", "C", "dt")
_CONVOLVED = "recurrent_values+recurrent_keys+recurrent_keys"
_WEIGHTS = (
    weight("in_proj.layer_norm_weight", "input_layernorm.weight", "hidden"),
    weight(
        "in_proj.weight",
        "mamba.in_proj.weight",
        f"recurrent_values+{_CONVOLVED}+recurrent_heads hidden",
        0,
        form="sections",
        sections=_SECTIONS,
    ),
    *(
        weight(
            f"conv1d.{part}",
            f"mamba.conv1d.{part}",
            f"{_CONVOLVED}{rest}",
            0,
            form="sections",
            sections=_SECTIONS[1:4],
        )
        for part, rest in (("weight", " one kernel"), ("bias", ""))
    ),
    *(weight(name, f"mamba.{name}", "recurrent_heads", 0) for name in ("dt_bias", "A_log", "D")),
    weight("norm.weight", "mamba.norm.weight", "recurrent_values", 0),
    weight("out_proj.weight", "mamba.out_proj.weight", "hidden recurrent_values", 1),
)


@dataclass(frozen=True)
class Mamba(Recurrence):
    """Its keys, queries and values are B, C and x."""

    title = "Mamba-2 layers"
    groups_title = "groups"
    gates_per_head = 1

    def weights(self, hf: HfConfig) -> tuple[Weight, ...]:
        return _WEIGHTS

    def megatron_options(self, hf: HfConfig) -> dict[str, Any]:
        return {
            "mamba_num_heads": self.num_heads,
            "mamba_head_dim": self.value_dim,
            "mamba_num_groups": self.num_groups,
            "mamba_state_dim": self.key_dim,
        }

    def put_into(self, layer: Any, hf: HfConfig, *, is_fused: bool) -> None:
        from megatron.core.extensions import transformer_engine as te
        from megatron.core.ssm import mamba_mixer
        from megatron.core.tensor_parallel.layers import RowParallelLinear
        from megatron.core.transformer.spec_utils import ModuleSpec

        from bapo_megatron.policy.local_layers import NormColumnParallelLinear
        from bapo_megatron.policy.mixers.mamba_scan import PackedMambaMixer, use_twins

        if is_fused:
            if not mamba_mixer.HAVE_MAMBA_SSM or mamba_mixer.causal_conv1d_fn is None:
                raise ValueError(
                    "mamba-ssm, causal-conv1d: must be installed for a model with Mamba-2 layers "
                    "on a GPU with Transformer Engine; install them (docs/launch.md)"
                )
            linears = te.TELayerNormColumnParallelLinear, te.TERowParallelLinear
        else:
            use_twins()
            linears = NormColumnParallelLinear, RowParallelLinear
        layer.submodules.self_attention = ModuleSpec(
            PackedMambaMixer,
            params={"d_model": hf.hidden_size, "d_conv": self.kernel_size},
            submodules=mamba_mixer.MambaMixerSubmodules(*linears),
        )

    def flops(self, hf: HfConfig) -> tuple[int, int]:
        """See ``Mixer``; it reads and writes its state once for each token."""
        return 4 * self.state_size, 0

    def saved(self, share: Share, *, is_recomputed: bool) -> dict[str, float]:
        """See ``Mixer``; read off its modules.

        The kernels keep the projection, and what they return before its gate. Our twin also keeps
        what each operation between them needs, mostly in float32.
        """
        heads, key, value = self.num_heads // share.tensor, self.key_dim, self.value_dim
        inner = share.divided(self.num_values)
        states = share.divided(2 * self.num_keys)
        groups = self.num_groups // share.tensor
        tensors: dict[str, float] = {
            "projection": 2 * inner + states + share.element_bytes * heads,
            "output of the scan": inner,
            "gated output": inner,
            "input of the output product": inner,
        }
        if share.is_local:
            copies = 2 if share.element_bytes == FLOAT32_BYTES else 4
            tensors["gated output"] = FLOAT32_BYTES * heads * value
            tensors["SiLU of z, and the normed output"] = 2 * inner
            tensors["convolution, before and after, and its SiLU"] = 3 * (inner + states)
            tensors["B and C of groups"] = copies * FLOAT32_BYTES * groups * key
            tensors["scan"] = heads * (12 * value + 16 * key + key * value / 16 + 788) + 24
        tensors["1/rms of groups"] = FLOAT32_BYTES * groups
        return tensors
