"""Rules about servers and how they get weights; see ``check``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.check_model import check_heads
from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config.megatron import ParallelConfig
    from bapo_megatron.config.rollout import RolloutConfig

_LAST_PORT = 65535
_API_KEY_VARIABLE = "BAPO_MEGATRON_API_KEY"
_SECRET_ARGUMENTS = {
    "--api-key": _API_KEY_VARIABLE,
    "--admin-api-key": "BAPO_MEGATRON_ADMIN_API_KEY",
}
"""Of SGLang, and the variables that take their place."""


def check_servers(hf_config: dict[str, Any], rollout: RolloutConfig) -> None:
    """Servers are addresses without secrets, or can be started here."""
    if not rollout.servers:
        check_own_servers(hf_config, rollout)
    for server in rollout.servers:
        if "@" in server:
            raise ConfigError(
                "rollout.servers: must hold no user or password, got an address with '@': it would "
                f"be in config.yaml and in logs; set {_API_KEY_VARIABLE} instead (docs/launch.md)"
            )
        if not server.startswith(("http://", "https://")):
            raise ConfigError(
                f"rollout.servers: must be addresses like http://host:port, got '{server}'; "
                f"did you mean 'http://{server}'?"
            )
    refuse_twice("rollout.servers", rollout.servers)


def check_own_servers(hf_config: dict[str, Any], rollout: RolloutConfig) -> None:
    """This machine can run the servers, and their command lines hold no secrets."""
    import torch  # takes seconds, and most commands do not need it

    server = rollout.server
    for argument in server.extra_args:
        if (name := argument.partition("=")[0]) in _SECRET_ARGUMENTS:
            raise ConfigError(
                f"rollout.server.extra_args: must hold no secret, got {name}: it would be in "
                "config.yaml and in logs; leave it out: the trainer's own servers have one, and "
                f"serve takes {_SECRET_ARGUMENTS[name]} (docs/launch.md)"
            )
    check_heads(hf_config, "rollout.server.tensor", server.tensor)
    if server.port and server.port + server.count - 1 > _LAST_PORT:
        raise ConfigError(
            f"rollout.server.port: the last of rollout.server.count = {server.count} servers must "
            f"have at most {_LAST_PORT}, got {server.port} for the first; lower it"
        )
    num_gpus, wanted = torch.cuda.device_count(), server.count * server.tensor
    if num_gpus and wanted > num_gpus:
        raise ConfigError(
            "rollout.server.count: count × tensor must be at most this machine's "
            f"{num_gpus} visible GPUs, got {server.count} × {server.tensor}; lower one of them"
        )
    if not rollout.colocated:
        return
    if not num_gpus:
        raise ConfigError(
            "rollout.colocated: needs a GPU, whose memory servers can release, got none; set "
            "rollout.colocated=false"
        )
    sync = rollout.weight_sync
    if sync.method == "broadcast" and sync.backend != "gloo":
        raise ConfigError(
            "rollout.weight_sync.method: must be tensor or disk with rollout.colocated, got "
            f"broadcast by {sync.backend}: NCCL has no groups with two processes on one GPU; set "
            "rollout.weight_sync.method=tensor"
        )


def check_weight_sync(rollout: RolloutConfig, parallel: ParallelConfig) -> None:
    """The trainer can push weights, and its ranks wait long enough for it."""
    sync, patience_s = rollout.weight_sync, rollout.health.patience_s
    if sync.method == "broadcast" and sync.backend == "nccl":
        import torch  # takes seconds

        if not torch.cuda.is_available():
            raise ConfigError(
                "rollout.weight_sync.backend: must be auto or gloo where rank 0 has no GPU, got "
                "nccl; set rollout.weight_sync.backend=auto"
            )
    if patience_s >= parallel.timeout_s:
        raise ConfigError(
            "rollout.health.patience_s: must be below parallel.timeout_s = "
            f"{parallel.timeout_s:g}, got {patience_s:g}: the other ranks wait no longer while "
            "rank 0 looks for a server that takes weights; lower it, or raise parallel.timeout_s"
        )


def refuse_twice(key: str, names: tuple[str, ...] | list[str]) -> None:
    """No name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{key}: must differ, got '{name}' {count} times; keep or rename one")
