"""Rules about evaluations; see ``check``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.check_data import check_dataset
from bapo_megatron.config.check_model import check_positions
from bapo_megatron.config.check_reward import check_rewards
from bapo_megatron.config.check_rollout import refuse_twice
from bapo_megatron.config.load import ConfigError

if TYPE_CHECKING:
    from bapo_megatron.config.evaluation import EvalConfig, EvalSetConfig
    from bapo_megatron.config.schema import RunConfig

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
