"""adapter_config.json against PEFT: what is read of it, and what PEFT loads of what is written."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import LoraConfig
from bapo_megatron.policy.adapters import adapter_table, check_adapter, peft_obstacle
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.lora import load_adapter, write_adapter
from bapo_megatron.policy.weight_table import hf_shapes
from tests.policy.convert_models import copy_with, merge_adapter
from tests.policy.families import FAMILIES, marks
from tests.policy.oracle import Oracle
from tests.policy.tiny_models import MINIMAX_NAMES, Models, load_reference
from tests.tolerances import assert_within

LORA = LoraConfig(rank=2, alpha=4.0)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_TARGETS = {"nemotron_h": ("q_proj", "o_proj", "in_proj", "down_proj")}
"""Where PEFT cannot load all."""
REMEDY = r"; save the merged model \(PEFT's merge_and_unload\) and train from it, or choose"


@pytest.fixture
def model(models: Models) -> Path:
    return models["qwen2"]


def architecture(model: Path) -> HfConfig:
    return read_hf_config_file(model / "config.json")


def saved_by_peft(model: Path, to: Path, **fields: Any) -> Path:
    """An adapter as PEFT saves it."""
    config = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        | fields
    )
    peft.get_peft_model(load_reference("qwen2", model), config).save_pretrained(to)
    return to


def edited(adapter: Path, **fields: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return adapter


def refusal(adapter: Path, model: Path) -> str:
    """What loading the adapter's tensors is refused with."""
    lora: Any = SimpleNamespace(config=LORA)
    with pytest.raises(ValueError) as info:  # noqa: PT011 - the caller compares the text
        load_adapter(adapter, lora, architecture(model), None)  # type: ignore[arg-type]
    return str(info.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {"init_lora_weights": False, "qalora_group_size": 32},
        {"init_lora_weights": "orthogonal", "ensure_weight_tying": True},
        {"init_lora_weights": "mica"},
        {"exclude_modules": ["lm_head"], "revision": "main"},
        {"target_modules": r".*\.layers\.\d+\..*_proj", "loftq_config": {}},
        {"target_modules": ["self_attn.q_proj", *LINEARS[1:]], "layers_to_transform": []},
    ],
    ids=str,
)
def test_adapters_whose_fields_are_used_or_harmless_are_taken(
    model: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    adapter = saved_by_peft(model, tmp_path, **fields)
    names = load_file(adapter / "adapter_model.safetensors")
    assert len(names) == 2 * 2 * 7  # A and B of each linear of two layers
    check_adapter(adapter, LORA, architecture(model))


def test_every_field_of_the_installed_peft_is_known(model: Path, tmp_path: Path) -> None:
    adapter = saved_by_peft(model, tmp_path)
    saved = json.loads((adapter / "adapter_config.json").read_text())
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert names - saved.keys() == {"runtime_config"}
    edited(adapter, runtime_config={"ephemeral_gpu_offload": False})
    check_adapter(adapter, LORA, architecture(model))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *[
            ("init_lora_weights", value, "must be True, False, None, 'gaussian',")
            for value in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
        ],
        *[
            (name, True, "must be off, got true")
            for name in ("use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out")
        ],
        ("use_dora", 0, "must be off, got 0"),
        ("alora_invocation_tokens", [5, 6], r"must be off, got \[5, 6\]"),
        ("loftq_config", {"loftq_bits": 4}, "must have at most 0 items"),
        ("corda_config", {}, "must be off, got {}"),
        ("kasa_config", {"beta": 1}, "must be off, got {"),
        ("arrow_config", {}, "must be off, got {}"),
        ("use_bdlora", {"nblocks": 2}, "must be off, got {"),
        ("velora_config", {}, "must be off, got {}"),
        ("lora_ga_config", {}, "must be off, got {}"),
        ("monteclora_config", {}, "must be off, got {}"),
        ("megatron_config", {"a": 1}, "must be off, got {"),
        ("layers_to_transform", 0, "must be off, got 0"),
        ("layer_replication", [[0, 1]], "must be off, got [[]"),
        ("trainable_token_indices", [3], "must be off, got [[]"),
        ("modules_to_save", ["embed_tokens"], "must be off, got [[]"),
        ("rank_pattern", {"q_proj": 4}, "must be null with these model.lora.targets, got {"),
        ("alpha_pattern", {"q_proj": 4}, "must be null with these model.lora.targets, got {"),
        (
            "target_parameters",
            ["mlp.gate_proj.weight"],
            "must be null with these model.lora.targets, got [[]",
        ),
        ("bias", "all", "must be 'none', got 'all'"),
        ("task_type", "SEQ_CLS", "must be 'CAUSAL_LM'"),
        ("peft_type", "IA3", "must be 'LORA', got 'IA3'"),
        ("new_variant_config", {}, "is unknown and may change the adapter"),
        ("new_variant_config", None, "is unknown and may change the adapter"),
    ],
)
def test_a_field_that_would_make_another_adapter_is_refused_by_name(
    model: Path, tmp_path: Path, field: str, value: Any, rule: str
) -> None:
    adapter = edited(saved_by_peft(model, tmp_path), **{field: value})
    with pytest.raises(
        ConfigError, match=rf"^model\.lora\.path: .* '{field}' {rule}.*{REMEDY}"
    ) as info:
        check_adapter(adapter, LORA, architecture(model))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_saved_embeddings_are_refused_with_how_to_save_without(
    model: Path, tmp_path: Path, name: str
) -> None:
    path = saved_by_peft(model, tmp_path) / "adapter_model.safetensors"
    save_file({**load_file(path), f"base_model.model.{name}": torch.zeros(97, 32)}, path)
    message = refusal(path.parent, model)
    assert f"unexpected base_model.model.{name}; set model.lora.targets to" in message
    assert "save_embedding_layers=False" in message


