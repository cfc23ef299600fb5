"""Rules that cross sections of the configuration, or need the files it names.

They run once, before anything is started, so that no run fails after an hour for a reason that was
known at the start. Rules about one kind of engine are with the engine. Every check raises
``ConfigError`` for the first broken rule: key, rule, value and remedy on one line.
"""

import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.config.data import DataConfig, DatasetConfig
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import MegatronConfig, ParallelConfig
from bapo_megatron.config.reward import RewardFunctionConfig
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import read_regular

POSITIONS = "max_position_embeddings"
"""Field of config.json: the longest prompt and response, together."""
_RELATIVE = "paths are relative to the current directory"


def check_config(config: RunConfig, world_size: int, *, owns_files: bool = True) -> None:
    """Check what training on ``world_size`` ranks needs.

    ``owns_files``: whether this process reads prompts and batches (rank 0); the other ranks need
    the model only, and may be on nodes without the rest.
    """
    hf_config = check_model_dir(config.model.path)
    _check_ranks(config.parallel, world_size)
    check_settings(config, _count(hf_config, POSITIONS))
    vocab_size, top_k = _count(hf_config, "vocab_size"), config.algorithm.centering.top_k
    if vocab_size and top_k > vocab_size:
        raise ConfigError(
            f"algorithm.centering.top_k: must be at most the model's vocab_size {vocab_size}, got "
            f"{top_k}; lower it"
        )
    if not owns_files:
        return
    if config.num_demonstrations:
        _check_demonstration_sets(config)
    if not config.has_engines:
        return
    _check_generation(config)
    _check_weight_sync(config)
    if config.eval.sets:
        _check_eval(config)


def check_settings(config: RunConfig, max_positions: int) -> None:
    """Check the rules that need no file, for a model of ``max_positions``; ``plan`` does so too."""
    _check_updates(config)
    _check_scorers(config)
    _require_below(config, "log.hang_s", "parallel.timeout_s")
    if config.rollout.keep_dumps:  # a replay from the newest checkpoint needs the steps after it
        _require_below(config, "checkpoint.every_steps", "rollout.keep_dumps")
    if config.has_engines:
        _check_positions(config, "rollout", config.rollout.max_response_tokens, max_positions)
        _check_eval_positions(config, max_positions)
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        _check_fits(config, "data.max_prompt_tokens + rollout.max_response_tokens", longest)
    if config.num_demonstrations:
        key, limit = "demonstrations.max_tokens", config.demonstrations.max_tokens
        _check_fits(config, key, limit)
        if max_positions and limit > max_positions:
            raise ConfigError(
                f"{key}: must be at most the model's {max_positions} positions, got {limit}; "
                "lower it"
            )
    if config.eval.every_steps and not (config.eval.sets or config.demonstrations.heldout):
        raise ConfigError(
            f"eval.every_steps: needs eval.sets, got {config.eval.every_steps} without a set; "
            "add a set, or leave it 0"
        )
    if config.checkpoint.best:
        _check_best(config)
    bits = config.rollout.local.sampling_bits
    if config.sends_adapters and (bits or not config.model.lora.rank):
        other = f"rollout.local.sampling_bits: {bits}" if bits else "model.lora.rank: 0"
        raise ConfigError(
            f"rollout.weight_sync.adapters: must be merged with {other}, got adapter; leave it out"
        )


def _require_below(config: RunConfig, key: str, limit_key: str, *, or_equal: bool = False) -> None:
    """Require the value of ``key`` to be below that of ``limit_key``; ``or_equal``: at most."""
    value, limit = operator.attrgetter(key, limit_key)(config)
    if value > limit or (value == limit and not or_equal):
        raise ConfigError(
            f"{key}: must be {'at most' if or_equal else 'below'} {limit_key} = {limit:g}, got "
            f"{value:g}; lower it, or raise {limit_key}"
        )


def check_allowed(
    rollout: RolloutConfig, allowed: Iterable[tuple[str, tuple[object, ...], str]], setting: str
) -> None:
    """Check keys of ``rollout``: each with the values that ``setting`` allows, and why no others.

    Raises:
        ConfigError: Key, rule, value and remedy.
    """
    for key, values, reason in allowed:
        if (value := operator.attrgetter(key)(rollout)) not in values:
            *names, got = (json.dumps(v, default=str).strip('"') for v in (*values, value))
            raise ConfigError(
                f"rollout.{key}: must be {' or '.join(names)} with {setting}, got {got[:80]}: "
                f"{reason}; set it, or change {setting.partition(':')[0]}"
            )


