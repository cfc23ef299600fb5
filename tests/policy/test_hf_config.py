"""What config.json is understood, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bapo_megatron.config.check import text_fields
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.megatron import LoraConfig, ParallelConfig
from bapo_megatron.data.packing import SequenceFlops
from bapo_megatron.engine.local.kind import LocalKind
from bapo_megatron.policy.adapters import check_targets, targets_of
from bapo_megatron.policy.architecture import Experts, HfConfig, Llama3Rope, YarnRope
from bapo_megatron.policy.families import FAMILIES
from bapo_megatron.policy.families.config_json import HARMLESS_FIELDS
from bapo_megatron.policy.hf_config import check_division, read_hf_config_file
from bapo_megatron.policy.megatron_setup import _scale_frequencies
from bapo_megatron.policy.mixers.attention import Attention
from bapo_megatron.policy.mixers.latent import LatentAttention
from bapo_megatron.policy.weight_table import sequence_flops
from tests.policy.families import MODEL_TYPES, TINY
from tests.policy.tiny_models import VISION, model_class
from tests.tools.planning.cases import MODELS, published

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As published for Qwen2.5-0.5B, in the spelling of transformers 4."""

LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

YARN_ROPE = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
"""As Qwen2.5's page gives it for long texts."""
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}


def write(directory: Path, changes: dict[str, Any]) -> Path:
    fields = {name: value for name, value in (QWEN25 | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory / "config.json"


def test_qwen25_is_read_with_its_biases(tmp_path: Path) -> None:
    assert read_hf_config_file(write(tmp_path, {})) == HfConfig(
        model_type="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        mixers=(Attention(),) * 24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rope_scaling=None,
        tied_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
    )


def test_every_family_has_tiny_models_that_its_tests_see() -> None:
    tiny = {MODEL_TYPES.get(name, name) for name in TINY} | VISION.keys()
    # transformers does not know kimi_k2, a DeepSeek-V3.
    assert tiny == FAMILIES.keys() - {"kimi_k2"} == {*LocalKind.model_types}


def test_every_field_of_transformers_own_configurations_is_known_here() -> None:
    for family, description in FAMILIES.items():
        known = {*HARMLESS_FIELDS}
        for name, field in description.fields.model_fields.items():
            alias = field.validation_alias
            known |= {name} if alias is None else set(alias.choices)
        fields = text_fields(model_class(family).config_class().to_dict())
        assert {name for name, value in fields.items() if value} - known == set(), family
        config = getattr(transformers, description.architecture).config_class()
        base = config.get_text_config().default_theta
        base = base["global"] if isinstance(base, dict) else base
        assert description.fields.default_rope_theta == base, family


def test_a_field_that_nobody_knows_is_refused_unless_it_is_off(tmp_path: Path) -> None:
    read_hf_config_file(write(tmp_path, {"use_mrope": False, "auto_map": None}))
    with pytest.raises(ValueError, match=r"config.json: 'logit_scale' is unknown.*got 0.5"):
        read_hf_config_file(write(tmp_path, {"logit_scale": 0.5}))


def test_4_bit_weights_are_refused_with_how_to_dequantize_them(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ValueError, match=r"got 'mxfp4'; load .*=Mxfp4Config\(dequantize=True\)"):
        read_hf_config_file(write(tmp_path, quantized))


GPT_OSS = json.loads((MODELS / "gpt-oss-20b.json").read_text())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_types", ["full_attention"]),
        ("layer_types", ["linear_attention"] * 24),
        ("experts_per_token", 2),
        *(("attention_bias", False), ("swiglu_alpha", 1.5), ("sliding_window", None)),
    ],
)
def test_a_gpt_oss_that_megatron_or_engines_compute_otherwise_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"'{name}"):
        read_hf_config_file(write(tmp_path, GPT_OSS | {name: value}))


def test_experts_of_gpt_oss_are_not_divided_and_get_no_adapters() -> None:
    hf, parallel = published("gpt-oss-20b"), ParallelConfig(tensor=2, sequence=True)
    with pytest.raises(ConfigError, match=r"parallel\.expert_tensor: must be 1 .* got 2; set it"):
        check_division(hf, parallel)
    assert targets_of(hf, LoraConfig(rank=1)) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match=r"k_proj, o_proj, q_proj, v_proj, got down_proj; choose"):
        check_targets(hf, LoraConfig(rank=1, targets=("down_proj",)), 1)


