"""Rules that cross sections of the configuration, or need the files it names.

They run once, before anything is started, so that no run ends after an hour with an error that
was there from the beginning. Rules about one kind of engine are with the engine. Every check raises
``ConfigError`` for the first broken rule: key, rule, value and remedy on one line.
"""

import importlib.util
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bapo_megatron.config.data import DataConfig, DatasetConfig
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
from bapo_megatron.config.reward import RewardConfig, RewardFunctionConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import RunConfig

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""File formats of prompts."""
FP8_MULTIPLE = 128
"""Tokens of a micro-batch on one rank with 8-bit products: their scaling blocks have 128 rows."""
_RELATIVE = "paths are relative to the current directory"
_SET_NAME = re.compile(r"[A-Za-z0-9._-]+")
_BEST = re.compile(r"eval/(?P<name>[A-Za-z0-9._-]+)/(?P<score>[a-z0-9_]+)")


def check_config(config: RunConfig, world_size: int, *, owns_files: bool = True) -> None:
    """Check what training needs.

    Args:
        config: A validated configuration.
        world_size: Number of trainer ranks.
        owns_files: Whether this process reads prompts and batches (rank 0); the other ranks need
            the model only, and may be on nodes without the rest.
    """
    _check_apex()
    check_parallel(config.parallel, world_size)
    hf_config = check_model(config.model)
    check_heads(hf_config, "parallel.tensor", config.parallel.tensor)
    check_layers(hf_config, config.parallel, config.megatron)
    _check_optimizer(config)
    if not owns_files:
        return
    _check_wandb(config.log.wandb_project)
    if config.replay.dumps is not None:
        _check_replay(config.replay.dumps, config.train.steps)
    else:
        _check_batch(config)
        _check_lag(config)
        _check_train_data(config.data, "unless replay is set")
        _check_chat_template(config.data)
        _check_budget(config)
        _check_positions(hf_config, config, "rollout", config.rollout.max_response_tokens)
        _check_weight_sync(config.rollout, config.parallel)
        check_rewards(config.reward.functions)
        check_shaping(config.reward, config.rollout.max_response_tokens)
    if config.eval.every_steps and not config.eval.sets:
        raise ConfigError(
            f"eval.every_steps: needs eval.sets, got {config.eval.every_steps} without a set; "
            "add a set, or leave it 0"
        )
    if config.checkpoint.best:
        _check_best(config)
    if config.eval.sets and config.replay.dumps is None:
        _check_eval(hf_config, config)


def check_eval_config(config: RunConfig) -> None:
    """Check what an evaluation without training needs; see ``check_config``."""
    hf_config = check_model(config.model)
    _check_chat_template(config.data)
    if not config.eval.sets:
        raise ConfigError(
            "eval.sets: needs at least one set, got none; set eval.sets=[{path: FILE}]"
        )
    _check_eval(hf_config, config)


def check_generate_config(config: RunConfig) -> None:
    """Check what generation without training needs; see ``check_config``."""
    if config.replay.dumps is not None:
        raise ConfigError(
            f"replay: must be left out for generate, got '{config.replay.dumps}': these samples "
            "exist already; set replay.dumps=null"
        )
    _check_train_data(config.data, "to generate")
    _check_chat_template(config.data)
    hf_config = check_model(config.model)
    _check_positions(hf_config, config, "rollout", config.rollout.max_response_tokens)
    check_rewards(config.reward.functions)
    check_shaping(config.reward, config.rollout.max_response_tokens)


def check_data(config: RunConfig) -> None:
    """Check what reading and rendering the prompts needs; see ``check_config``."""
    _check_chat_template(config.data)
    if config.data.train is not None or not config.eval.sets:
        _check_train_data(config.data, "without eval.sets")
    for number, dataset in enumerate(config.eval.sets):
        _check_dataset(dataset, f"eval.sets[{number}]")


def _check_apex() -> None:
    """Megatron takes any package of this name for NVIDIA's."""
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        raise ConfigError(
            "apex: the installed package is not NVIDIA's (the package index has an unrelated one "
            "of this name), or lacks its CUDA extensions, got no module 'amp_C'; pip uninstall "
            "apex, or build NVIDIA's (docs/launch.md)"
        )


def _check_wandb(project: str) -> None:
    if project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb_project: is '{project}' but wandb is not installed; "
            "pip install wandb, or leave the project empty"
        )


def check_parallel(parallel: ParallelConfig, world_size: int) -> None:
    """Check that the sizes go together, and divide ``world_size`` ranks."""
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


def check_model(model: ModelConfig) -> dict[str, Any]:
    """Check that the directory is complete; return its config.json."""
    if not model.path.is_dir():
        raise ConfigError(
            f"model.path: no such directory '{model.path}'; download a Hugging Face model to it, "
            "or run make-tiny"
        )
    for pattern, remedy in (
        ("config.json", "give a Hugging Face model directory"),
        ("*.safetensors", "save the model with save_pretrained(safe_serialization=True)"),
        ("tokenizer_config.json", "save the tokenizer there"),
    ):
        if not any(model.path.glob(pattern)):
            raise ConfigError(f"model.path: '{model.path}' has no {pattern}; {remedy}")
    config_file = model.path / "config.json"
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


def check_heads(hf_config: dict[str, Any], key: str, tensor_size: int) -> None:
    """Check that ``tensor_size``, the value of ``key``, divides the model's heads."""
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


def check_layers(
    hf_config: dict[str, Any], parallel: ParallelConfig, megatron: MegatronConfig
) -> None:
    """The layers of ``config.json`` can be divided over the pipeline's stages and chunks."""
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