def check_eval_config(config: RunConfig) -> None:
    """Check what an evaluation without training needs; see ``check_config``."""
    if not config.eval.sets:
        raise ConfigError(
            "eval.sets: needs at least one set, got none; set eval.sets=[{path: FILE}]"
        )
    _check_adapter_alone(config)
    _check_eval_positions(config, _count(check_model_dir(config.model.path), POSITIONS))
    _check_eval(config)


def _check_adapter_alone(config: RunConfig) -> None:
    """Check that engines may load ``model.lora.path``, which no trainer merges."""
    path, bits = config.model.lora.path, config.rollout.local.sampling_bits
    if path is not None and (bits or config.rollout.weight_sync.adapters == "merged"):
        other = f"local.sampling_bits: {bits}" if bits else "weight_sync.adapters: merged"
        raise ConfigError(
            f"model.lora.path: must be left out without training with rollout.{other}, got "
            f"'{path}'; set model.path to merged weights, such as the hf/ of the run that wrote "
            "it, and model.lora.path=null"
        )


def check_generate_config(config: RunConfig) -> None:
    """Check what generation without training needs; see ``check_config``."""
    if config.replay.dumps is not None:
        raise ConfigError(
            f"replay: must be left out for generate, got '{config.replay.dumps}': these samples "
            "exist already; set replay.dumps=null"
        )
    _check_adapter_alone(config)
    limit = _count(check_model_dir(config.model.path), POSITIONS)
    _check_positions(config, "rollout", config.rollout.max_response_tokens, limit)
    _check_generation(config)


def check_data(config: RunConfig) -> None:
    """Check what reading and rendering the prompts needs; see ``check_config``."""
    if config.data.train is not None or not (config.eval.sets or config.demonstrations.train):
        _check_sets(config.data, "data.train", config.data.train)
    _check_sets(config.data, "eval.sets", config.eval.sets)
    _check_demonstration_sets(config)


def _check_demonstration_sets(config: RunConfig) -> None:
    _check_sets(config.data, "demonstrations.train", config.demonstrations.train)
    _check_sets(config.data, "demonstrations.heldout", config.demonstrations.heldout)


def check_model_dir(
    path: Path, key: str = "model.path", *, needs_weights: bool = True
) -> dict[str, Any]:
    """Check that ``path``, the value of ``key``, is a complete model; return its config.json.

    Raises:
        ConfigError: A file is missing or unreadable; weights count with ``needs_weights`` only.
    """
    if not path.is_dir():
        raise ConfigError(f"{key}: no such directory '{path}'; download a Hugging Face model to it")
    weights = ["*.safetensors"] if needs_weights else []
    for pattern in ("config.json", *weights, "tokenizer_config.json"):
        if not any(path.glob(pattern)):
            raise ConfigError(
                f"{key}: '{path}' has no {pattern}; save model and tokenizer there with "
                "save_pretrained"
            )
    file = path / "config.json"
    try:
        return text_fields(decode_json(dict[str, Any], read_regular(file)))
    except ValueError as error:
        raise ConfigError(f"{key}: '{file}': {error}; download the model again") from error


def text_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model that config.json describes.

    With a vision tower they are in ``text_config``; fields outside it come first.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        return hf_config
    return text | {name: value for name, value in hf_config.items() if name != "text_config"}


def _count(hf_config: dict[str, Any], name: str) -> int:
    """An integer field of config.json; 0 for any other value, which its reader refuses by name."""
    value = hf_config.get(name)
    return value if isinstance(value, int) else 0


def check_heads(hf_config: dict[str, Any], key: str, tensor_size: int) -> None:
    """Check that ``tensor_size``, the value of ``key``, divides the model's heads."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        if _count(hf_config, name) % tensor_size:
            raise ConfigError(
                f"{key}: must divide the model's {name} = {hf_config[name]}, got {tensor_size}; "
                "choose a divisor"
            )


def _check_ranks(parallel: ParallelConfig, world_size: int) -> None:
    replica_size = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % replica_size:
        raise ConfigError(
            "parallel: tensor × pipeline × context must divide the number of ranks, got "
            f"{replica_size} with {world_size}; start a multiple of {replica_size} ranks"
        )
    expert_ranks = parallel.expert * parallel.expert_tensor_size
    if (world_size // parallel.pipeline) % expert_ranks:
        raise ConfigError(
            "parallel: expert × expert_tensor must divide the ranks of a pipeline stage, got "
            f"{expert_ranks} with {world_size // parallel.pipeline}; lower them, or start more "
            "ranks"
        )


def _check_updates(config: RunConfig) -> None:
    """Check learning rates, batches and token ages against the run's updates."""
    optimizer, algorithm, rollout = config.optimizer, config.algorithm, config.rollout
    if optimizer.schedule != "constant":
        _require_below(config, "optimizer.min_lr", "optimizer.lr", or_equal=True)
    updates_per_step = algorithm.updates_per_batch * algorithm.epochs
    updates = config.train.steps * updates_per_step
    if optimizer.warmup_updates > updates and config.demonstrations.epochs is None:
        raise ConfigError(
            f"optimizer.warmup_updates: must be at most the run's {updates} updates "
            f"(steps × updates per batch × epochs), got {optimizer.warmup_updates}; lower it"
        )
    if config.replay.dumps is not None:
        return
    key = "demonstrations.sequences_per_step" if config.imitates else "rollout.groups_per_step"
    if (groups := operator.attrgetter(key)(config)) % algorithm.updates_per_batch:
        raise ConfigError(
            f"algorithm.updates_per_batch: must divide {key} = {groups}, got "
            f"{algorithm.updates_per_batch}; choose a divisor"
        )
    if config.imitates or rollout.fixed_lag is None:
        return
    if config.replay.batches:
        raise ConfigError(
            f"replay.batches: must be 0 with rollout.fixed_lag, got {config.replay.batches}: "
            "groups of earlier batches are older; leave one of them out"
        )
    age, max_age = rollout.fixed_lag * updates_per_step, rollout.staleness.max_age
    if max_age is not None and max_age < age:
        raise ConfigError(
            f"rollout.staleness.max_age: must be at least {age}, the age in updates that "
            f"rollout.fixed_lag gives to every token, got {max_age}; raise it, or leave it out"
        )


