"""Our own layers: what they read, and from where."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.policy.local_layers import PackedCausalAttention, PackedSequences, _rms_norm


def test_attention_takes_lengths_from_the_host_and_ends_at_each_sequence() -> None:
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1), tp=None)
    config: Any = SimpleNamespace(
        kv_channels=8, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    attention = PackedCausalAttention(config, 1, pg_collection=groups)
    # Reading it raises, as reading from a GPU would wait for it.
    unread = torch.empty(3, dtype=torch.int32, device="meta")
    packed = PackedSequences(cu_seqlens_q=unread, cu_seqlens_kv=unread, lengths=[2, 3])
    query_NHD, key_NGD, value_NGD = torch.randn(3, 5, 2, 8, generator=torch.Generator())
    output = attention(query_NHD, key_NGD, value_NGD, None, packed_seq_params=packed)
    # The first token of a sequence sees itself alone.
    torch.testing.assert_close(output[[0, 2]], value_NGD[[0, 2]].flatten(1))


@pytest.fixture
def config() -> Any:
    return SimpleNamespace(layernorm_zero_centered_gamma=False, layernorm_epsilon=1e-6)


def norm_and_gradients(norm: Any, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    output = norm(*leaves)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [
        output.detach(),
        *torch.autograd.grad(output, leaves, gradient.bfloat16().to(output.dtype)),
    ]


def rounded_twice(hidden: Tensor, weight: Tensor) -> Tensor:
    """As transformers computes it."""
    return F.rms_norm(hidden.float(), hidden.shape[-1:], None, 1e-6).to(hidden.dtype) * weight


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(257, 1, 96, generator=generator).to(dtype), torch.randn(
        96, generator=generator
    ).to(dtype)


def test_a_norm_in_float32_has_the_bits_of_separate_steps(config: Any) -> None:
    hidden, weight = drawn(torch.float32)
    results = norm_and_gradients(lambda h, w: _rms_norm(h, w, 1e-6, config), hidden, weight)
    expected = norm_and_gradients(rounded_twice, hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_norm_in_bfloat16_is_rounded_once(config: Any) -> None:
    hidden, weight = drawn(torch.bfloat16)

    def once(hidden: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(hidden, weight, 1e-6, config)

    exact = norm_and_gradients(once, hidden.double(), weight.double())
    results = norm_and_gradients(once, hidden, weight)
    twice = norm_and_gradients(rounded_twice, hidden, weight)
    # Half a unit in the last place of 8 bits, and float32's own error.
    assert ((results[0].double() - exact[0]).abs() <= exact[0].abs() * (2**-8 + 2**-18)).all()
    for result, other, value in zip(results, twice, exact, strict=True):
        assert (result.double() - value).norm() < 0.8 * (other.double() - value).norm()


def test_a_zero_centered_norm_has_the_bits_of_separate_steps(config: Any) -> None:
    config.layernorm_zero_centered_gamma = True
    hidden, weight = drawn(torch.bfloat16)

    def separate(hidden: Tensor, weight: Tensor) -> Tensor:
        normalised = F.rms_norm(hidden.float(), hidden.shape[-1:], None, 1e-6)
        return (normalised * (1 + weight.float())).to(hidden.dtype)

    results = norm_and_gradients(lambda h, w: _rms_norm(h, w, 1e-6, config), hidden, weight)
    expected = norm_and_gradients(separate, hidden, weight)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
