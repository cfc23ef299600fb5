"""Rules that cross sections of the configuration, or need the files it names.

They run once, before anything is started, so that no run ends after an hour with an error that
was there from the beginning.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.multiples import packing_multiples

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.config.schema import DataConfig, DatasetConfig, LogConfig, RunConfig

_LAST_PORT = 65535
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""File formats of prompts."""


def check_config(config: RunConfig, world_size: int, *, owns_files: bool = True) -> None:
    """Hold every rule that a single section cannot see.

    Args:
        config: A validated configuration.
        world_size: Number of trainer ranks.
        owns_files: Whether this process reads prompts and batches (rank 0); the other ranks need
            the model only, and may be on nodes without the rest.

    Raises:
        ConfigError: The first rule that is broken: key, rule, value and remedy on one line.
    """
    _check_apex()
    _check_parallel(config.parallel, world_size)
    hf_config = _check_model(config.model)
    _check_heads(hf_config, "parallel.tensor", config.parallel.tensor)
    _check_layers(hf_config, config.parallel, config.megatron)
    _check_optimizer(config)
    if not owns_files:
        return
    _check_log(config.log)
    if config.replay.dumps is not None:
        _check_replay(config.replay.dumps, config.train.steps)
    else:
        _check_batch(config)
        _check_train_data(config.data)
        _check_budget(config)
        _check_positions(hf_config, config, "rollout", config.rollout.max_response_tokens)
        _check_servers(hf_config, config.rollout)
    if config.eval.every_steps and not config.eval.sets:
        raise ConfigError(
            f"eval.every_steps: needs eval.sets, got {config.eval.every_steps} without a set; "
            "add a set, or leave it 0"
        )
    if config.eval.sets and config.replay.dumps is None:
        _check_eval(hf_config, config)


def check_eval_config(config: RunConfig) -> None:
    """Hold the rules of an evaluation without training.

    Args:
        config: A validated configuration; what concerns training only is not looked at.

    Raises:
        ConfigError: As by ``check_config``.
    """
    hf_config = _check_model(config.model)
    _check_servers(hf_config, config.rollout)
    if not config.eval.sets:
        raise ConfigError(
            "eval.sets: needs at least one set, got none; set eval.sets=[{path: FILE}]"
        )
    _check_eval(hf_config, config)


def check_generate_config(config: RunConfig) -> None:
    """Hold the rules of generation without training.

    Args:
        config: A validated configuration; what concerns training only is not looked at.

    Raises:
        ConfigError: As by ``check_config``.
    """
    if config.replay.dumps is not None:
        raise ConfigError(
            f"replay: must be left out for generate, got '{config.replay.dumps}': these samples "
            "exist already; set replay.dumps=null"
        )
    if config.data.train is None:
        raise ConfigError("data.train: needed to generate, got null; set data.train.path=FILE")
    hf_config = _check_model(config.model)
    _check_dataset(config.data.train, "data.train")
    _check_positions(hf_config, config, "rollout", config.rollout.max_response_tokens)
    _check_servers(hf_config, config.rollout)


def check_serve_config(config: RunConfig) -> None:
    """Hold the rules of servers without a trainer.

    Args:
        config: A validated configuration; only model and servers are looked at.

    Raises:
        ConfigError: As by ``check_config``.
    """
    hf_config = _check_model(config.model)
    if config.rollout.colocated:
        raise ConfigError(
            "rollout.colocated: must be false for serve, got true: only the trainer's own servers "
            "share its GPUs; leave it out"
        )
    if config.rollout.server.host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            "rollout.server.host: must be one address, which the trainer can use, got "
            f"'{config.rollout.server.host}'; give this node's"
        )
    _check_own_servers(hf_config, config.rollout)


def _check_apex() -> None:
    """Megatron takes any package of this name for NVIDIA's."""
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        raise ConfigError(
            "apex: the installed package is not NVIDIA's (the package index has an unrelated one "
            "of this name), or lacks its CUDA extensions, got no module 'amp_C'; pip uninstall "
            "apex, or build NVIDIA's (docs/launch.md)"
        )


