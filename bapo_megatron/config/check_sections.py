"""Rules about the model directory and what of it limits other sections; see ``check``.

Rules about how engines get weights; see ``check``.

Rules about prompts; see ``check``.

Rules of the rewards that need other sections or the environment.

Whether a reward function can be imported is found by a grader process, at the start of a run.

Rules about evaluations; see ``check``.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bapo_megatron.config.data import DataConfig, DatasetConfig
    from bapo_megatron.config.evaluation import EvalConfig, EvalSetConfig
    from bapo_megatron.config.megatron import MegatronConfig, ModelConfig, ParallelConfig
    from bapo_megatron.config.reward import RewardConfig, RewardFunctionConfig
    from bapo_megatron.config.rollout import RolloutConfig
    from bapo_megatron.config.schema import RunConfig


def check_model(model: ModelConfig) -> dict[str, Any]:
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


def check_heads(hf_config: dict[str, Any], key: str, tensor_size: int) -> None:
    """A tensor-parallel size, of the key ``key``, divides the model's heads."""
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
    """The pipeline divides the model's layers, and enough of them are left where they must be."""
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


def check_positions(
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


DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""File formats of prompts."""


def check_train_data(data: DataConfig, needed: str) -> None:
    """There are training sets; their files exist and their names differ.

    Args:
        data: The section.
        needed: When a training set is needed, for the message.
    """
    sets = data.train_sets
    if not sets:
        raise ConfigError(f"data.train: needed {needed}, got null; set data.train.path=FILE")
    for number, dataset in enumerate(sets):
        key = f"data.train[{number}]" if isinstance(data.train, tuple) else "data.train"
        check_dataset(dataset, key)
    refuse_twice("data.train", [dataset.label for dataset in sets])


def check_data(config: RunConfig) -> None:
    """Hold the rules of prompts alone, as ``data show`` needs them.

    Raises:
        ConfigError: The first rule that is broken.
    """
    check_rendering(config.data)
    if config.data.train is not None or not config.eval.sets:
        check_train_data(config.data, "without eval.sets")
    for number, dataset in enumerate(config.eval.sets):
        check_dataset(dataset, f"eval.sets[{number}]")


def check_rendering(data: DataConfig) -> None:
    """The chat template exists."""
    if data.chat_template is not None and not data.chat_template.is_file():
        raise ConfigError(
            f"data.chat_template: no such file '{data.chat_template}'; paths are relative to the "
            "current directory"
        )


def check_dataset(dataset: DatasetConfig, key: str) -> None:
    """The files of a set exist and are of a known format.

    Args:
        dataset: The set; one of the Hub is looked for when it is read.
        key: Its place in the configuration.
    """
    if dataset.path is None:
        return
    files = dataset.files()
    if not files:
        raise ConfigError(
            f"{key}.path: no file matches '{dataset.path}'; "
            "paths are relative to the current directory"
        )
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{key}.path: no such file '{file}'; paths are relative to the current directory"
            )
        if file.suffix not in DATA_SUFFIXES:
            raise ConfigError(
                f"{key}.path: must end in {', '.join(DATA_SUFFIXES)}, got '{file}'; "
                "convert the file"
            )


def check_rewards(functions: Sequence[RewardFunctionConfig], key: str = "reward.functions") -> None:
    """The tokens of services are there.

    Args:
        functions: What scores.
        key: Where they are configured.

    Raises:
        ConfigError: A variable is not set.
    """
    for number, entry in enumerate(functions):
        variable = entry.http.token_variable
        if entry.url is not None and variable and not os.environ.get(variable):
            raise ConfigError(
                f"{key}[{number}].http.token_variable: the environment variable must "
                f"hold the service's token, got none in {variable}; set it, or leave the key empty"
            )


def check_shaping(reward: RewardConfig, max_response_tokens: int) -> None:
    """The buffer of the soft penalty fits the longest response.

    Raises:
        ConfigError: It does not.
    """
    if reward.overlong is not None and reward.overlong.buffer_tokens > max_response_tokens:
        raise ConfigError(
            "reward.overlong.buffer_tokens: must be at most rollout.max_response_tokens = "
            f"{max_response_tokens}, got {reward.overlong.buffer_tokens}; lower it"
        )


_NAME = re.compile(r"[A-Za-z0-9._-]+")
_BEST = re.compile(r"eval/(?P<name>[A-Za-z0-9._-]+)/(?P<score>[a-z0-9_]+)")


def check_eval(hf_config: dict[str, Any], config: RunConfig) -> None:
    """Every set can be read, sampled, named and scored."""
    evaluation = config.eval
    if evaluation.functions is None:
        check_rewards(config.reward.functions)
    else:
        check_rewards(evaluation.functions, "eval.functions")
    for number, dataset in enumerate(evaluation.sets):
        key = f"eval.sets[{number}]"
        check_dataset(dataset, key)
        name = dataset.label
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{key}.name: must consist of letters, digits, '.', '_' and '-', since it is part "
                f"of file and metric names, got '{name}'; give another name"
            )
        sampling = evaluation.sampling_of(dataset)
        own = key if dataset.temperature is not None else "eval"
        if sampling.temperature == 0 and sampling.samples_per_prompt > 1:
            where = key if dataset.samples_per_prompt is not None else "eval"
            raise ConfigError(
                f"{where}.samples_per_prompt: must be 1 with {own}.temperature = 0, since greedy "
                f"samples are equal, got {sampling.samples_per_prompt}; set 1, or raise the "
                "temperature"
            )
        section = key if dataset.max_response_tokens is not None else "eval"
        check_positions(hf_config, config, section, sampling.max_response_tokens)
    refuse_twice("eval.sets", [dataset.label for dataset in evaluation.sets])


def check_training_eval(config: RunConfig) -> None:
    """What is asked of evaluations inside training can be had."""
    evaluation, best = config.eval, config.checkpoint.best
    if evaluation.every_steps and not evaluation.sets:
        raise ConfigError(
            f"eval.every_steps: needs eval.sets, got {evaluation.every_steps} without a set; "
            "add a set, or leave it 0"
        )
    if not best:
        return
    match = _BEST.fullmatch(best)
    by_name = {dataset.label: dataset for dataset in evaluation.sets}
    if match is None or match["name"] not in by_name:
        raise ConfigError(
            "checkpoint.best: must be eval/<set>/<score>, such as eval/aime24/avg_at_k, with one "
            f"of eval.sets ({', '.join(by_name) or 'none'}), got '{best}'; correct it, or leave it "
            "empty"
        )
    scores = _scores_of(evaluation, by_name[match["name"]])
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


def _scores_of(evaluation: EvalConfig, dataset: EvalSetConfig) -> list[str]:
    """Metrics of a set of which more is better."""
    num_samples = evaluation.sampling_of(dataset).samples_per_prompt
    sizes = sorted(k for k in evaluation.k_values if k < num_samples)
    return [
        "avg_at_k",
        "pass_at_k",
        "maj_at_k",
        *(f"pass_at_{k}" for k in sizes),
        *(f"maj_at_{k}" for k in sizes if k > 1),
        "answer_found_share",
    ]
