"""The settings of SGLang servers: their addresses, and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.config.check import check_heads, check_model, check_unique
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.section import split_address
from bapo_megatron.engine.sglang.keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from bapo_megatron.runtime.files import read_regular
from bapo_megatron.runtime.gpus import count_gpus

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.config.schema import RunConfig

VERSION = "0.5.23"
"""The SGLang that requirements/ installs and the tests run; older servers are refused."""

SERVERS_KEY = "rollout.servers"
_MAX_PORT = 65535
_SECRET_ARGUMENTS = {"--api-key": API_KEY_VARIABLE, "--admin-api-key": ADMIN_API_KEY_VARIABLE}
"""SGLang's arguments for keys, and the variables to use instead."""


def server_addresses(rollout: RolloutConfig) -> list[str]:
    """Return the addresses in ``rollout.servers`` or, at present, in ``rollout.servers_file``.

    Raises:
        ConfigError: They are unusable.
    """
    path = rollout.servers_file
    key = SERVERS_KEY if path is None else "rollout.servers_file"
    words = rollout.servers if path is None else _read(path)
    addresses = [address.rstrip("/") for address in words]
    for address in addresses:
        if "@" in address:
            raise ConfigError(
                f"{key}: must hold no user or password, got an address with '@': it would be in "
                f"config.yaml and in logs; set {API_KEY_VARIABLE} instead (docs/launch.md)"
            )
        if split_address(address) is None or "?" in address or "#" in address:
            raise ConfigError(
                f"{key}: must be addresses like http://host:port, got {address!r}; correct it"
            )
    check_unique(key, addresses)
    return addresses


def _read(path: Path) -> list[str]:
    """Return the words of a file that ends with a newline."""
    rule = f"rollout.servers_file: '{path}' must hold an address per line and end with a newline"
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{rule}, got {error}; correct the file") from error
    if not text.strip() or not text.endswith("\n"):
        raise ConfigError(f"{rule}, got {text[-40:]!r} at its end; correct the file")
    return text.split()


def check_own_servers(config: RunConfig, *, is_here: bool = True) -> None:
    """Check that the servers can be started, and that their command lines hold no secrets.

    Without ``is_here``, ignore this machine's GPUs.
    """
    rollout, server = config.rollout, config.rollout.server
    num_gpus = count_gpus() if is_here else 0
    if num_gpus and server.first_gpu + server.count * server.tensor > num_gpus:
        raise ConfigError(
            "rollout.server.count: first_gpu + count × tensor must be at most this machine's "
            f"{num_gpus} visible GPUs, got {server.first_gpu} + {server.count} × {server.tensor}; "
            "lower one of them"
        )
    if rollout.colocated and is_here and not num_gpus:
        raise ConfigError(
            "rollout.colocated: needs servers on the trainer's GPUs, whose memory they release, "
            "got 0 visible GPUs; set rollout.colocated=false"
        )
    for argument in server.extra_args:
        if (name := argument.partition("=")[0]) in _SECRET_ARGUMENTS:
            raise ConfigError(
                f"rollout.server.extra_args: must hold no secret, got {name}: it would be in "
                "config.yaml and in logs; leave it out: the trainer's own servers have one, and "
                f"serve takes {_SECRET_ARGUMENTS[name]} (docs/launch.md)"
            )
    check_heads(check_model(config.model), "rollout.server.tensor", server.tensor)
    if server.port and server.port + server.count - 1 > _MAX_PORT:
        raise ConfigError(
            f"rollout.server.port: the last of rollout.server.count = {server.count} servers must "
            f"have at most {_MAX_PORT}, got {server.port} for the first; lower it"
        )
    health, restart_s = rollout.health, rollout.health.stuck_timeout_s + server.start_timeout_s
    if rollout.starts_servers and health.patience_s <= restart_s:
        raise ConfigError(
            "rollout.health.patience_s: must be above rollout.health.stuck_timeout_s + "
            f"rollout.server.start_timeout_s = {restart_s:g}, in which a stuck server is noticed "
            f"and started again, got {health.patience_s:g}; raise it, or lower one of them"
        )
    if not rollout.colocated:
        return
    if server.first_gpu:
        raise ConfigError(
            "rollout.server.first_gpu: must be 0 with rollout.colocated, whose servers are on the "
            f"trainer's GPUs, got {server.first_gpu}; leave it out"
        )
    sync = rollout.weight_sync
    if sync.method == "broadcast" and sync.backend != "gloo":
        raise ConfigError(
            "rollout.weight_sync.method: must be tensor or disk with rollout.colocated, got "
            f"broadcast by {sync.backend}: NCCL cannot place two ranks on one GPU; set "
            "rollout.weight_sync.method=tensor"
        )
