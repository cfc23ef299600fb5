"""The settings of SGLang servers: their addresses, and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bapo_megatron.config.check import check_allowed, check_heads, check_model_dir, check_unique
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.section import split_address
from bapo_megatron.engine.sglang.keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from bapo_megatron.runtime.files import read_regular
from bapo_megatron.runtime.gpus import count_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bapo_megatron.config.rollout import RolloutConfig, ServerConfig
    from bapo_megatron.config.schema import RunConfig

VERSION = "0.5.23"
"""The SGLang that requirements/ installs and the tests run; older servers are refused."""

ALGORITHMS = {"none": None, "draft": "STANDALONE", "mtp": "EAGLE"}
"""SGLang's ``speculative_algorithm`` for each ``rollout.server.speculative.method``."""

SERVERS_KEY = "rollout.servers"
_MAX_PORT = 65535
_FP8_ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose FP8 weights SGLang can replace (``--load-format=flash_rl``)."""
_ADAPTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose adapters the tests run in SGLang."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Their linears; SGLang joins those before ``o_proj``, and those before ``down_proj``."""
_DRAFT_SETTINGS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("colocated", (False,), "a server that releases its memory loses the draft model"),
    ("weight_sync.method", ("broadcast", "tensor"), "the draft model would load the policy's"),
)
_LORA_SETTINGS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("weight_sync.method", ("tensor", "disk"), "SGLang takes no adapter from a group"),
    ("weight_sync.in_flight", ("abort",), "a paused request keeps the adapter that it began with"),
    ("colocated", (False,), "a server that releases its memory loses the base"),
    ("server.quantization", ("none",), "log-probs of adapters on a rounded base are not tested"),
    ("server.speculative.method", ("none",), "drafts with adapters are not tested"),
)
"""Keys of ``rollout``, the values with which SGLang drafts, or takes adapters; why no others."""
_KEYED_ARGUMENTS = {"--speculative": "speculative", "--quantization": "quantization"}
"""Beginnings of SGLang's arguments that are keys of ``rollout.server``."""
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
    _check_extra_args(server.extra_args)
    fields = check_model_dir(config.model.path)
    check_heads(fields, "rollout.server.tensor", server.tensor)
    window, longest = fields.get("sliding_window", 4096), config.data.max_prompt_tokens
    longest += rollout.max_response_tokens
    if fields.get("model_type") == "mistral" and window is not None and longest > window:
        raise ConfigError(
            "rollout.max_response_tokens: with data.max_prompt_tokens must be at most the window "
            f"{window} of a mistral, got {longest}: SGLang {VERSION} attends to all tokens, the "
            "trainer to the window; lower one of them, or use rollout.engine: local"
        )
    _check_model_is_accelerated(fields, server, is_on_cpu=is_here and not num_gpus)
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
            f"broadcast by {sync.backend}: NCCL refuses two ranks on one GPU by default; set "
            "rollout.weight_sync.method=tensor"
        )


def _check_extra_args(extra_args: Sequence[str]) -> None:
    for argument in extra_args:
        if (name := argument.partition("=")[0]) in _SECRET_ARGUMENTS:
            raise ConfigError(
                f"rollout.server.extra_args: must hold no secret, got {name}: it would be in "
                "config.yaml and in logs; leave it out: the trainer's own servers have one, and "
                f"serve takes {_SECRET_ARGUMENTS[name]} (docs/launch.md)"
            )
        for beginning, key in _KEYED_ARGUMENTS.items():
            if argument.startswith(beginning):
                raise ConfigError(
                    f"rollout.server.extra_args: must hold no {beginning}…, got {argument}: its "
                    f"effect on log-probs would not be checked; set rollout.server.{key}"
                )


def check_acceleration(config: RunConfig) -> None:
    """Check that speculation and quantization leave usable log-probs and take weight syncs."""
    rollout, algorithm, server = config.rollout, config.algorithm, config.rollout.server
    method = server.speculative.method
    if server.quantization != "none" and algorithm.correction.kind == "none":
        raise ConfigError(
            "algorithm.correction.kind: must not be none with rollout.server.quantization: "
            f"{server.quantization}, which samples from another policy than the trainer's; set "
            "algorithm.behaviour=recomputed and a correction such as token"
        )
    if method == "none":
        return
    if server.max_running_requests is None:
        raise ConfigError(
            f"rollout.server.max_running_requests: must be set with speculative.method: {method}, "
            "got null, for which SGLang takes 48; set it"
        )
    if algorithm.router_replay == "rollout":
        raise ConfigError(
            "algorithm.router_replay: must not be rollout with rollout.server.speculative.method: "
            f"{method}: SGLang may not return the experts of accepted tokens; change one of them"
        )
    check_allowed(rollout, _DRAFT_SETTINGS, f"rollout.server.speculative.method: {method}")


def check_adapters(config: RunConfig) -> None:
    """Check that SGLang can take adapters in place of merged weights."""
    if not config.sends_adapters:
        return
    setting = "rollout.weight_sync.adapters: adapter"
    check_allowed(config.rollout, _LORA_SETTINGS, setting)
    model_type = check_model_dir(config.model.path).get("model_type")
    if model_type not in _ADAPTED_MODEL_TYPES:
        raise ConfigError(
            f"model.path: model_type must be one of {', '.join(_ADAPTED_MODEL_TYPES)} with "
            f"{setting}, got {model_type}; set rollout.weight_sync.adapters=merged"
        )
    targets = {*(config.model.lora.targets or LORA_TARGETS)}
    for joined in ({*LORA_TARGETS[:3]}, {*LORA_TARGETS[4:6]}):
        if targets & joined and joined - targets:
            raise ConfigError(
                f"model.lora.targets: must name all or none of {', '.join(sorted(joined))} with "
                f"{setting}, got {', '.join(sorted(targets))}: SGLang has one layer for them; name "
                "the others, or set rollout.weight_sync.adapters=merged"
            )


def _check_model_is_accelerated(
    fields: dict[str, Any], server: ServerConfig, *, is_on_cpu: bool
) -> None:
    """Check that this machine can accelerate the model of a config.json."""
    method, architectures = server.speculative.method, fields.get("architectures", [])
    if is_on_cpu and (method, server.quantization) != ("none", "none"):
        raise ConfigError(
            f"rollout.server: must have speculative.method: none and quantization: none without a "
            f"GPU, got {method} and {server.quantization}: on a CPU SGLang accepts the likeliest "
            "token instead of sampling; leave them out"
        )
    if server.quantization != "none" and not {*architectures} & {*_FP8_ARCHITECTURES}:
        raise ConfigError(
            f"rollout.server.quantization: needs one of {', '.join(_FP8_ARCHITECTURES)}, whose "
            f"weights SGLang can replace, got {architectures} in model.path; leave it out"
        )
    if server.speculative.draft_model is not None:
        check_model_dir(server.speculative.draft_model, "rollout.server.speculative.draft_model")
    names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    if method == "mtp" and not any(fields.get(name) for name in names):
        raise ConfigError(
            "rollout.server.speculative.method: mtp needs layers for multi-token prediction "
            f"({' or '.join(names)} in config.json), got none in model.path; use another method"
        )
