"""``rollout.engine: local``, as the commands see it; imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

from bapo_megatron.config.check import check_allowed, check_model_dir
from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend

_DENSE = ("qwen2", "qwen3", "llama", "mistral", "gemma3", "gemma3_text", "olmo2")
_EXPERTS = ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2", "gpt_oss")
_HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
MODEL_TYPES = (*_DENSE, *_EXPERTS, *_HYBRIDS, "nemotron_h")
"""Models whose layers are those that ``cache`` has."""
_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}

_NO_SERVER = "it has no server"
_ALLOWED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("servers", ((),), _NO_SERVER),
    ("servers_file", (None,), _NO_SERVER),
    ("min_servers", (None, 1), _NO_SERVER),
    ("server.count", (1,), _NO_SERVER),
    ("server.tensor", (1,), "the model is on one device"),
    ("colocated", (False,), "its memory is the collector's"),
    ("weight_sync.in_flight", ("abort", "retract"), "it drops the KV cache of old weights"),
    ("weight_sync.method", ("broadcast", "disk"), "weights arrive by a group or a directory"),
    ("weight_sync.backend", ("auto", "gloo"), "NCCL refuses two ranks on one GPU by default"),
)
"""Keys of ``rollout``, the values that it supports, and why no others."""


class LocalKind:
    """The model in the collector's process, without servers; repeats bit for bit."""

    packages: ClassVar[Mapping[str, str]] = {}
    """None beyond the trainer's."""
    model_types = MODEL_TYPES

    def check(self, config: RunConfig, *, is_here: bool = True) -> None:
        check_allowed(config.rollout, _ALLOWED, "rollout.engine: local")
        hf_config = check_model_dir(config.model.path)
        names = ("model_type", "use_sliding_window", "layer_types")
        model_type, is_sliding, layers = map(hf_config.get, names)
        others = set(layers or ()) - _LAYERS
        if model_type not in MODEL_TYPES or is_sliding or others:
            raise ConfigError(
                f"model.path: with rollout.engine=local, model_type must be one of "
                f"{', '.join(MODEL_TYPES)}, without use_sliding_window, and layers of "
                f"{', '.join(sorted(_LAYERS))}, got {model_type}, {is_sliding} and "
                f"{sorted(others) or layers}; choose another model, or another rollout.engine"
            )

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        from bapo_megatron.engine.local.engine import LocalBackend  # imports torch

        return LocalBackend(config.model, config.rollout.local, device)

    def serve(self, config: RunConfig, show: Callable[[str], None], *, key: str = "") -> NoReturn:
        """Raise: there are no servers."""
        raise ConfigError(
            "rollout.engine: must have servers for serve, got local, which samples in the "
            "trainer's process; use another rollout.engine"
        )