def _check_weight_sync(rollout: RolloutConfig, parallel: ParallelConfig) -> None:
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


def _check_train_data(data: DataConfig, needed: str) -> None:
    """There are training sets (``needed`` says when); their files exist and their names differ."""
    sets = data.train_sets
    if not sets:
        raise ConfigError(f"data.train: needed {needed}, got null; set data.train.path=FILE")
    for number, dataset in enumerate(sets):
        key = f"data.train[{number}]" if isinstance(data.train, tuple) else "data.train"
        _check_dataset(dataset, key)
    refuse_twice("data.train", [dataset.label for dataset in sets])


def _check_dataset(dataset: DatasetConfig, key: str) -> None:
    """The files exist and are of a known format; a set of the Hub is looked for when it is read."""
    if dataset.path is None:
        return
    files = dataset.files()
    if not files:
        raise ConfigError(f"{key}.path: no file matches '{dataset.path}'; {_RELATIVE}")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{key}.path: no such file '{file}'; {_RELATIVE}")
        if file.suffix not in DATA_SUFFIXES:
            raise ConfigError(
                f"{key}.path: must end in {', '.join(DATA_SUFFIXES)}, got '{file}'; "
                "convert the file"
            )


def refuse_twice(key: str, names: Sequence[str]) -> None:
    """Check that no name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{key}: must differ, got '{name}' {count} times; keep or rename one")


def _check_chat_template(data: DataConfig) -> None:
    if data.chat_template is not None and not data.chat_template.is_file():
        raise ConfigError(f"data.chat_template: no such file '{data.chat_template}'; {_RELATIVE}")


def check_rewards(functions: Sequence[RewardFunctionConfig], key: str = "reward.functions") -> None:
    """Check that the tokens of services, whose place is ``key``, are in their variables.

    Whether a function can be imported is found by a grader process, at the start of a run.
    """
    for number, entry in enumerate(functions):
        variable = entry.http.token_variable
        if entry.url is not None and variable and not os.environ.get(variable):
            raise ConfigError(
                f"{key}[{number}].http.token_variable: the environment variable must "
                f"hold the service's token, got none in {variable}; set it, or leave the key empty"
            )


def check_shaping(reward: RewardConfig, max_response_tokens: int) -> None:
    """Check that the buffer of the soft penalty fits the longest response."""
    if reward.overlong is not None and reward.overlong.buffer_tokens > max_response_tokens:
        raise ConfigError(
            "reward.overlong.buffer_tokens: must be at most rollout.max_response_tokens = "
            f"{max_response_tokens}, got {reward.overlong.buffer_tokens}; lower it"
        )


def _check_eval(hf_config: dict[str, Any], config: RunConfig) -> None:
    """Every set can be read, sampled, named and scored."""
    evaluation = config.eval
    if evaluation.functions is None:
        check_rewards(config.reward.functions)
    else:
        check_rewards(evaluation.functions, "eval.functions")
    for number, dataset in enumerate(evaluation.sets):
        key = f"eval.sets[{number}]"
        _check_dataset(dataset, key)
        if not _SET_NAME.fullmatch(dataset.label):
            raise ConfigError(
                f"{key}.name: must consist of letters, digits, '.', '_' and '-', since it is part "
                f"of file and metric names, got '{dataset.label}'; give another name"
            )
        sampling = evaluation.sampling_of(dataset)
        if sampling.temperature == 0 and sampling.samples_per_prompt > 1:
            where = key if dataset.samples_per_prompt is not None else "eval"
            greedy = key if dataset.temperature is not None else "eval"
            raise ConfigError(
                f"{where}.samples_per_prompt: must be 1 with {greedy}.temperature = 0, since "
                f"greedy samples are equal, got {sampling.samples_per_prompt}; set 1, or raise the "
                "temperature"
            )
        section = key if dataset.max_response_tokens is not None else "eval"
        _check_positions(hf_config, config, section, sampling.max_response_tokens)
    refuse_twice("eval.sets", [dataset.label for dataset in evaluation.sets])


def _check_best(config: RunConfig) -> None:
    """``checkpoint.best`` is a score of an evaluation that the run makes."""
    evaluation, best = config.eval, config.checkpoint.best
    match = _BEST.fullmatch(best)
    by_name = {dataset.label: dataset for dataset in evaluation.sets}
    if match is None or match["name"] not in by_name:
        raise ConfigError(
            "checkpoint.best: must be eval/<set>/<score>, such as eval/aime24/avg_at_k, with one "
            f"of eval.sets ({', '.join(by_name) or 'none'}), got '{best}'; correct it, or leave it "
            "empty"
        )
    num_samples = evaluation.sampling_of(by_name[match["name"]]).samples_per_prompt
    sizes = sorted(k for k in evaluation.k_values if k < num_samples)
    scores = ["avg_at_k", "pass_at_k", "maj_at_k", *(f"pass_at_{k}" for k in sizes)]
    scores += [*(f"maj_at_{k}" for k in sizes if k > 1), "answer_found_share"]
    if match["score"] not in scores:
        raise ConfigError(
            f"checkpoint.best: must end in one of {', '.join(scores)}, got '{best}'; correct it, "
            "or leave it empty"
        )
    if not evaluation.every_steps and not evaluation.at_end:
        raise ConfigError(
            "checkpoint.best: needs evaluations after steps, got eval.every_steps = 0 and "
            "eval.at_end = false; set eval.every_steps, or leave it empty"
        )
    if config.replay.dumps is not None:
        raise ConfigError(
            f"checkpoint.best: needs evaluations, and a replay has no server, got '{best}'; leave "
            "it empty"
        )
