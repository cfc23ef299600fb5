"""The low-rank adapters of a model, as a table and as PEFT's files; imports no torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import with_values
from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.mixers.base import Recurrence
from bapo_megatron.policy.weight_table import hf_shapes, weight_table
from bapo_megatron.runtime.calls import decode_json, shown_value
from bapo_megatron.runtime.files import read_regular

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_NAME = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_DOWN = ("down_proj", "w2")
_EXPERT_TARGETS = ("gate_proj", "up_proj", "w1", "w3", *_DOWN)
_GATE_UP = "gate_up_proj"
"""What transformers calls the two tensors of gates and up projections that PEFT adapts as one."""
_MERGE = "save the merged model (PEFT's merge_and_unload) and train from it, or choose another one"
_HARMLESS_FIELDS = (
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_version", "runtime_config"),
    *("inference_mode", "lora_dropout", "ensure_weight_tying", "eva_config", "exclude_modules"),
    # For what _OFF_FIELDS rule out.
    *("layers_pattern", "megatron_core", "qalora_group_size"),
)
"""Fields of adapter_config.json that do not change what an adapter computes."""
_OFF_FIELDS = (
    *("fan_in_fan_out", "lora_bias", "use_dora", "use_rslora", "use_qalora", "modules_to_save"),
    *("layers_to_transform", "layer_replication", "trainable_token_indices", "megatron_config"),
    *("alora_invocation_tokens", "corda_config", "lora_ga_config", "velora_config", "kasa_config"),
    *("arrow_config", "monteclora_config", "use_bdlora"),
)
"""Fields that must be false, null or []: otherwise it computes more than α/r · B A."""
LAYER_KINDS = ("attention", "recurrence", "mlp", "experts")
"""Groups of adapters in metrics; shared experts count as ``mlp``."""


def target_of(name: str) -> str:
    """Return what ``model.lora.targets`` calls a Hugging Face linear: ``q_proj``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def adapted(weight: Weight, hf: HfConfig, config: LoraConfig) -> list[str]:
    """Return the linears of a weight that have adapters."""
    is_linear = weight.megatron.endswith(".weight") and weight.form != "vocab"
    if not is_linear or weight.is_stacked or weight.megatron.endswith("router.weight"):
        return []
    names = [name for name, shape in hf_shapes(weight, hf).items() if len(shape) == 2]
    return [name for name in names if not config.targets or target_of(name) in config.targets]


def layer_kind(weight: Weight, hf: HfConfig) -> str:
    """Return which of ``LAYER_KINDS`` a weight of a layer belongs to."""
    if ".mlp." in weight.megatron:
        return "mlp" if weight.expert is None else "experts"
    assert weight.layer is not None, weight.megatron
    return "recurrence" if isinstance(hf.mixers[weight.layer], Recurrence) else "attention"


def targets_of(hf: HfConfig, config: LoraConfig, form: str = "") -> set[str]:
    """Return the targets of a model, of weights whose form begins with ``form``."""
    weights = (weight for weight in weight_table(hf) if weight.form.startswith(form))
    return {target_of(name) for weight in weights for name in adapted(weight, hf, config)}