def _check_scorers(config: RunConfig) -> None:
    distillation = config.algorithm.distillation
    key = "algorithm.distillation"
    if distillation.is_over_vocabulary and not config.ops.logits_chunk_tokens:
        raise ConfigError(
            f"ops.logits_chunk_tokens: must be above 0 with {key}.loss: {distillation.loss}, got "
            "0: the loss reads logits in chunks; set 1024, or change the loss"
        )
    if config.algorithm.centering.is_used and not config.ops.logits_chunk_tokens:
        raise ConfigError(
            "ops.logits_chunk_tokens: must be above 0 with algorithm.centering, got 0: the loss "
            "reads logits in chunks; set 1024, or algorithm.centering.top_k: 0"
        )
    if distillation.has_engine and config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature: must be 1 with {key}.teacher.engine: "
            f"{distillation.teacher.engine}, got {config.rollout.temperature:g}: engines score at "
            "temperature 1; change it, or run the teacher in the trainer (teacher.engine: '')"
        )


def _check_generation(config: RunConfig) -> None:
    _check_sets(config.data, "data.train", config.data.train)
    check_rewards(config.reward.functions)
    if config.reward.overlong is not None:
        limited, limit = "reward.overlong.buffer_tokens", "rollout.max_response_tokens"
        _require_below(config, limited, limit, or_equal=True)


def _check_fits(config: RunConfig, key: str, longest: int) -> None:
    """Check that a sequence of the longest length fits one forward pass of the trainer."""
    per_sequence, total = packing_multiples(config.parallel, config.megatron)
    ranks, budget = config.parallel.context, config.train.max_tokens_per_micro_batch
    if ranks * budget // total * total < -(-longest // per_sequence) * per_sequence:
        raise ConfigError(
            f"train.max_tokens_per_micro_batch: must hold {key} = {longest}, in multiples "
            f"of {total} over {ranks} context-parallel ranks, got {budget}; raise it"
        )


def packing_multiples(parallel: ParallelConfig, megatron: MegatronConfig) -> tuple[int, int]:
    """Return the multiples that sequences and, a multiple of it, micro-batches are padded to.

    Tokens are those of all context-parallel ranks.
    """
    # Context-parallel ranks hold two chunks of every sequence each.
    per_sequence = 2 * parallel.context if parallel.context > 1 else 1
    # The scaling blocks of FP8 have 128 rows.
    per_rank = math.lcm(
        parallel.tensor if parallel.sequence else 1, 128 if megatron.fp8 != "none" else 1
    )
    return per_sequence, math.lcm(per_sequence, per_rank * parallel.context)


def _check_eval_positions(config: RunConfig, limit: int) -> None:
    for number, dataset in enumerate(config.eval.sets):
        section = f"eval.sets[{number}]" if dataset.max_response_tokens is not None else "eval"
        max_response_tokens = config.eval.sampling_of(dataset).max_response_tokens
        _check_positions(config, section, max_response_tokens, limit)


def _check_positions(config: RunConfig, section: str, max_response_tokens: int, limit: int) -> None:
    prompt = config.data.max_prompt_tokens
    if limit and prompt + max_response_tokens > limit:
        raise ConfigError(
            f"{section}.max_response_tokens: must leave room for data.max_prompt_tokens = "
            f"{prompt} in the model's {limit} positions, got {max_response_tokens}; "
            "lower one of them"
        )