def write_random(model: Path, config: LoraConfig, to: Path) -> None:
    """Write adapters with random A and B as a run does."""
    hf, generator = architecture(model), torch.Generator().manual_seed(1)
    tensors = {
        name: 0.2 * torch.randn(shape, generator=generator)
        for entry in adapter_table(hf, config)
        for name, shape in hf_shapes(entry, hf).items()
    }
    to.mkdir()
    write_adapter(tensors.items(), hf, config, model, to)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *(pytest.param(name, PEFT_TARGETS.get(name, ()), marks=marks(name)) for name in FAMILIES),
        *(
            pytest.param(family, targets, marks=pytest.mark.exhaustive)
            for family in ("llama", "glm4_moe", "qwen3_next", "minimax_m2")
            for targets in (("gate_proj", "up_proj", "o_proj"), ("down_proj",), ("o_proj",))
        ),
    ],
)
def test_peft_computes_with_all_that_is_written_as_with_the_merged_weights(
    models: Models, tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    model = models[family]
    if family == "minimax_m2":
        targets = tuple(MINIMAX_NAMES.get(target, target) for target in targets)
    config = LORA.model_copy(update={"targets": targets})
    write_random(model, config, tmp_path / "adapter")
    adapted = peft.PeftModel.from_pretrained(load_reference(family, model), tmp_path / "adapter")
    ids = torch.tensor([[7, 3, 5, 11, 9, 40, 96, 0, 1, 2]])
    actual = adapted(input_ids=ids).logits
    merge = partial(merge_adapter, adapter=tmp_path / "adapter", scale=LORA.alpha / LORA.rank)
    merged = copy_with(model, tmp_path / "merged", merge)
    expected, bound = Oracle.of(family, merged).logits_of(ids)
    base = load_reference(family, model)(input_ids=ids).logits
    assert (expected - base).abs().max() > 0.3
    assert_within((actual - expected).abs().max().detach(), bound, "logits")
    hf = architecture(model)
    assert peft_obstacle(hf, config) == ""
    check_adapter(tmp_path / "adapter", config, hf)


@pytest.mark.parametrize(
    ("family", "prefix", "targets", "obstacle"),
    [
        (
            "qwen3_5_moe_text",
            "",
            ("gate_proj", "down_proj"),
            "gate_proj and up_proj of experts only",
        ),
        ("qwen3_5_moe_text", "", ("up_proj",), "gate_proj and up_proj of experts only together"),
        ("qwen3_5_moe_text", ".language_model", (), "the experts of a model with a vision tower"),
        ("qwen3_5_moe_text", ".language_model", ("o_proj",), ""),
        ("nemotron_h", "", (), "it refuses out_proj of Mamba"),
        ("nemotron_h", "", ("up_proj",), "it does not find up_proj of experts without gate_proj"),
    ],
)
def test_what_peft_cannot_load_is_known(
    models: Models, family: str, prefix: str, targets: tuple[str, ...], obstacle: str
) -> None:
    hf = architecture(models[family])
    hf = dataclasses.replace(hf, tensor_prefix=f"{hf.tensor_prefix}{prefix}")
    actual = peft_obstacle(hf, LORA.model_copy(update={"targets": targets}))
    assert obstacle in actual
    assert bool(obstacle) == bool(actual)