def _check_parallel(parallel: ParallelConfig, world_size: int) -> None:
    names = [n for n in ("tensor", "pipeline", "context") if getattr(parallel, n) > 1]
    replica_size = math.prod(getattr(parallel, name) for name in names)
    if world_size % replica_size:
        raise ConfigError(
            f"{' × '.join(f'parallel.{name}' for name in names)}: must divide the number of ranks, "
            f"got {replica_size} with {world_size} ranks; start a multiple of {replica_size} "
            f"ranks, or change {'it' if len(names) == 1 else 'them'}"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            "parallel.virtual_pipeline: needs parallel.pipeline > 1, got "
            f"{parallel.virtual_pipeline} with 1; set it to 1, or raise parallel.pipeline"
        )
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError(
            "parallel.sequence: needs parallel.tensor > 1, got 1; "
            "set parallel.sequence=false, or raise parallel.tensor"
        )


def _check_layers(
    hf_config: dict[str, Any], parallel: ParallelConfig, megatron: MegatronConfig
) -> None:
    layers = hf_config.get("num_hidden_layers")
    parts = parallel.pipeline * parallel.virtual_pipeline
    if isinstance(layers, int) and layers % parts:
        raise ConfigError(
            f"parallel.pipeline: pipeline × virtual_pipeline = {parts} must divide the model's "
            f"{layers} layers; choose other sizes"
        )
    offloaded = megatron.activation_offload_layers
    if offloaded and parallel.pipeline > 1:
        raise ConfigError(
            "megatron.activation_offload_layers: needs parallel.pipeline = 1, got "
            f"{parallel.pipeline}; set one of them to its default"
        )
    if isinstance(layers, int) and offloaded >= layers:
        raise ConfigError(
            f"megatron.activation_offload_layers: must be below the model's {layers} layers, got "
            f"{offloaded}; lower it"
        )


def _check_model(model: ModelConfig) -> dict[str, Any]:
    """The model directory is complete; returns its config.json."""
    if not model.path.is_dir():
        raise ConfigError(
            f"model.path: no such directory '{model.path}'; download a Hugging Face model to it, "
            "or run make-tiny"
        )
    config_file = model.path / "config.json"
    if not config_file.is_file():
        raise ConfigError(
            f"model.path: '{model.path}' has no config.json; give a Hugging Face model directory"
        )
    if not any(model.path.glob("*.safetensors")):
        raise ConfigError(
            f"model.path: '{model.path}' has no *.safetensors; save the model with "
            "save_pretrained(safe_serialization=True)"
        )
    if not (model.path / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"model.path: '{model.path}' has no tokenizer_config.json; save the tokenizer there"
        )
    try:
        hf_config = json.loads(config_file.read_text())
    except ValueError as error:
        raise ConfigError(
            f"model.path: '{config_file}' is not valid JSON ({error}); download the model again"
        ) from error
    if not isinstance(hf_config, dict):
        raise ConfigError(
            f"model.path: '{config_file}' must hold a JSON object; download the model again"
        )
    return hf_config


def _check_heads(hf_config: dict[str, Any], key: str, tensor_size: int) -> None:
    for name, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key/value heads"),
    ):
        heads = hf_config.get(name) or 0
        if heads % tensor_size:
            raise ConfigError(
                f"{key}: must divide the model's {heads} {what}, got {tensor_size}; "
                "choose a divisor"
            )


def _check_log(log: LogConfig) -> None:
    if log.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb_project: is '{log.wandb_project}' but wandb is not installed; "
            "pip install wandb, or leave the project empty"
        )


def _check_batch(config: RunConfig) -> None:
    groups, updates = config.rollout.groups_per_step, config.algorithm.updates_per_batch
    if groups % updates:
        raise ConfigError(
            "algorithm.updates_per_batch: must divide rollout.groups_per_step, got "
            f"{updates} with {groups} groups; choose a divisor of {groups}"
        )


def _check_replay(dumps: Path, steps: int) -> None:
    if not dumps.is_dir():
        raise ConfigError(
            f"replay: no such directory '{dumps}'; give the rollouts directory of a run"
        )
    present = {path.name for path in dumps.glob("step_*.parquet")}
    if not present:
        raise ConfigError(
            f"replay: '{dumps}' holds no step_*.parquet; give the rollouts directory of a run "
            "that had rollout.dump=true"
        )
    missing = next((n for n in range(steps) if f"step_{n:06d}.parquet" not in present), None)
    if missing is not None:
        remedy = f"set train.steps={missing}, or " if missing else ""
        raise ConfigError(
            f"replay: '{dumps}' must hold a dump for each of train.steps = {steps} steps, got no "
            f"step_{missing:06d}.parquet; {remedy}copy what is missing"
        )


