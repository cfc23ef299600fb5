"""The mapping between Hugging Face tensors and tensor-parallel shards, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bapo_megatron.policy import hf_weights
from bapo_megatron.policy.hf_config import HfConfig, padded_vocab_size
from bapo_megatron.policy.hf_weights import (
    EMBEDDING,
    LAYER,
    from_shards,
    hf_shapes,
    read_shard,
    to_shard,
    weight_table,
)
from bapo_megatron.policy.weight_export import plan_files

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HF = HfConfig(
    model_type="qwen2",
    vocab_size=5,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=1,
    rms_norm_eps=1e-6,
    max_position_embeddings=8,
    rope_theta=1e4,
    rope_scaling=None,
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
)
QKV = next(weight for weight in LAYER if weight.form == "qkv")
GATE_UP = next(weight for weight in LAYER if weight.form == "gate_up")
OUTPUT_PROJECTION = next(weight for weight in LAYER if weight.axis == 1)


def rows(*values: int) -> torch.Tensor:
    """A matrix [n, 4] whose row i is filled with values[i]."""
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 4).contiguous()


def first_column(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor[:, 0]]


def test_query_key_value_are_interleaved_by_group() -> None:
    parts = [rows(0, 1, 2, 3), rows(10, 11), rows(20, 21)]
    assert first_column(to_shard(QKV, parts, HF, 0, 1)) == [0, 1, 10, 20, 2, 3, 11, 21]
    assert first_column(to_shard(QKV, parts, HF, 1, 2)) == [2, 3, 11, 21]


def test_each_rank_holds_its_part_of_gate_then_of_up() -> None:
    parts = [rows(0, 1, 2, 3), rows(10, 11, 12, 13)]
    assert first_column(to_shard(GATE_UP, parts, HF, 0, 2)) == [0, 1, 10, 11]
    assert first_column(to_shard(GATE_UP, parts, HF, 1, 2)) == [2, 3, 12, 13]


def test_rows_of_the_vocabulary_are_padded_with_zeros() -> None:
    embeddings = rows(1, 2, 3, 4, 5)
    assert first_column(to_shard(EMBEDDING, [embeddings], HF, 0, 2)) == [1, 2, 3, 4, 5] + [0] * 59
    assert first_column(to_shard(EMBEDDING, [embeddings], HF, 1, 2)) == [0] * 64


def test_inputs_of_the_output_projection_are_divided() -> None:
    weight = torch.arange(16.0).view(4, 4)
    assert torch.equal(to_shard(OUTPUT_PROJECTION, [weight], HF, 1, 2), weight[:, 2:])


def test_shards_of_any_number_of_ranks_give_back_every_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in weight_table(HF):
        tensors = {
            name: torch.randn(shape, generator=generator)
            for name, shape in hf_shapes(weight, HF).items()
        }
        for size in (1, 2):
            shards = [to_shard(weight, list(tensors.values()), HF, r, size) for r in range(size)]
            restored = from_shards(weight, shards, HF)
            assert restored.keys() == tensors.keys()
            assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


class CountingReader:
    """A safetensors reader that counts the bytes of what is asked of its slices."""

    num_bytes = 0

    def __init__(self, path: Path, framework: str) -> None:
        self.path, self.framework = path, framework

    def __enter__(self) -> CountingReader:
        self.reader = safe_open(self.path, framework=self.framework).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.__exit__(None, None, None)

    def get_slice(self, name: str) -> CountingReader:
        self.slice = self.reader.get_slice(name)
        return self

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        tensor = self.slice[part]
        CountingReader.num_bytes += tensor.nbytes
        return tensor


def test_tensor_parallel_ranks_read_the_model_once_and_not_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = replace(HF, vocab_size=300, hidden_size=64, intermediate_size=96, num_heads=8, head_dim=8)
    shapes = {n: s for weight in weight_table(hf) for n, s in hf_shapes(weight, hf).items()}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    files = dict.fromkeys(tensors, path)
    monkeypatch.setattr(hf_weights, "safe_open", CountingReader)
    for weight in weight_table(hf):
        whole = [tensors[name] for name in weight.hf]
        for rank in range(2):
            shard = read_shard(weight, files, hf, rank, 2)
            assert torch.equal(shard, to_shard(weight, whole, hf, rank, 2))
    # Three norms of 64 float32 values are held, and read, by both ranks.
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert CountingReader.num_bytes == model_bytes + 3 * 64 * 4


def test_tied_models_have_no_output_layer() -> None:
    fields = {name: getattr(HF, name) for name in HF.__dataclass_fields__}
    tied = HfConfig(**{**fields, "tied_embeddings": True})
    assert weight_table(HF)[-1].hf == ("lm_head.weight",)
    assert all("lm_head.weight" not in weight.hf for weight in weight_table(tied))


def test_padding_of_the_vocabulary_does_not_depend_on_common_tensor_sizes() -> None:
    assert [padded_vocab_size(97, tensor) for tensor in (1, 2, 8)] == [128, 128, 128]
    assert padded_vocab_size(151936, 8) == 151936
    assert padded_vocab_size(97, 3) == 384


def test_files_are_filled_in_order_up_to_the_limit() -> None:
    files = plan_files(HF, torch.float32, max_file_bytes=96)
    # Embedding [5, 4], norm [4] | q [4, 4], k [2, 4] fills a file to the byte | …
    assert list(files[0].items()) == [
        ("model.embed_tokens.weight", 80),
        *list(files[0].items())[1:],
    ]
    assert files[0]["model.layers.0.input_layernorm.weight"] == 16
    assert files[1] == {
        "model.layers.0.self_attn.q_proj.weight": 64,
        "model.layers.0.self_attn.k_proj.weight": 32,
    }
    assert sum(len(file) for file in files) == 15


def test_a_tensor_above_the_limit_has_a_file_of_its_own() -> None:
    files = plan_files(HF, torch.float32, max_file_bytes=1)
    assert [len(file) for file in files] == [1] * 15
