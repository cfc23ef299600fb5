"""The low-rank adapters of a model, as a table and as PEFT's files; imports no torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.families.base import HfConfig, Weight
from bapo_megatron.policy.weight_table import hf_shapes, weight_table
from bapo_megatron.runtime.calls import decode_json
from bapo_megatron.runtime.files import read_regular

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_NAME = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def target_of(name: str) -> str:
    """Return what ``model.lora.targets`` calls a Hugging Face linear: ``q_proj``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def adapted(weight: Weight, hf: HfConfig, config: LoraConfig) -> list[str]:
    """Return the linears of a weight that have adapters."""
    is_linear = weight.megatron.endswith(".weight") and weight.form != "vocab"
    if not is_linear or weight.megatron.endswith("router.weight"):
        return []
    names = [name for name, shape in hf_shapes(weight, hf).items() if len(shape) == 2]
    return [name for name in names if not config.targets or target_of(name) in config.targets]


def _targets(hf: HfConfig, config: LoraConfig, form: str = "") -> set[str]:
    """Return the targets of a model, of weights whose form begins with ``form``."""
    weights = (weight for weight in weight_table(hf) if weight.form.startswith(form))
    return {target_of(name) for weight in weights for name in adapted(weight, hf, config)}


def check_targets(hf: HfConfig, config: LoraConfig, tensor: int) -> None:
    """Refuse targets that the model lacks, or that tensor-parallel ranks do not divide by rows.

    Raises:
        ConfigError: Key, rule, value and remedy.
    """
    known = _targets(hf, config.model_copy(update={"targets": ()}))
    divided = _targets(hf, config, "sections")
    if divided and tensor > 1:
        rest = ", ".join(sorted(known - divided))
        raise ConfigError(
            "model.lora.targets: must not name inputs of gated delta nets, "
            f"{', '.join(sorted(divided))}, with parallel.tensor = {tensor}; name others, {rest}, "
            "or set parallel.tensor to 1"
        )
    for target in config.targets:
        if target not in known:
            raise ConfigError(
                f"model.lora.targets: must name linears of the model, {', '.join(sorted(known))}, "
                f"got {target}; choose among them, or leave targets out for all"
            )


def adapter_weights(
    weight: Weight, hf: HfConfig, config: LoraConfig
) -> list[tuple[Weight, Weight]]:
    """Return A and B of each adapter of a weight, as entries of a table under PEFT's names."""
    shapes = dict(zip(weight.hf, weight.shapes, strict=True))
    pairs = []
    for name in adapted(weight, hf, config):
        outputs, inputs = shapes[name].split()
        entries = [
            replace(
                weight,
                megatron=peft_name,
                hf=(peft_name,),
                shapes=(shape,),
                axis=weight.axis if weight.axis == axis else None,
                form="plain",
            )
            for part, shape, axis in (
                ("A", f"{config.rank} {inputs}", 1),
                ("B", f"{outputs} {config.rank}", 0),
            )
            for peft_name in (f"{_PEFT_PREFIX}{name.removesuffix('weight')}lora_{part}.weight",)
        ]
        pairs.append((entries[0], entries[1]))
    return pairs


def base_name(entry: Weight) -> str:
    """Return the Hugging Face name of the weight that an entry of A or B changes."""
    name = entry.megatron.removeprefix(_PEFT_PREFIX)
    return f"{name.rpartition('.lora_')[0]}.weight"


def adapter_table(hf: HfConfig, config: LoraConfig) -> list[Weight]:
    """Return the entries of all adapters, in the order of ``weight_table``."""
    pairs = (pair for weight in weight_table(hf) for pair in adapter_weights(weight, hf, config))
    return [entry for pair in pairs for entry in pair]


class _PeftJson(BaseModel):
    """The fields read from adapter_config.json; others of PEFT concern its training."""

    model_config = ConfigDict(strict=True, extra="ignore")
    peft_type: Literal["LORA"]
    r: int
    lora_alpha: float
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    lora_bias: Literal[False] = False
    use_dora: Literal[False] = False
    use_rslora: Literal[False] = False
    rank_pattern: dict[str, int] = Field({}, max_length=0)
    alpha_pattern: dict[str, float] = Field({}, max_length=0)
    modules_to_save: list[str] | None = Field(None, max_length=0)


def check_adapter(directory: Path, config: LoraConfig) -> None:
    """Refuse a PEFT directory of another kind, rank or alpha than the configuration's.

    Raises:
        ConfigError: Key, rule, value and remedy.
    """
    path = directory / ADAPTER_CONFIG_NAME
    if not (directory / ADAPTER_NAME).is_file():
        raise ConfigError(
            f"model.lora.path: '{directory}' has no {ADAPTER_NAME}; save the adapter there as "
            "safetensors, or choose another one"
        )
    try:
        fields = decode_json(_PeftJson, read_regular(path))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.lora.path: '{directory}' must be a PEFT directory with plain LoRA adapters: "
            f"{ADAPTER_CONFIG_NAME}: {error}; choose another one"
        ) from error
    for key, actual, expected in (
        ("rank", config.rank, fields.r),
        ("alpha", config.alpha, fields.lora_alpha),
    ):
        if actual != expected:
            raise ConfigError(
                f"model.lora.{key}: must be {expected:g}, that of '{directory}', got {actual:g}; "
                "set it to that, or choose another model.lora.path"
            )


def peft_fields(hf: HfConfig, config: LoraConfig, base: Path) -> dict[str, Any]:
    """Return the fields of adapter_config.json for a base model in a directory."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(_targets(hf, config)),
        "inference_mode": True,
    }