LLAMA3 = Llama3Rope(32.0, 1.0, 4.0, 8192)
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3": (QWEN3, {"qkv_bias": False, "qk_norm": True, "head_dim": 128}),
    "no key-value heads": ({"num_key_value_heads": "absent"}, {"num_kv_heads": 14}),
    "no base": ({"rope_theta": "absent"}, {"rope_theta": 10000.0}),
    "no base of the default rope": (
        {"rope_theta": "absent", "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 10000.0},
    ),
    "Mistral with a window": (
        MISTRAL | {"sliding_window": 4096},
        {"mixers": (Attention(4096),) * 24},
    ),
    "Mistral with transformers' window": (
        MISTRAL | {"sliding_window": "absent"},
        {"mixers": (Attention(4096),) * 24},
    ),
    "Mistral without a window": (
        MISTRAL,
        {"qkv_bias": False, "output_bias": False, "qk_norm": False},
    ),
    "attention biases": (LLAMA | {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    "Qwen3 with attention biases": (
        QWEN3 | {"attention_bias": True},
        {"qkv_bias": True, "output_bias": True, "qk_norm": True},
    ),
    "llama3 of transformers 4": (
        LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "qkv_bias": False},
    ),
    "llama3 of transformers 5": (
        LLAMA
        | {"rope_theta": "absent", "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "qkv_bias": False},
    ),
}
"""Changes of Qwen2.5's file, and fields of what is read."""


@pytest.mark.parametrize("name", READ)
def test_fields_are_read_in_every_spelling(tmp_path: Path, name: str) -> None:
    changes, expected = READ[name]
    config = read_hf_config_file(write(tmp_path, changes))
    assert {field: getattr(config, field) for field in expected} == expected


def test_moonlight_is_read_with_its_latents_experts_and_code_that_nothing_runs() -> None:
    config = read_hf_config_file(MODELS / "moonlight-16b-a3b.json")
    assert config.mixers == (LatentAttention(None, 512, 128, 64, 128),) * 27
    assert (config.head_dim, config.mixers[0].cached_channels(config)) == (192, 576)
    assert config.experts == Experts(
        num=64,
        per_token=6,
        intermediate_size=1408,
        scoring="sigmoid",
        scale=2.446,
        has_bias=True,
        shared_intermediate_size=2816,
        dense_layers=frozenset({0}),
    )
    # Two per weight that a token meets, and per pair 27 layers of 16 heads of 192 + 128 channels.
    assert sequence_flops(config) == SequenceFlops(5_158_207_488, 27 * 16 * 320)


def test_a_delta_net_reads_its_state_twice_and_writes_it_for_every_token() -> None:
    flops = sequence_flops(read_hf_config_file(MODELS / "qwen3.5-27b.json"))
    matrices = 25_621_954_560  # of transformers' model on the meta device, without the embedding
    states = 48 * 48 * 128 * 128  # 48 delta nets of 48 heads
    assert flops == SequenceFlops(2 * (matrices + 3 * states), 16 * 24 * (256 + 256))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"n_group": 4, "topk_group": 2}, "'num_experts_per_tok' must be 2 × 'topk_group' 2"),
        ({"num_key_value_heads": 4}, "'num_key_value_heads' must be 'num_attention_heads' 16"),
        ({"rope_interleave": False}, "'rope_interleave'"),
        ({"n_group": 3, "topk_group": 3}, "'n_group' must divide 'n_routed_experts' 64"),
        ({"n_group": 64, "topk_group": 3}, "'n_group' must divide 'n_routed_experts' 64"),
        ({"n_group": 2, "topk_group": 3}, "'n_group' .* at least 'topk_group' 3, got 2"),
        ({"num_experts_per_tok": 65}, "'num_experts_per_tok' must be at most .* 64, got 65"),
        ({"v_head_dim": 256}, "'v_head_dim' must be at most 192, got 256"),
        ({"head_dim": 128}, "'head_dim' must be 64 or absent, got 128"),
        ({"qk_head_dim": 128}, "'qk_head_dim' must be 192 or absent, got 128"),
        ({"qk_rope_head_dim": 62}, "'qk_rope_head_dim'"),
        ({"norm_topk_prob": False}, "'norm_topk_prob'"),
        ({"scoring_func": "softmax"}, "'scoring_func'"),
        ({"num_experts_per_tok": 1}, "'num_experts_per_tok'"),
        ({"attention_bias": True}, "'attention_bias' must be false"),
        ({"rope_scaling": LLAMA3_ROPE}, "'rope_scaling' must be absent, or yarn"),
        ({"rope_scaling": YARN_ROPE | {"mscale": 1.0}}, "'rope_scaling' must be absent, or yarn"),
        ({"rope_scaling": YARN_ROPE | {"truncate": False}}, "'rope_scaling' must be absent, or"),
    ],
)
def test_a_deepseek_that_megatron_or_engines_compute_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    fields = json.loads((MODELS / "moonlight-16b-a3b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: {rule}"):
        read_hf_config_file(tmp_path / "config.json")


def test_fields_that_a_user_ignores_may_have_any_value_but_none_that_is_read(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, {"logit_scale": 0.5, "unsloth_fixed": True})
    assert read_hf_config_file(path, ["logit_scale"]) == read_hf_config_file(write(tmp_path, {}))
    with pytest.raises(ConfigError, match=r"^model\.ignored_config_fields: .* got 'rope_scaling'"):
        read_hf_config_file(path, ["logit_scale", "rope_scaling"])


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "'factor'"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "'rope_theta', 'rope_parameters'"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LLAMA3_ROPE},
            "'rope_theta', 'rope_parameters'",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "'factor' is missing"),
        ({"rope_scaling": YARN_ROPE | {"factor": 0.5}}, "'factor' must be greater"),
        # SGLang reads attn_factor, transformers attention_factor.
        ({"rope_scaling": YARN_ROPE | {"attn_factor": 2.0}}, "'attn_factor' is an unknown field"),
        (
            {"rope_scaling": YARN_ROPE | {"attention_factor": 1.0}},
            r"'attention_factor' must be 1\.138629, .* got 1\.0",
        ),
        (MISTRAL | {"attention_bias": True}, "'attention_bias' must be false with .* mistral"),
        ({"hidden_size": 8}, "'num_attention_heads' .* 'hidden_size' 8"),
        ({"num_key_value_heads": 3}, "'num_attention_heads' .* 'num_key_value_heads' 3"),
        *(
            ({name: value}, f"'{name}")
            for name, value in (
                *(("model_type", "qwen2_moe"), ("model_type", "absent")),
                ("architectures", ["Qwen2ForSequenceClassification"]),
                ("layer_types", ["full_attention", "sliding_attention"]),
                ("rope_scaling", {"type": "dynamic"}),
                ("rope_parameters", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
                *(("attention_bias", True), ("mlp_bias", True), ("use_sliding_window", True)),
                *(("attention_dropout", 0.1), ("partial_rotary_factor", 0.5)),
                *(("hidden_act", "gelu"), ("quantization_config", {"bits": 4})),
                *(("hidden_size", "absent"), ("num_hidden_layers", 0), ("vocab_size", "151936")),
                *(("vocab_size", 10**30), ("rms_norm_eps", True), ("rms_norm_eps", float("nan"))),
            )
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_with_file_and_field(
    tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: {rule}"):
        read_hf_config_file(write(tmp_path, changes))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config.json: (not valid JSON|must be an object)"):
        read_hf_config_file(tmp_path / "config.json")


SPELLINGS: dict[str, dict[str, Any]] = {
    "transformers 4": {"rope_scaling": YARN_ROPE},
    "transformers 5": {
        "rope_theta": "absent",
        "rope_parameters": YARN_ROPE | {"rope_theta": 1e4, "rope_type": "yarn"},
    },
    "original positions by default": {"rope_scaling": {"rope_type": "yarn", "factor": 8}},
    "no factor of all dimensions": {"rope_scaling": YARN_ROPE | {"mscale": 2.0}},
    "every field": {
        "rope_scaling": YARN_ROPE
        | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.194464876}
        | {"mscale": 2.0, "mscale_all_dim": 0.5},
    },
    "no scaling at all": {"rope_scaling": YARN_ROPE | {"factor": 1.0}},
}

SGLANG = """
import json, sys, torch
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_rope_config
for directory in sys.argv[1:]:
    config = get_config(directory, trust_remote_code=False)
    theta, scaling = get_rope_config(config)
    rope = get_rope(64, 64, config.max_position_embeddings, theta, True, scaling, torch.float32)
    inv_freq = rope._compute_inv_freq(rope.scaling_factor).tolist()
    print("\\n" + json.dumps([inv_freq, rope.mscale, get_context_length(config)]))
"""
"""Prints what SGLang makes of each model directory; heads have 64 channels."""


def ours(path: Path) -> tuple[list[float], float]:
    hf = read_hf_config_file(path)
    assert isinstance(hf.rope_scaling, YarnRope)
    powers = torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim
    rope: Any = SimpleNamespace(inv_freq=1 / hf.rope_theta**powers)  # as Megatron begins
    _scale_frequencies(rope, hf)
    return rope.inv_freq.tolist(), hf.rope_scaling.attention_factor


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_frequencies_and_factor_are_those_of_transformers_bit_by_bit(
    tmp_path: Path, spelling: str
) -> None:
    path = write(tmp_path, SPELLINGS[spelling])
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(tmp_path), "cpu")
    assert ours(path) == (inv_freq.tolist(), pytest.approx(factor, rel=1e-9))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_frequencies_and_factor_are_those_of_sglang_bit_by_bit(tmp_path: Path) -> None:
    directories = [tmp_path / spelling for spelling in SPELLINGS]
    for directory, fields in zip(directories, SPELLINGS.values(), strict=True):
        directory.mkdir()
        write(directory, fields)
    done = subprocess.run(
        [sys.executable, "-c", SGLANG, *directories],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    for directory, (inv_freq, factor, positions) in zip(directories, printed, strict=True):
        assert ours(directory / "config.json") == (inv_freq, pytest.approx(factor, rel=1e-9))
        assert positions == 32768, directory  # config.json's max_position_embeddings
