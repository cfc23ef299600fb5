"""The division of a model into the buckets of a weight sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.policy.weight_export import plan_buckets
from tests.policy.tiny_models import load_reference, make_model

if TYPE_CHECKING:
    from pathlib import Path

# Qwen2 of 2 layers, vocabulary 97, hidden 32, 4 heads of 8, 2 key/value heads, intermediate 48.
EMBEDDING_BYTES = 97 * 32 * 4
LARGEST_LAYER_PARAMETER_BYTES = 2 * 48 * 32 * 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model("qwen2", directory)
    return directory


@pytest.mark.parametrize("max_bytes", [1, 5000, EMBEDDING_BYTES, 1 << 20])
def test_every_tensor_is_in_one_bucket_and_none_exceeds_the_limit_but_by_one_parameter(
    model_dir: Path, max_bytes: int
) -> None:
    tensors = load_reference("qwen2", model_dir).state_dict()
    buckets = plan_buckets(read_hf_config_file(model_dir / "config.json"), torch.float32, max_bytes)
    names = [name for bucket in buckets for weight in bucket for name in weight.hf]
    assert len(names) == len(set(names))
    assert set(names) == set(tensors)
    for bucket in buckets:
        num_bytes = sum(tensors[name].numel() * 4 for weight in bucket for name in weight.hf)
        assert num_bytes <= max_bytes or len(bucket) == 1


def test_buckets_are_filled_as_far_as_the_order_allows(model_dir: Path) -> None:
    hf = read_hf_config_file(model_dir / "config.json")
    assert len(plan_buckets(hf, torch.float32, 1 << 20)) == 1
    assert len(plan_buckets(hf, torch.bfloat16, EMBEDDING_BYTES // 2)[0]) == 1
    # The embedding, a first bucket of its own; a layer's parameters come one after the other.
    first, second, *_ = plan_buckets(hf, torch.float32, LARGEST_LAYER_PARAMETER_BYTES)
    assert [weight.hf for weight in first] == [("model.embed_tokens.weight",)]
    assert len(second) > 1