def _check_train_data(data: DataConfig) -> None:
    if data.train is None:
        raise ConfigError(
            "data.train: needed unless replay is set, got null; set data.train.path=FILE"
        )
    _check_dataset(data.train, "data.train")


def _check_servers(hf_config: dict[str, Any], rollout: RolloutConfig) -> None:
    if not rollout.servers:
        _check_own_servers(hf_config, rollout)
    for server in rollout.servers:
        if not server.startswith(("http://", "https://")):
            raise ConfigError(
                f"rollout.servers: must be addresses like http://host:port, got '{server}'; "
                f"did you mean 'http://{server}'?"
            )
    _refuse_twice("rollout.servers", rollout.servers)


def _check_own_servers(hf_config: dict[str, Any], rollout: RolloutConfig) -> None:
    import torch  # takes seconds, and most commands do not need it

    server = rollout.server
    _check_heads(hf_config, "rollout.server.tensor", server.tensor)
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


def _check_dataset(dataset: DatasetConfig, key: str) -> None:
    if not dataset.path.is_file():
        raise ConfigError(
            f"{key}.path: no such file '{dataset.path}'; "
            "paths are relative to the current directory"
        )
    if dataset.path.suffix not in DATA_SUFFIXES:
        raise ConfigError(
            f"{key}.path: must end in {', '.join(DATA_SUFFIXES)}, got '{dataset.path}'; "
            "convert the file"
        )


def _check_budget(config: RunConfig) -> None:
    """Every sequence that generation may produce fits one forward pass of the trainer."""
    needed = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    multiples = packing_multiples(config.parallel, config.megatron)
    padded = -(-needed // multiples.per_sequence) * multiples.per_sequence
    ranks, given = config.parallel.context, config.train.max_tokens_per_micro_batch
    budget = ranks * given
    if budget - budget % multiples.total < padded:
        in_multiples = f" in multiples of {multiples.total}" if multiples.total > 1 else ""
        over_ranks = f" over {ranks} context-parallel ranks" if ranks > 1 else ""
        raise ConfigError(
            "train.max_tokens_per_micro_batch: must hold data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {needed}{in_multiples}{over_ranks}, got {given}; "
            "raise it"
        )


def _check_positions(
    hf_config: dict[str, Any], config: RunConfig, section: str, max_response_tokens: int
) -> None:
    """Every sequence that generation may produce fits the model's positions."""
    limit = hf_config.get("max_position_embeddings")
    prompt = config.data.max_prompt_tokens
    if limit is not None and prompt + max_response_tokens > limit:
        raise ConfigError(
            f"{section}.max_response_tokens: must leave room for data.max_prompt_tokens = "
            f"{prompt} in the model's {limit} positions, got {max_response_tokens}; "
            "lower one of them"
        )


def _check_eval(hf_config: dict[str, Any], config: RunConfig) -> None:
    evaluation = config.eval
    for number, dataset in enumerate(evaluation.sets):
        _check_dataset(dataset, f"eval.sets[{number}]")
    _refuse_twice("eval.sets", [s.name or s.path.stem for s in evaluation.sets])
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        raise ConfigError(
            "eval.samples_per_prompt: must be 1 with eval.temperature = 0, since greedy samples "
            f"are equal, got {evaluation.samples_per_prompt}; set 1, or raise the temperature"
        )
    _check_positions(hf_config, config, "eval", evaluation.max_response_tokens)


def _check_optimizer(config: RunConfig) -> None:
    optimizer, algorithm = config.optimizer, config.algorithm
    if optimizer.schedule != "constant" and optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr: must be at most optimizer.lr = {optimizer.lr}, got "
            f"{optimizer.min_lr}; lower it"
        )
    updates = config.train.steps * algorithm.updates_per_batch * algorithm.epochs
    if optimizer.warmup_updates > updates:
        raise ConfigError(
            f"optimizer.warmup_updates: must be at most the run's {updates} updates "
            f"(steps × updates per batch × epochs), got {optimizer.warmup_updates}; lower it"
        )


def _refuse_twice(key: str, names: tuple[str, ...] | list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{key}: must differ, got '{name}' {count} times; keep or rename one")