def _check_weight_sync(config: RunConfig) -> None:
    sync = config.rollout.weight_sync
    if sync.method == "broadcast" and sync.backend == "nccl":
        import torch  # takes seconds

        if not torch.cuda.is_available():
            raise ConfigError(
                "rollout.weight_sync.backend: must be auto or gloo where rank 0 has no GPU, got "
                "nccl; set rollout.weight_sync.backend=auto"
            )
    _require_below(config, "rollout.health.patience_s", "parallel.timeout_s")


def _check_sets(
    data: DataConfig, key: str, sets: DatasetConfig | Sequence[DatasetConfig] | None
) -> None:
    """Check that sets are given, template and files exist, and the sets' names differ.

    Sets on the Hub are looked up when they are read.
    """
    if sets is None:
        raise ConfigError(f"{key}: needs prompts, got null; set {key}.path=FILE")
    if data.chat_template is not None and not data.chat_template.is_file():
        raise ConfigError(f"data.chat_template: no such file '{data.chat_template}'; {_RELATIVE}")
    by_key = {key: sets} if isinstance(sets, DatasetConfig) else {}
    if not isinstance(sets, DatasetConfig):
        by_key = {f"{key}[{number}]": dataset for number, dataset in enumerate(sets)}
    suffixes = (".jsonl", ".json", ".parquet")
    for place, dataset in by_key.items():
        files = dataset.files()
        if dataset.path is not None and not files:
            raise ConfigError(f"{place}.path: no file matches '{dataset.path}'; {_RELATIVE}")
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{place}.path: no such file '{file}'; {_RELATIVE}")
            if file.suffix not in suffixes:
                raise ConfigError(
                    f"{place}.path: must end in {', '.join(suffixes)}, got '{file}'; "
                    "convert the file"
                )
    check_unique(key, [dataset.label for dataset in by_key.values()])


def check_unique(key: str, names: Sequence[str]) -> None:
    """Check that no name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{key}: must differ, got '{name}' {count} times; keep or rename one")


def check_rewards(functions: Sequence[RewardFunctionConfig], key: str = "reward.functions") -> None:
    """Check that the token of each reward service is in its environment variable.

    Whether a function can be imported is checked by a grader process when a run starts.
    """
    for number, entry in enumerate(functions):
        variable = entry.http.token_variable
        if entry.url is not None and variable and not os.environ.get(variable):
            raise ConfigError(
                f"{key}[{number}].http.token_variable: the environment variable must "
                f"hold the service's token, got none in {variable}; set it, or leave the key empty"
            )


def _check_eval(config: RunConfig) -> None:
    evaluation = config.eval
    if evaluation.functions is None:
        check_rewards(config.reward.functions)
    else:
        check_rewards(evaluation.functions, "eval.functions")
    _check_sets(config.data, "eval.sets", evaluation.sets)
    for number, dataset in enumerate(evaluation.sets):
        key = f"eval.sets[{number}]"
        if not re.fullmatch(r"[A-Za-z0-9._-]+", dataset.label):
            raise ConfigError(
                f"{key}.name: must consist of letters, digits, '.', '_' and '-', since it is part "
                f"of file and metric names, got '{dataset.label}'; give another name"
            )


def _check_best(config: RunConfig) -> None:
    evaluation, best = config.eval, config.checkpoint.best
    names = ["avg_at_k", "pass_at_k", "maj_at_k", "answer_found_share"]
    scores = []
    for dataset in evaluation.sets:
        num_samples = evaluation.sampling_of(dataset).samples_per_prompt
        sizes = [k for k in evaluation.k_values if k < num_samples]
        metrics = [*names, *(f"{kind}_at_{k}" for kind in ("pass", "maj") for k in sizes)]
        scores += [f"eval/{dataset.label}/{name}" for name in metrics if name != "maj_at_1"]
    if best not in scores:
        raise ConfigError(
            f"checkpoint.best: must be one of {', '.join(scores) or 'none without eval.sets'}, "
            f"got '{best}'; correct it, or leave it empty"
        )
    is_scheduled = evaluation.every_steps or evaluation.at_end
    if not is_scheduled or not config.has_engines:
        raise ConfigError(
            "checkpoint.best: needs evaluations after steps, which only engines can sample; "
            "set eval.every_steps, without replay or nll, or leave it empty"
        )
    saves = config.checkpoint.every_steps
    if evaluation.overlap and evaluation.every_steps % (saves or evaluation.every_steps + 1):
        raise ConfigError(
            "checkpoint.best: with eval.overlap a step is saved before its score is known, so "
            "eval.every_steps must be a multiple of checkpoint.every_steps, got "
            f"{evaluation.every_steps} with {saves}; change one of them"
        )
