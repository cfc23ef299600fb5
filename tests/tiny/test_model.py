from __future__ import annotations

import json

import torch

from bapo_megatron.tiny.model import build_model, build_tokenizer, save_model
from tests.policy.tiny_models import load_reference


def test_the_saved_directory_gives_the_same_logits(tmp_path):
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    save_model(model, tokenizer, tmp_path)
    input_ids = torch.randint(0, 320, (3, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = load_reference("qwen2", tmp_path)(input_ids).logits
        actual = model(input_ids).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_saved_configuration_suits_tensor_parallelism_and_names_the_end_token(tmp_path):
    tokenizer = build_tokenizer()
    save_model(build_model(tokenizer, seed=0), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (320, 2048)
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "float32"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 1


def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone():
    tokenizer = build_tokenizer()
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    first, same, other = (build_model(tokenizer, seed) for seed in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert sum(parameter.numel() for parameter in first.parameters()) == 115_264
    assert torch.equal(torch.rand(4), expected)
