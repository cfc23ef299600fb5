"""Tiny random models by transformers, packed batches, and transformers' own logits and gradients.

Shape legend: N = packed tokens, V = vocabulary, S = tokens of one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.data.micro_batch import TOKEN_FIELDS, shard_context
from bapo_megatron.types import MicroBatch

VOCAB_SIZE = 97  # prime, so that padding is needed for every tensor-parallel size
FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "qwen3_moe",
    "glm4_moe",
    "qwen3_5_text",
    "qwen3_next",
    "deepseek_v3",
    "gemma3_text",
    "olmo2",
    "minimax_m2",
    "nemotron_h",
)
"""Those of tests in every layout."""
Models = dict[str, Path]
"""Directories of models, or of checkpoints, by family."""
Ranks = list[dict[str, Any]]
"""What ranks return, in their order."""

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}

MOONLIGHT = {
    "q_lora_rank": None,
    "n_group": 1,
    "n_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
"""How Moonlight differs from the tiny DeepSeek-V3: no latent of queries, no groups, no YaRN."""
HYBRID = {
    "tie_word_embeddings": False,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.12,
    # A delta net's output, a product of queries and keys that may cancel, is divided by its size:
    # with 1e-6 transformers in float32 is up to 2e-5 off transformers in float64.
    "rms_norm_eps": 1e-3,
}
"""A gated delta net before each attention."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
SHARED_EXPERTS = EXPERTS | {
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
HYBRID_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

NEMOTRON_H = {
    "hybrid_override_pattern": "M*-E",
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    # transformers limits steps of its prefill to time_step_min, nobody else
    "time_step_min": 1e-9,
    "time_step_floor": 0.3,
    "time_step_max": 1.0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
"""A layer of each kind."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}

Batches = tuple[tuple[tuple[int, ...], ...], ...]
"""Token ids of the sequences of micro-batches."""
SEQUENCES: Batches = (((7, 3), (5,), (11, 9, 40)), ((96, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (50, 51)))
"""Token ids of the sequences of each micro-batch: different lengths, one of a single token."""


def make_model(family: str, directory: Path, **changes: Any) -> Path:
    """Write a random model in float32; norms and biases are random too."""
    torch.manual_seed(FAMILIES.index(family) if family in FAMILIES else len(FAMILIES))
    model = model_class(family)(_config(family, changes)).float()
    _randomize(model)
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return directory


def _randomize(model: Any) -> None:
    with torch.no_grad():
        biases = (b for b in model.named_buffers() if b[0].endswith("e_score_correction_bias"))
        for name, parameter in (*model.named_parameters(), *biases):
            if parameter.dim() == 1 or name.endswith("proj_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3.0)  # or states would forget within few tokens


def make_gemma_vision_model(directory: Path, **changes: Any) -> Path:
    """As published: a vision tower and its projector, under the names of older transformers."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = sizes | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    text = _config(
        "gemma3_text", {"num_hidden_layers": 4, "max_position_embeddings": 512} | changes
    )
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).float()
    _randomize(model)
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return directory


def make_vision_model(directory: Path) -> Path:
    """As published: a vision tower, and a tensor of a head for multi-token prediction."""
    import transformers
    from safetensors.torch import load_file, save_file

    text = {**SIZES, **HYBRID, "num_hidden_layers": 4, "max_position_embeddings": 512}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16}
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float()
    _randomize(model)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.randn(32, 64)}, file, {"format": "pt"})
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return directory


def load_reference(family: str, directory: Path) -> Any:
    """The model as transformers reads it."""
    return model_class(family).from_pretrained(directory, dtype=torch.float32)


