"""Our own layers: what they read, and from where."""

from types import SimpleNamespace
from typing import Any

import torch

from bapo_megatron.policy.layer_spec import PackedCausalAttention, PackedSequences


def test_attention_takes_lengths_from_the_host_and_ends_at_each_sequence() -> None:
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    config: Any = SimpleNamespace(kv_channels=8)
    attention = PackedCausalAttention(config, pg_collection=groups)
    # Reading it raises, as reading from a GPU would wait for it.
    unread = torch.empty(3, dtype=torch.int32, device="meta")
    packed = PackedSequences(cu_seqlens_q=unread, cu_seqlens_kv=unread, lengths=[2, 3])
    query_NHD, key_NGD, value_NGD = torch.randn(3, 5, 2, 8, generator=torch.Generator())
    output = attention(query_NHD, key_NGD, value_NGD, None, packed_seq_params=packed)
    # The first token of a sequence sees itself alone.
    torch.testing.assert_close(output[[0, 2]], value_NGD[[0, 2]].flatten(1))