def check_targets(hf: HfConfig, config: LoraConfig, tensor: int) -> None:
    """Refuse targets that the model lacks, or that tensor-parallel ranks do not divide by rows.

    Raises:
        ConfigError: Key, rule, value and remedy.
    """
    known = targets_of(hf, config.model_copy(update={"targets": ()}))
    divided = targets_of(hf, config, "sections")
    if divided and tensor > 1:
        rest = ", ".join(sorted(known - divided))
        raise ConfigError(
            "model.lora.targets: must not name inputs of recurrences, "
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

    def entry(name: str, part: str, shape: str, axis: int) -> Weight:
        name = f"{_PEFT_PREFIX}{name.removesuffix('weight')}lora_{part}.weight"
        divided = axis if weight.axis == axis else None
        return replace(
            weight, megatron=name, hf=(name,), shapes=(shape,), axis=divided, form="plain"
        )

    shapes = dict(zip(weight.hf, weight.shapes, strict=True))
    pairs = []
    for name in adapted(weight, hf, config):
        outputs, inputs = shapes[name].split()
        a = entry(name, "A", f"{config.rank} {inputs}", 1)
        pairs.append((a, entry(name, "B", f"{outputs} {config.rank}", 0)))
    return pairs


def base_name(entry: Weight) -> str:
    """Return the Hugging Face name of the weight that an entry of A or B changes."""
    name = entry.megatron.removeprefix(_PEFT_PREFIX)
    return f"{name.rpartition('.lora_')[0]}.weight"


def adapter_table(hf: HfConfig, config: LoraConfig) -> list[Weight]:
    """Return the entries of all adapters, in the order of ``weight_table``."""
    pairs = (pair for weight in weight_table(hf) for pair in adapter_weights(weight, hf, config))
    return [entry for pair in pairs for entry in pair]


class PeftJson(BaseModel):
    """What is used of adapter_config.json; the rest is harmless, off or refused."""

    model_config = ConfigDict(strict=True, extra="allow")
    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM", None] = None
    r: int
    lora_alpha: float
    bias: Literal["none"] = "none"
    init_lora_weights: Literal[True, False, None, "gaussian", "orthogonal", "eva", "mica"] = True
    """How A and B began; with pissa, olora and others the base is another one, too."""
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    loftq_config: dict[str, Any] | None = Field(None, max_length=0)

    def check(self, hf: HfConfig, config: LoraConfig) -> None:
        """Raise a ``ValueError`` for a field that this model's adapters do not have."""
        for name, value in (self.model_extra or {}).items():
            if name in _OFF_FIELDS and value is not None and value is not False and value != []:
                raise ValueError(f"{name!r} must be off, got {shown_value(value)}")
            if name not in (*_HARMLESS_FIELDS, *_OFF_FIELDS):
                raise ValueError(f"{name!r} is unknown and may change the adapter")
        written = peft_fields(hf, config, Path())
        names = ("target_parameters", "rank_pattern", "alpha_pattern")
        for name in (*names, "target_modules") if self.target_parameters else names:
            if (value := getattr(self, name)) and value != (only := written.get(name)):
                raise ValueError(
                    f"{name!r} must be {shown_value(only)} with these model.lora.targets, got "
                    f"{shown_value(value)}"
                )


def check_adapter(directory: Path, config: LoraConfig, hf: HfConfig) -> None:
    """Refuse a PEFT directory of another kind, rank or alpha than ``config``'s.

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
        fields = decode_json(PeftJson, read_regular(path))
        fields.check(hf, config)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.lora.path: '{directory}' must be a PEFT directory with plain LoRA adapters: "
            f"{ADAPTER_CONFIG_NAME}: {error}; {_MERGE}"
        ) from error
    for key, expected in (("rank", fields.r), ("alpha", fields.lora_alpha)):
        if (actual := getattr(config, key)) != expected:
            raise ConfigError(
                f"model.lora.{key}: must be {expected:g}, that of '{directory}', got {actual:g}; "
                "set it to that, or choose another model.lora.path"
            )


def with_adapter(config: RunConfig) -> RunConfig:
    """Let engines without a trainer load ``model.lora.path``, if there is one, unmerged.

    Raises:
        ValueError: The adapter is not of this model, rank and alpha; key, rule, value and remedy.
        OSError: The model's config.json cannot be read.
    """
    model = config.model
    if model.lora.path is None:
        return config
    hf = read_hf_config_file(model.path / "config.json", model.ignored_config_fields)
    check_adapter(model.lora.path, model.lora, hf)
    weight_sync = {"adapters": "adapter", "method": "disk", "in_flight": "abort"}
    return with_values(config, rollout={"colocated": False, "weight_sync": weight_sync})


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
        "inference_mode": True,
        **_peft_targets(hf, config),
    }


def _peft_targets(hf: HfConfig, config: LoraConfig) -> dict[str, Any]:
    """Return the fields that name what has adapters.

    PEFT joins a layer's experts as transformers does, and takes each target of theirs to name no
    other linear; of dense MLPs and shared experts the weights are named instead.
    """
    targets = targets_of(hf, config)
    joined = targets & {*_EXPERT_TARGETS} if hf.experts else set()
    fields: dict[str, Any] = {"target_modules": sorted(targets - joined)}
    if joined:
        names = (n for w in weight_table(hf) if w.expert is None for n in adapted(w, hf, config))
        single = {n.split(".layers.")[1].partition(".")[2] for n in names if target_of(n) in joined}
        block = "mixer" if hf.has_single_blocks else "mlp"
        experts = [f"{block}.experts.down_proj"]
        if hf.is_gated and joined.difference(_DOWN):
            experts.append(f"{block}.experts.{_GATE_UP}")
            pattern = rf".*\.{_GATE_UP}"
            fields["rank_pattern"] = {pattern: 2 * config.rank}
            fields["alpha_pattern"] = {pattern: 2 * config.alpha}
        fields["target_parameters"] = [*sorted(single), *experts]
    return fields


def peft_obstacle(hf: HfConfig, config: LoraConfig) -> str:
    """Return why PEFT does not load the adapters that are written; '' if it does."""
    targets = targets_of(hf, config)
    joined = targets & {*_EXPERT_TARGETS} if hf.experts else set()
    if hf.model_type == "nemotron_h" and "out_proj" in targets:
        return "it refuses out_proj of Mamba"
    if "up_proj" in joined and not hf.is_gated:
        return "it does not find up_proj of experts without gate_proj"
    if len(joined.difference(_DOWN)) == 1:
        return "it adapts gate_proj and up_proj of experts only together"
    if hf.tensor_prefix.startswith("language_model"):
        return "it knows the layers beside a vision tower by other names"
    if joined and hf.tensor_prefix.endswith("language_model"):
        return "it does not find the experts of a model with a vision tower"
    return ""
