"""examples/smollm: a GGUF file becomes a model that computes the same, and the data are right."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.reward.math_answer import grade_math_answer
from examples.smollm.data import EXAMPLE, KINDS, draw, to_row
from examples.smollm.model import convert_gguf

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of each head in the order of llama.cpp, which rotates neighbours."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A GGUF file with 4-bit weights, and the model with the weights that it holds."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=128))
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZES["vocab_size"])
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 324)]]
    tokens = [*special, *letters[:256], "12"][: SIZES["vocab_size"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = parameter.numpy().copy()
            if weight.ndim == 1:
                writer.add_tensor(names.get_name(name, (".weight",)), weight)
                continue
            stored = gguf.quants.quantize(weight, Q4_1)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, Q4_1)))
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            if heads is not None:
                stored = gguf.quants.quantize(interleaved(weight, heads), Q4_1)
            writer.add_tensor(names.get_name(name, (".weight",)), stored, raw_dtype=Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_a_gguf_file_becomes_a_model_that_computes_the_same(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    path, expected = written
    convert_gguf(path, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    ids = torch.arange(0, 260, 7)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=1e-6)
    assert read_hf_config_file(tmp_path / "model" / "config.json").num_layers == 2


def test_its_tokenizer_renders_a_chat_without_a_system_prompt(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    convert_gguf(written[0], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "1+2"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("a12<|im_end|>")["input_ids"][-1] == 2


def test_questions_are_distinct_seeded_and_of_six_kinds() -> None:
    train, heldout = draw(0, 480, 300)
    assert (len(train), len(heldout)) == (480, 300)
    assert len({text for text, _ in train + heldout}) == 780
    assert (train, heldout) == draw(0, 480, 300) != draw(1, 480, 300)
    kinds = [
        re.sub(r"\d+|[A-Z]\w+|apples|books|coins|eggs|pencils|stamps|shells|tickets", "", text)
        for text, _ in heldout
    ]
    assert {kinds.count(kind) for kind in set(kinds)} == {300 // len(KINDS)}


def test_the_shown_form_of_an_answer_is_the_one_that_is_graded() -> None:
    ((question, shown),) = EXAMPLE
    assert (question, grade_math_answer(shown, "5").reward) == ("What is 2 + 3?", 1.0)
    row = json.loads(to_row(("What is 20 + 22?", 42)))
    assert row["answer"] == "42"
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
