"""The tiny model: its tokenizer, and a Qwen2 in plain torch with Hugging Face's parameter names.

The tokenizer knows the 256 bytes and a few words of the task, so no text is unknown to it.

Shapes: B = sequences, S = positions, D = hidden size, N = query heads, M = key-value heads,
H = head size.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, pre_tokenizers
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2Tokenizer

PAD, EOS, BOS, USER, ASSISTANT = "<pad>", "<eos>", "<bos>", "<|user|>", "<|assistant|>"
_SPECIAL_TOKENS = (PAD, EOS, BOS, USER, ASSISTANT)
"""Their ids are 0 to 4; the bytes follow."""

TASK_WORDS = ("\\boxed{", "\n\\boxed{", "\n+", " maybe ", ", no ", "=?")
"""Texts that are one token each; every other character is one token per byte."""

VOCABULARY_SIZE = 320
"""Rows of the embedding: a multiple of 64, so that any usual tensor-parallel size divides it."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(max_tokens: int = 2048) -> Qwen2Tokenizer:
    """Build the byte-level tokenizer with its chat template; nothing in it is learned.

    It is a ``Qwen2Tokenizer`` because ``AutoTokenizer`` makes one of whatever lies beside a Qwen2
    model, with Qwen2's pre-tokenizer; words of the task are added tokens, which it leaves whole.

    Args:
        max_tokens: Limit of the model's sequences, prompt and response together.
    """
    letters = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in TASK_WORDS])
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) <= VOCABULARY_SIZE
    return tokenizer


INITIAL_STD = 0.08
"""Standard deviation of the initial matrices; biases start at 0 and norms at 1."""


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    """The configuration of a two-layer model with 115,264 parameters."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=INITIAL_STD,
        dtype="float32",
    )


class TinyQwen2(nn.Module):
    """Qwen2 for right-padded batches, float32, without a key-value cache."""

    def __init__(self, config: Qwen2Config, seed: int) -> None:
        super().__init__()
        self.config = config
        # Layers draw initial values from the global generator before ours replace them.
        with torch.random.fork_rng(devices=[]):
            self.model = _Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, input_ids_BS: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocabulary] for token ids [B, S]."""
        logits: torch.Tensor = self.lm_head(self.model(input_ids_BS))
        return logits


class _Decoder(nn.Module):
    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.rope_theta = float(config.rope_parameters["rope_theta"])

    def forward(self, input_ids_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSD = self.embed_tokens(input_ids_BS)
        half_H = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        angle_SH = torch.outer(
            torch.arange(input_ids_BS.shape[1], dtype=torch.float32), self.rope_theta**-half_H
        ).repeat(1, 2)
        rotation = (angle_SH.cos(), angle_SH.sin())
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, rotation)
        normed_BSD: torch.Tensor = self.norm(hidden_BSD)
        return normed_BSD


class _Layer(nn.Module):
    """Attention and gated MLP, each on a normed residual stream."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_BSD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), rotation)
        out_BSD: torch.Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return out_BSD


class _Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_BSD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        query_BNSH = _rotate(self._heads(self.q_proj(hidden_BSD)), rotation)
        key_BMSH = _rotate(self._heads(self.k_proj(hidden_BSD)), rotation)
        value_BMSH = self._heads(self.v_proj(hidden_BSD))
        mixed_BNSH = functional.scaled_dot_product_attention(
            query_BNSH, key_BMSH, value_BMSH, is_causal=True, enable_gqa=True
        )
        out_BSD: torch.Tensor = self.o_proj(mixed_BNSH.transpose(1, 2).flatten(2))
        return out_BSD

    def _heads(self, flat_BSX: torch.Tensor) -> torch.Tensor:
        """Return [B, heads, S, H] for [B, S, heads * H]."""
        return flat_BSX.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(hidden_BSD)) * self.up_proj(hidden_BSD)
        out_BSD: torch.Tensor = self.down_proj(gated)
        return out_BSD


def _rotate(heads_BNSH: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions; the two halves of a head are the parts of complex numbers."""
    cos_SH, sin_SH = rotation
    first, second = heads_BNSH.chunk(2, dim=-1)
    return heads_BNSH * cos_SH + torch.cat((-second, first), dim=-1) * sin_SH


def save_model(model: TinyQwen2, tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Write model, tokenizer and their configuration to an existing directory."""
    model.config.save_pretrained(model_dir)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    ).save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    path = model_dir / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; a server may be another user
