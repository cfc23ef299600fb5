"""Rules that cross sections of the configuration, or need the files it names.

They run once, before anything is started, so that no run ends after an hour with an error that
was there from the beginning. Rules about one kind of engine are with the engine.

What a parallel layout pads packed tokens to.
"""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, NamedTuple

from bapo_megatron.config.check_sections import (
    check_eval,
    check_heads,
    check_layers,
    check_model,
    check_positions,
    check_rendering,
    check_rewards,
    check_shaping,
    check_train_data,
    check_training_eval,
    check_weight_sync,
)
from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from bapo_megatron.config.megatron import MegatronConfig, ParallelConfig
    from bapo_megatron.config.schema import LogConfig, RunConfig


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
    hf_config = check_model(config.model)
    check_heads(hf_config, "parallel.tensor", config.parallel.tensor)
    check_layers(hf_config, config.parallel, config.megatron)
    _check_optimizer(config)
    if not owns_files:
        return
    _check_log(config.log)
    if config.replay.dumps is not None:
        _check_replay(config.replay.dumps, config.train.steps)
    else:
        _check_batch(config)
        _check_lag(config)
        check_train_data(config.data, "unless replay is set")
        check_rendering(config.data)
        _check_budget(config)
        check_positions(hf_config, config, "rollout", config.rollout.max_response_tokens)
        check_weight_sync(config.rollout, config.parallel)
        check_rewards(config.reward.functions)
        check_shaping(config.reward, config.rollout.max_response_tokens)
    check_training_eval(config)
    if config.eval.sets and config.replay.dumps is None:
        check_eval(hf_config, config)


def check_eval_config(config: RunConfig) -> None:
    """Hold the rules of an evaluation without training.

    Args:
        config: A validated configuration; what concerns training only is not looked at.

    Raises:
        ConfigError: As by ``check_config``.
    """
    hf_config = check_model(config.model)
    check_rendering(config.data)
    if not config.eval.sets:
        raise ConfigError(
            "eval.sets: needs at least one set, got none; set eval.sets=[{path: FILE}]"
        )
    check_eval(hf_config, config)


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
    check_train_data(config.data, "to generate")
    check_rendering(config.data)
    hf_config = check_model(config.model)
    check_positions(hf_config, config, "rollout", config.rollout.max_response_tokens)
    check_rewards(config.reward.functions)
    check_shaping(config.reward, config.rollout.max_response_tokens)


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


def _check_lag(config: RunConfig) -> None:
    """Nothing contradicts the age that ``rollout.fixed_lag`` gives to every token."""
    lag, max_age = config.rollout.fixed_lag, config.rollout.staleness.max_age
    if lag is None:
        return
    if config.replay.batches:
        raise ConfigError(
            f"replay.batches: must be 0 with rollout.fixed_lag, got {config.replay.batches}: "
            "groups of earlier batches are older; leave one of them out"
        )
    age = lag * config.algorithm.updates_per_batch * config.algorithm.epochs
    if max_age is not None and max_age < age:
        raise ConfigError(
            "rollout.staleness.max_age: must be at least the age that rollout.fixed_lag gives to "
            f"every token, {age} updates (fixed lag × updates per batch × epochs), got {max_age}; "
            "raise it, or leave one of them out"
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


FP8_MULTIPLE = 128
"""Tokens of a micro-batch on one rank with 8-bit products: their scaling blocks have 128 rows."""


class PackingMultiples(NamedTuple):
    """Lengths are padded to multiples of these; tokens are those of all context-parallel ranks."""

    per_sequence: int
    """Each sequence; divides ``total``."""
    total: int
    """Each micro-batch."""


def packing_multiples(parallel: ParallelConfig, megatron: MegatronConfig) -> PackingMultiples:
    """Return what TP × CP × sequence parallelism and 8-bit products need."""
    # Context-parallel ranks hold two chunks of every sequence each.
    per_sequence = 2 * parallel.context if parallel.context > 1 else 1
    per_rank = math.lcm(
        parallel.tensor if parallel.sequence else 1,
        FP8_MULTIPLE if megatron.fp8 != "none" else 1,
    )
    return PackingMultiples(per_sequence, math.lcm(per_sequence, per_rank * parallel.context))