def model_class(family: str) -> Any:
    import transformers

    return {
        "qwen2": transformers.Qwen2ForCausalLM,
        "qwen3": transformers.Qwen3ForCausalLM,
        "llama": transformers.LlamaForCausalLM,
        "mistral": transformers.MistralForCausalLM,
        "qwen3_moe": transformers.Qwen3MoeForCausalLM,
        "gpt_oss": transformers.GptOssForCausalLM,
        "glm4_moe": transformers.Glm4MoeForCausalLM,
        "mistral_window": transformers.MistralForCausalLM,
        "deepseek_v3": transformers.DeepseekV3ForCausalLM,
        "kimi_k2": transformers.DeepseekV3ForCausalLM,
        "glm4_moe_lite": transformers.Glm4MoeLiteForCausalLM,
        "moonlight": transformers.DeepseekV3ForCausalLM,
        "gemma3": transformers.Gemma3ForConditionalGeneration,
        "gemma3_text": transformers.Gemma3ForCausalLM,
        "minimax_m2": transformers.MiniMaxM2ForCausalLM,
        "olmo2": transformers.Olmo2ForCausalLM,
        "nemotron_h": transformers.NemotronHForCausalLM,
        "qwen3_5_text": transformers.Qwen3_5ForCausalLM,
        "qwen3_next": transformers.Qwen3NextForCausalLM,
        "qwen3_5_moe_text": transformers.Qwen3_5MoeForCausalLM,
        "qwen3_5_moe": transformers.Qwen3_5MoeForConditionalGeneration,
        "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
    }[family]


