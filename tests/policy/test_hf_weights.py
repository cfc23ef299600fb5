"""The mapping between Hugging Face tensors and tensor-parallel shards, by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.policy.architecture import Weight
from bapo_megatron.policy.families.layers import DENSE_MLP
from bapo_megatron.policy.hf_config import padded_vocab_size, read_hf_config_file
from bapo_megatron.policy.hf_weights import INDEX_NAME, find_tensors, to_shard
from bapo_megatron.policy.mixers.attention import Attention
from bapo_megatron.policy.mixers.latent import LatentAttention
from bapo_megatron.policy.weight_export import (
    GATHER_BYTES,
    _holders,
    plan_buckets,
    plan_files,
    weight_bytes,
)
from bapo_megatron.policy.weight_table import EMBEDDING, hf_shapes, weight_table
from tests.policy.convert_models import copy_with
from tests.policy.fake_world import fake_world
from tests.policy.tiny_models import Models, set_config_field
from tests.tools.planning.cases import published

HF = replace(
    published("deepseek-r1-distill-qwen-7b"),
    vocab_size=5,
    hidden_size=4,
    intermediate_size=4,
    mixers=(Attention(),),
    num_heads=4,
    num_kv_heads=2,
    head_dim=1,
)
QKV = next(weight for weight in Attention().weights(HF) if weight.form == "qkv")
GATE_UP = next(weight for weight in DENSE_MLP if weight.form == "gate_up")
OUTPUT_PROJECTION = next(weight for weight in Attention().weights(HF) if weight.axis == 1)


def rows(*values: int) -> torch.Tensor:
    """A matrix [n, 4] whose row i is filled with values[i]."""
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 4).contiguous()


@pytest.mark.parametrize(
    ("weight", "parts", "rank", "size", "shard"),
    [
        (QKV, [(0, 1, 2, 3), (10, 11), (20, 21)], 0, 1, [0, 1, 10, 20, 2, 3, 11, 21]),
        (QKV, [(0, 1, 2, 3), (10, 11), (20, 21)], 1, 2, [2, 3, 11, 21]),
        (GATE_UP, [(0, 1, 2, 3), (10, 11, 12, 13)], 0, 2, [0, 1, 10, 11]),
        (GATE_UP, [(0, 1, 2, 3), (10, 11, 12, 13)], 1, 2, [2, 3, 12, 13]),
        (EMBEDDING, [(1, 2, 3, 4, 5)], 0, 2, [1, 2, 3, 4, 5] + [0] * 59),
        (EMBEDDING, [(1, 2, 3, 4, 5)], 1, 2, [0] * 64),
    ],
)
def test_rows_are_interleaved_by_group_divided_or_padded_with_zeros(
    weight: Weight, parts: list[tuple[int, ...]], rank: int, size: int, shard: list[int]
) -> None:
    tensors = [rows(*part) for part in parts]
    assert torch.equal(to_shard(weight, tensors, HF, rank, size), rows(*shard))


def test_inputs_of_the_output_projection_are_divided() -> None:
    weight = torch.arange(16.0).view(4, 4)
    assert torch.equal(to_shard(OUTPUT_PROJECTION, [weight], HF, 1, 2), weight[:, 2:])


class CountingSlice:
    """A tensor that counts the bytes of what is asked of it, as safetensors reads them."""

    num_bytes = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        CountingSlice.num_bytes += self._tensor[part].nbytes
        return self._tensor[part]


def test_tensor_parallel_ranks_read_the_model_once_and_not_once_each() -> None:
    hf = replace(HF, vocab_size=300, hidden_size=64, intermediate_size=96, num_heads=8, head_dim=8)
    model_bytes = 0
    for weight in weight_table(hf):
        tensors = [torch.randn(shape) for shape in hf_shapes(weight, hf).values()]
        model_bytes += sum(tensor.nbytes for tensor in tensors)
        for rank in range(2):
            to_shard(weight, [CountingSlice(tensor) for tensor in tensors], hf, rank, 2)
    # Three norms of 64 float32 values are held, and read, by both ranks.
    assert CountingSlice.num_bytes == model_bytes + 3 * 64 * 4


def test_padding_of_the_vocabulary_does_not_depend_on_common_tensor_sizes() -> None:
    assert [padded_vocab_size(97, tensor) for tensor in (1, 2, 8)] == [128, 128, 128]
    assert padded_vocab_size(151936, 8) == 151936
    assert padded_vocab_size(97, 3) == 384


def test_files_are_filled_in_order_up_to_the_limit() -> None:
    files = plan_files(HF, torch.float32, max_file_bytes=96)
    # Embedding [5, 4], norm [4] | q [4, 4], k [2, 4] fills a file to the byte | …
    layer = "model.layers.0."
    assert list(files[0].items()) == [
        ("model.embed_tokens.weight", 80),
        (f"{layer}input_layernorm.weight", 16),
    ]
    assert files[1] == {
        f"{layer}self_attn.q_proj.weight": 64,
        f"{layer}self_attn.k_proj.weight": 32,
    }
    assert sum(len(file) for file in files) == 15
    # A tensor above the limit has a file of its own.
    assert [len(file) for file in plan_files(HF, torch.float32, 1)] == [1] * 15


@pytest.mark.parametrize(
    ("dtype", "max_bytes", "sizes"),
    [
        # Embedding 80; norm 16, qkv 128, output projection 64, bias 32 bytes, …
        (torch.float32, 1, [80, 16, 128, 64, 32, 16, 128, 64, 16, 80]),
        (torch.float32, 96, [96, 128, 96, 16, 128, 80, 80]),
        (torch.bfloat16, 48, [48, 64, 48, 8, 64, 40, 40]),
        (torch.float32, 1 << 20, [624]),
    ],
)
def test_buckets_hold_whole_parameters_in_order_and_exceed_the_limit_by_single_ones_only(
    dtype: torch.dtype, max_bytes: int, sizes: list[int]
) -> None:
    buckets = plan_buckets(weight_table(HF), HF, dtype, max_bytes)
    assert tuple(weight for bucket in buckets for weight in bucket) == weight_table(HF)
    of_buckets = [
        sum(sum(weight_bytes(weight, HF, dtype).values()) for weight in bucket)
        for bucket in buckets
    ]
    assert of_buckets == sizes


def test_no_bucket_ends_between_weights_that_a_server_fuses_as_it_loads_them() -> None:
    moonlight = published("moonlight-16b-a3b")
    latent = moonlight.mixers[0]
    assert isinstance(latent, LatentAttention)
    hf = replace(moonlight, mixers=(replace(latent, query_rank=1536),) * 4)
    for max_mb in range(1, 120):
        buckets = plan_buckets(weight_table(hf), hf, torch.bfloat16, max_mb * 10**6)
        assert [w for bucket in buckets for w in bucket] == list(weight_table(hf))
        names = [{name for weight in bucket for name in weight.hf} for bucket in buckets]
        for layer in range(4):
            attention = f"model.layers.{layer}.self_attn"
            pair = {f"{attention}.q_a_proj.weight", f"{attention}.kv_a_proj_with_mqa.weight"}
            assert sum(pair <= bucket for bucket in names) == 1
            assert sum(bool(pair & bucket) for bucket in names) == 1


def _set_index(model: Path, weight_map: Any) -> None:
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("harm", "messages"),
    [
        (
            # 12 tensors of a layer, 5 are named.
            lambda model: set_config_field(model, num_hidden_layers=3, layer_types=None),
            ("missing model.layers.2.input_layernorm.weight, ", "and 7 more"),
        ),
        (
            lambda model: set_config_field(model, tie_word_embeddings=True, num_hidden_layers=1),
            ("unexpected model.layers.1.input_layernorm.weight, ",),
        ),
        (
            lambda model: set_config_field(model, intermediate_size=50),
            ("model.layers.0.mlp.gate_proj.weight is [48, 32], config.json asks for [50, 32]",),
        ),
        (lambda model: (model / "model.safetensors").unlink(), ("neither model.safetensors nor",)),
        (
            lambda model: (model / "model.safetensors").write_bytes(b"not safetensors"),
            ("model.safetensors: not a readable safetensors file",),
        ),
        (lambda model: _set_index(model, {"a": "other.safetensors"}), ("other.safetensors: not",)),
        (lambda model: _set_index(model, []), (f"{INDEX_NAME}: 'weight_map'",)),
    ],
)
def test_files_that_do_not_fit_are_named(
    models: Models,
    tmp_path: Path,
    harm: Callable[[Path], object],
    messages: tuple[str, ...],
) -> None:
    model = copy_with(models["qwen2"], tmp_path / "model")
    harm(model)
    with pytest.raises(ValueError, match=str(model)) as caught:
        find_tensors(read_hf_config_file(model / "config.json"), model)
    assert all(message in str(caught.value) for message in messages)
    assert "lm_head" not in str(caught.value)


def test_weights_must_be_floats(models: Models, tmp_path: Path) -> None:
    norm = {"model.norm.weight": torch.ones(32, dtype=torch.int8)}
    model = copy_with(models["qwen2"], tmp_path / "model", lambda tensors: tensors.update(norm))
    with pytest.raises(ValueError, match=r"model.norm.weight must be stored as .*I8"):
        find_tensors(read_hf_config_file(model / "config.json"), model)


def test_the_experts_of_a_large_model_are_gathered_in_few_messages() -> None:
    hf = published("qwen3-30b-a3b")
    layout = {"tensor": 4, "sequence": True, "context": 2, "expert": 8, "expert_tensor": 1}
    assert sum(len(hf_shapes(weight, hf)) for weight in weight_table(hf)) == 18_867
    buckets = plan_buckets(weight_table(hf), hf, torch.bfloat16, GATHER_BYTES)
    with fake_world(ParallelConfig.model_validate(layout), 0) as groups:
        senders = [{r for w in bucket for r in _holders(w, hf, groups)} - {0} for bucket in buckets]
    assert len(buckets) == 229
    assert sum(map(len, senders)) == 616
