"""``rollout.engine: local``, as the commands see it; imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from bapo_megatron.config.check import check_model
from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend

MODEL_TYPES = ("qwen2", "qwen3", "llama")
"""All layers of these keep keys and values of all positions, which is what ``cache`` holds."""


class Kind:
    """The model in the collector's process: no server, and repeats bit for bit."""

    packages: ClassVar[Mapping[str, str]] = {}
    """None but the trainer's own."""

    def check(self, config: RunConfig, *, is_here: bool = True) -> None:
        """See ``EngineKind``."""
        for key, wanted, value, reason in _broken_rules(config.rollout):
            raise ConfigError(
                f"{key}: must be {wanted} with rollout.engine=local, got {value}: {reason}; leave "
                "it out, or use another rollout.engine"
            )
        for field, wanted, value in _unknown_cache(check_model(config.model)):
            raise ConfigError(
                f"model.path: {field} must be {wanted} with rollout.engine=local, got {value}: its "
                "cache holds keys and values of all positions; choose another model, or use "
                "another rollout.engine"
            )

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        """See ``EngineKind``."""
        from bapo_megatron.engine.local.engine import LocalBackend  # imports torch

        return LocalBackend(config.model, config.rollout.local, device)

    def serve(self, config: RunConfig, show: Callable[[str], None]) -> NoReturn:
        """Refuse."""
        raise ConfigError(
            "rollout.engine: must have servers for serve, got local, which samples in the "
            "trainer's process; use another rollout.engine"
        )


def _broken_rules(rollout: RolloutConfig) -> Iterator[tuple[str, str, object, str]]:
    """Key, rule, value and reason of every setting that cannot be kept."""
    sync, server, no_server = rollout.weight_sync, rollout.server, "it has no server"
    if rollout.servers:
        yield "rollout.servers", "empty", ", ".join(rollout.servers), no_server
    if rollout.servers_file is not None:
        yield "rollout.servers_file", "null", rollout.servers_file, no_server
    if (rollout.min_servers or 1) > 1:
        yield "rollout.min_servers", "1", rollout.min_servers, no_server
    if rollout.colocated:
        yield "rollout.colocated", "false", "true", "its memory is the collector's"
    if server.count > 1:
        yield "rollout.server.count", "1", server.count, no_server
    if server.tensor > 1:
        yield "rollout.server.tensor", "1", server.tensor, "the model is on one device"
    for name, rule, refused, reason in (
        ("in_flight", "abort or retract", "in_place", "keys and values of old weights are dropped"),
        ("method", "broadcast or disk", "tensor", "it takes weights by a group or a directory"),
        ("backend", "auto or gloo", "nccl", "NCCL has no two members on one GPU"),
    ):
        if getattr(sync, name) == refused:
            yield f"rollout.weight_sync.{name}", rule, refused, reason


def _unknown_cache(hf_config: dict[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Field, rule and value of each setting that gives the model another kind of cache."""
    model_type = hf_config.get("model_type")
    if model_type not in MODEL_TYPES:
        yield "model_type", f"one of {', '.join(MODEL_TYPES)}", model_type
    if hf_config.get("use_sliding_window"):
        yield "use_sliding_window", "false", "true"
    if others := sorted(set(hf_config.get("layer_types") or ()) - {"full_attention"}):
        yield "layer_types", "full_attention only", ", ".join(others)
