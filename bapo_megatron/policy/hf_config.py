"""A Hugging Face config.json, checked field by field, and the layouts that a model divides into.

Everything that would change what the model computes is either understood by its family or refused.
"""

import math
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from bapo_megatron.config.check import check_heads, text_fields
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.schema import AlgorithmConfig, RunConfig
from bapo_megatron.config.scorers import REFERENCE_KEY, TEACHER_KEY
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.families import FAMILIES
from bapo_megatron.policy.families.config_json import refuse_unknown
from bapo_megatron.runtime.calls import decode, decode_json, shown_value
from bapo_megatron.runtime.files import read_regular


def check_division(hf: HfConfig, parallel: ParallelConfig) -> None:
    """Refuse a layout that the model cannot be divided into.

    The vocabulary is padded, so that it always divides.

    Raises:
        ConfigError: Key, rule, value and remedy.
    """
    check_heads(hf.division_fields, "parallel.tensor", parallel.tensor)
    parts = parallel.pipeline * parallel.virtual_pipeline
    if hf.num_layers % parts:
        raise ConfigError(
            f"parallel.pipeline: pipeline × virtual_pipeline = {parts} must divide the model's "
            f"{hf.num_layers} layers; choose other sizes"
        )
    tensor, experts, channels = parallel.tensor, hf.experts, "intermediate channels"
    sizes = [("tensor", tensor, hf.intermediate_size, channels)]
    if experts is not None:
        each, shared = experts.intermediate_size, experts.shared_intermediate_size
        sizes += [
            ("expert", parallel.expert, experts.num, "experts"),
            ("expert_tensor", parallel.expert_tensor_size, each, f"{channels} of each expert"),
            ("tensor", tensor, shared, f"{channels} of the shared experts"),
        ]
    for key, size, count, what in sizes:
        if count % size:
            raise ConfigError(
                f"parallel.{key}: must divide the model's {count} {what}, got {size}; choose a "
                "divisor"
            )
    _check_expert_ranks(hf, parallel)
    kinds = ["experts"] if experts else []
    for mixer in hf.mixer_kinds:
        if message := mixer.layout_error(parallel):
            raise ConfigError(message)
        kinds += [mixer.title] if mixer.needs_sequence_parallel else []
    if kinds and tensor > 1 and not parallel.sequence:
        raise ConfigError(
            f"parallel.sequence: must be true for a model with {kinds[-1]} and parallel.tensor = "
            f"{tensor}, got false; set it to true"
        )


def _check_expert_ranks(hf: HfConfig, parallel: ParallelConfig) -> None:
    for key in () if hf.experts else ("expert", "expert_tensor"):
        if (getattr(parallel, key) or 1) > 1:
            raise ConfigError(
                f"parallel.{key}: needs a model with experts, got {getattr(parallel, key)}; leave "
                "it out"
            )
    if hf.experts and hf.experts.has_linear_biases and parallel.expert_tensor_size > 1:
        raise ConfigError(
            "parallel.expert_tensor: must be 1 for a model whose experts have biases, got "
            f"{parallel.expert_tensor_size}; set it to 1"
        )


def check_routers(hf: HfConfig, algorithm: AlgorithmConfig) -> None:
    """Refuse settings of routers for a model without experts; raise ``ConfigError``."""
    for key, off in (("router_replay", "none"), ("load_balancing_coefficient", 0)):
        if hf.experts is None and (value := getattr(algorithm, key)) != off:
            raise ConfigError(
                f"algorithm.{key}: must be {off} for a model without experts, got {value}; set it "
                f"to {off}"
            )


def check_frozen_model(config: RunConfig, key: str, hf: HfConfig, policy: HfConfig) -> None:
    """Refuse a frozen model that the trainer cannot build beside the policy.

    ``key`` is its section: one of ``AlgorithmConfig.frozen_models``.

    Raises:
        ConfigError: It does not divide over the layout, cannot get the policy's weights though it
            is to, or its loss compares distributions and its ``vocab_size`` is not the policy's.
    """
    algorithm = config.algorithm
    path = algorithm.frozen_models[key].path
    try:
        check_division(hf, config.parallel)
    except ConfigError as error:
        raise ConfigError(f"{key}.path: '{path}': {error}") from None
    if key == REFERENCE_KEY and algorithm.kl.reference.update_every:
        differing = [
            field.name
            for field in fields(HfConfig)
            if getattr(hf, field.name) != getattr(policy, field.name)
            # No layer computes with them.
            and field.name not in ("model_type", "max_position_embeddings")
        ]
        if differing:
            raise ConfigError(
                f"{key}.path: must be a model like the policy with update_every above 0, since it "
                f"gets the policy's weights, got another {', '.join(differing)} in '{path}'; "
                "choose another reference, or update_every: 0"
            )
    compares_vocabularies = key == TEACHER_KEY and algorithm.distillation.is_over_vocabulary
    if compares_vocabularies and hf.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"{key}.path: must have the policy's vocab_size {policy.vocab_size} with "
            f"algorithm.distillation.loss: {algorithm.distillation.loss}, got {hf.vocab_size}; "
            "choose another teacher, or loss: tokens"
        )


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Return the vocabulary size that the model allocates over all tensor-parallel ranks.

    A multiple of 128: the same for every power of two up to 128 ranks, so that a checkpoint fits
    all of these layouts, and aligned for the output GEMM on a GPU.
    """
    multiple = math.lcm(128, tensor)
    return -(-vocab_size // multiple) * multiple


def read_hf_config_file(path: Path, ignored_fields: Collection[str] = ()) -> HfConfig:
    """Read and check a model's ``config.json``.

    ``ignored_fields`` (``model.ignored_config_fields``) may have any value.

    Raises:
        ConfigError: One of ``ignored_fields`` is a field that is read.
        OSError: It cannot be read.
        ValueError: It describes a model that is not supported; the message names the file, the
            field and the value.
    """
    try:
        fields = text_fields(decode_json(dict[str, Any], read_regular(path)))
        kind = fields.get("model_type")
        if (family := FAMILIES.get(str(kind))) is None:
            raise ValueError(f"'model_type' must be {', '.join(FAMILIES)}, got {shown_value(kind)}")
        for name in ignored_fields:
            if name in family.fields.model_fields:
                raise ConfigError(
                    "model.ignored_config_fields: must not name a field that is read, got "
                    f"'{name}'; remove it"
                )
        read = {name: value for name, value in fields.items() if name not in ignored_fields}
        known = decode(family.fields, read)
        if (known.architectures or [family.architecture]) != [family.architecture]:
            raise ValueError(
                f"'architectures' must be {shown_value([family.architecture])}, got "
                f"{shown_value(known.architectures)}"
            )
        refuse_unknown(known)
        return family.understand(known)
    except ConfigError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}; choose another model, or correct the file") from None