def _config(family: str, changes: dict[str, Any]) -> Any:
    traits: dict[str, dict[str, Any]] = {
        "qwen2": {"tie_word_embeddings": False},
        "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
        "llama": {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        "mistral": {
            "tie_word_embeddings": False,
            "sliding_window": None,
            "rope_parameters": YARN,
        },
        "qwen3_moe": {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "num_experts": 8,
            **EXPERTS,
        },
        "gpt_oss": {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 8,
            "sliding_window": 4,
            "swiglu_limit": 1.0,  # many values are beyond
            "rope_parameters": YARN | {"truncate": False},
        },
        "glm4_moe": {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            **SHARED_EXPERTS,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
        },
        "deepseek_v3": {
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            **SHARED_EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        "gemma3_text": {
            "pad_token_id": None,  # transformers keeps its embedding out of training
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
        "minimax_m2": {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "rotary_dim": 8,
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        "olmo2": {"pad_token_id": None, "eos_token_id": None},  # of its own vocabulary
        "nemotron_h": NEMOTRON_H,
        "qwen3_5_text": HYBRID,
        "qwen3_next": HYBRID | HYBRID_EXPERTS,
        "qwen3_5_moe_text": HYBRID | HYBRID_EXPERTS,
    }
    traits["moonlight"] = traits["deepseek_v3"] | MOONLIGHT
    traits["glm4_moe_lite"] = traits["deepseek_v3"] | {
        "n_group": 1,
        "rms_norm_eps": 1e-6,  # which transformers fixes for the norms of latents
        "rope_parameters": MOONLIGHT["rope_parameters"],
    }
    traits["mistral_window"] = traits["mistral"] | {"sliding_window": 4}
    sizes = {**SIZES, **traits[family], **changes}
    if family == "qwen3_5_moe_text":
        del sizes["intermediate_size"]
    return model_class(family).config_class(**sizes)


@dataclass(frozen=True)
class Problem:
    """A micro-batch with the weights of its loss: Σ (logits² · coefficient) over the vocabulary."""

    micro_batch: MicroBatch
    coefficient_NV: Tensor

    def part(self, rank: int, size: int) -> Problem:
        """What one context-parallel rank holds of it."""
        if size == 1:
            return self
        parts = shard_context(_with_rows(self.micro_batch), rank, size)
        return Problem(parts, self.coefficient_NV[parts.target_T])

    def loss(self, logits_NV: Tensor, vocab_start: int = 0) -> Tensor:
        """This rank's columns' share of the loss; padding columns have none."""
        columns = min(logits_NV.shape[1], VOCAB_SIZE - vocab_start)
        coefficient = self.coefficient_NV[:, vocab_start : vocab_start + columns]
        return (logits_NV[:, :columns].float().square() * coefficient).sum()


def make_problems(
    seed: int = 0,
    pad_to_multiple: int = 2,
    sequence_multiple: int = 1,
    batches: Sequence[Sequence[Sequence[int]]] = SEQUENCES,
) -> list[Problem]:
    """One per entry of ``batches``; with the seed, tokens are shifted and coefficients drawn.

    Padding, of each sequence and at the end, has coefficient 0: it changes no gradient.
    """
    problems = []
    for number, sequences in enumerate(batches):
        generator = torch.Generator().manual_seed(10 * seed + number)
        padded, coefficients = [], []
        for sequence in sequences:
            shifted = [(token + seed) % VOCAB_SIZE for token in sequence]
            padding = [0] * (-len(shifted) % sequence_multiple)
            padded.append([*shifted, *padding])
            drawn = torch.randn(len(shifted), VOCAB_SIZE, generator=generator) / 100
            coefficients += [drawn, torch.zeros(len(padding), VOCAB_SIZE)]
        at_end = -sum(map(len, padded)) % pad_to_multiple
        if at_end:
            padded.append([0] * at_end)
            coefficients.append(torch.zeros(at_end, VOCAB_SIZE))
        problems.append(Problem(_pack(padded), torch.cat(coefficients)))
    return problems


def reference_logits(model: Any, problem: Problem) -> Tensor:
    """[N, V], one sequence at a time, so that nothing is packed."""
    lengths = problem.micro_batch.cu_seqlens.diff().tolist()
    sequences = problem.micro_batch.token_ids_N.split(lengths)
    return torch.cat([model(input_ids=ids_S[None]).logits[0] for ids_S in sequences])


def reference_gradients(model: Any, problems: list[Problem]) -> dict[str, Tensor]:
    """Gradients of the sum of all problems' losses, by name."""
    model.zero_grad()
    for problem in problems:
        problem.loss(reference_logits(model, problem)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return per_expert(gradients, model)


MINIMAX_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What files of MiniMax-M2 call parts of names."""


def per_expert(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Tensors as files name them: transformers keeps the experts of a layer together.

    So do the files of gpt-oss, whose experts have biases.
    """
    if model.config.model_type == "gpt_oss":
        return tensors
    if model.config.model_type == "nemotron_h":
        tensors = {name.replace("model.", "backbone.", 1): t for name, t in tensors.items()}
    named = dict(one for name, fused in tensors.items() for one in _parts(name, fused))
    if model.config.model_type != "minimax_m2":
        return named
    parts = {name: [MINIMAX_NAMES.get(part, part) for part in name.split(".")] for name in named}
    return {".".join(parts[name]): tensor for name, tensor in named.items()}


def _parts(name: str, fused: Tensor) -> Iterator[tuple[str, Tensor]]:
    layer, experts, kind = name.rpartition(".experts.")
    if not experts:
        yield name, fused
        return
    for number, expert in enumerate(fused):
        if kind == "gate_up_proj":
            gate, up = expert.chunk(2)
            yield f"{layer}.experts.{number}.gate_proj.weight", gate
            yield f"{layer}.experts.{number}.up_proj.weight", up
        else:
            yield f"{layer}.experts.{number}.{kind}.weight", expert


def set_config_field(directory: Path, **values: Any) -> None:
    """Change fields of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _with_rows(batch: MicroBatch) -> MicroBatch:
    """Take every row for a response token; its place in the whole is its target."""
    rows = torch.arange(batch.num_tokens)
    kept = dict.fromkeys(TOKEN_FIELDS, rows)
    return replace(batch, **kept)


def _pack(sequences: list[list[int]]) -> MicroBatch:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    used = {
        "token_ids_N": torch.tensor([token for sequence in sequences for token in sequence]),
        "position_ids_N": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        "rows_T": torch.arange(int(lengths.sum())),
    }
    # What else belongs to response tokens is not the policy's business.
    names = [f.name for f in fields(MicroBatch) if f.name not in ("columns", "routes")]
    return MicroBatch(**{name: used.get(name, torch.empty(0)) for name in names})
