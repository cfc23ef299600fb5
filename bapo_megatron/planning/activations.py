"""What the forward pass keeps for the backward pass, in bytes per token of a rank.

Korthikanti et al. 2022 (arXiv 2205.05198) count the tensors that a layer's operations save. The
same count for these models: no dropout (no masks), grouped queries, SwiGLU, RMSNorm, and attention
that saves one number per head and token instead of its scores. Symbols, all per rank:

    h  hidden size                            s  tensor-parallel size with sequence parallel, else 1
    q  query channels / tensor-parallel size  k  key (and value) channels / tensor-parallel size
    f  MLP channels / tensor-parallel size    H  heads / tensor-parallel size, of D channels
    e  bytes of an element (2 or 4)

``transformer-engine`` is read off the saved tensors of its LayerNormLinear, Linear, RMSNorm and
flash attention, and Megatron's fused SwiGLU; ``local`` off ours (``policy.layer_spec``), and
measured by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bapo_megatron.policy.hf_config import padded_vocab_size

if TYPE_CHECKING:
    from bapo_megatron.planning.hardware import LayerKind
    from bapo_megatron.planning.layout import Layout
    from bapo_megatron.policy.hf_config import HfConfig

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What the bytes of one token depend on."""

    hf: HfConfig
    layout: Layout
    element_bytes: int
    layers: LayerKind

    @property
    def hidden_bytes(self) -> float:
        """One hidden state of a token, where sequence parallel divides: e·h/s."""
        return self.element_bytes * self.hf.hidden_size / self.layout.sequence_ranks

    @property
    def whole_hidden_bytes(self) -> int:
        """One hidden state of a token as matrix products take it: e·h."""
        return self.element_bytes * self.hf.hidden_size

    @property
    def query_bytes(self) -> int:
        """e·q."""
        return self.element_bytes * self.hf.num_heads * self.hf.head_dim // self.layout.tensor

    @property
    def key_bytes(self) -> int:
        """e·k."""
        return self.element_bytes * self.hf.num_kv_heads * self.hf.head_dim // self.layout.tensor

    @property
    def mlp_bytes(self) -> int:
        """e·f."""
        return self.element_bytes * self.hf.intermediate_size // self.layout.tensor

    @property
    def logits_bytes(self) -> int:
        """e·V/t, one row of this rank's logits."""
        tensor = self.layout.tensor
        return self.element_bytes * padded_vocab_size(self.hf.vocab_size, tensor) // tensor


def norm_bytes(shape: Shape) -> float:
    """Return what a norm and the product after it keep of a token, over the hidden states.

    Transformer Engine: the norm's input and its output (the product's input), and 1/rms in float32.
    Local: the input in float32, the normalised value (for the norm's weight), the product's input.
    """
    ranks = shape.layout.sequence_ranks
    if shape.layers == "transformer-engine":
        return 2 * shape.hidden_bytes + FLOAT32_BYTES / ranks
    in_float32 = FLOAT32_BYTES * (shape.hf.hidden_size + 1) / ranks
    return in_float32 + 2 * shape.hidden_bytes


def layer_tensors(shape: Shape, recompute: Literal["none", "selective"]) -> dict[str, float]:
    """Return the bytes that one layer keeps of each token, by what they are.

    The output of the QKV product lives on through the values, which are a part of it; queries and
    keys are kept once more after their rotation.
    """
    query, key, mlp = shape.query_bytes, shape.key_bytes, shape.mlp_bytes
    tensors = {
        "norms and inputs of the two products": 2 * norm_bytes(shape),
        "queries, keys, values": query + 2 * key,
        "rotated queries, keys": query + key,
        "attention's output": query,
        "gate and up": 2 * mlp,
        "input of the down product": mlp,
    }
    heads = shape.hf.num_heads // shape.layout.tensor
    log_sums = FLOAT32_BYTES * heads
    if shape.hf.qk_norm:
        tensors["norms of queries and keys"] = _head_norm_bytes(shape)
    if shape.layers == "local":
        tensors["cosines and sines"] = 4 * shape.element_bytes * shape.hf.head_dim
        tensors["silu(gate), up"] = 2 * mlp
        if recompute == "none":
            tensors["attention's output, by sequence"] = query
    if recompute == "none":
        tensors["log-sums of attention"] = log_sums
    return tensors


def _head_norm_bytes(shape: Shape) -> float:
    """The norms over each head's query and key (Qwen3), whose inputs are parts of QKV's output."""
    hf, tensor = shape.hf, shape.layout.tensor
    heads = (hf.num_heads + hf.num_kv_heads) // tensor
    inverse_rms = FLOAT32_BYTES * heads
    if shape.layers == "transformer-engine":
        # It copies the parts, which are not contiguous; its output is only rotated, not kept.
        return shape.query_bytes + shape.key_bytes + inverse_rms
    in_float32 = FLOAT32_BYTES * heads * hf.head_dim
    return in_float32 + shape.query_bytes + shape.key_bytes + inverse_rms


def layer_bytes(shape: Shape, recompute: Literal["none", "selective"]) -> float:
    """Return the bytes that one layer keeps of each token: the sum of ``layer_tensors``."""
    return sum(layer_tensors(shape, recompute).values())


def chunk_bytes(
    shape: Shape, recompute: Literal["none", "selective", "full"], recompute_layers: int
) -> float:
    """Return what the layers of one chunk keep of a token between its two passes.

    ``full`` keeps the input of each block of ``recompute_layers`` layers.
    """
    layers = shape.layout.layers_per_chunk(shape.hf)
    if recompute == "full":
        return -(-layers // recompute_layers) * shape.hidden_bytes
    return layers * layer_bytes(shape, recompute)


def recomputed_bytes(
    shape: Shape, recompute: Literal["none", "selective", "full"], recompute_layers: int
) -> float:
    """Return what comes back of a token for a while in the backward pass: one block of layers."""
    if recompute == "full":
        block = min(recompute_layers, shape.layout.layers_per_chunk(shape.hf))
        return block * layer_bytes(shape, "none")
    if recompute == "selective":
        return layer_bytes(shape, "none") - layer_bytes(shape, "selective")
    return 0.0


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Return how many chunks of layers of a stage hold activations at a time.

    Megatron's schedules with p stages of v chunks run w forward passes before the first backward
    pass and then one and one (Narayanan et al. 2021, arXiv 2104.04473): one more than

        w = p − 1 − stage                            without interleaving,
        w = 2·(p − 1 − stage) + (v − 1)·p            with it.
    """
    behind = layout.pipeline - 1 - stage
    warm_up = behind if layout.virtual == 1 else 2 * behind + (layout.virtual - 1) * layout.pipeline
    return min(warm_up + 1, micro_batches * layout.virtual)


def workspace_bytes(shape: Shape) -> float:
    """Return what the backward pass of one layer holds of a token beside what was kept.

    In the MLP: the gradients of the down product's input (f) and of gate and up (2f), the gathered
    input of the gate and up product and its gradient (h each), and the residual's gradient.
    """
    return 3 * shape.mlp_bytes + 2 * shape.whole_hidden_bytes + shape.hidden_bytes


def logits_bytes(shape: Shape, tokens: int, chunk_tokens: int) -> float:
    """Return what the last stage's head and loss hold for a micro-batch of ``tokens``.

    All logits at once: [N, V/t] in the model's type, in whose memory their gradient is made, beside
    the gradient of the head's weight in that type (its sum is float32 and counted with the
    gradients) and the gathered input and its gradient.

    Chunked (``ops.logits_chunk_tokens``): logits of a chunk, the gathered hidden states, their
    gradient in float32, and the parts of both that belong to the chunk.
    """
    hidden = shape.hf.hidden_size
    final_norm = tokens * norm_bytes(shape)
    gathered = tokens * shape.whole_hidden_bytes if shape.layout.sequence_ranks > 1 else 0
    if chunk_tokens:
        chunk = min(chunk_tokens, tokens)
        gradient = FLOAT32_BYTES * tokens * hidden + tokens * shape.hidden_bytes
        parts = chunk * (shape.whole_hidden_bytes + FLOAT32_BYTES * hidden)
        return final_norm + gathered + gradient + parts + chunk * shape.logits_bytes
    weight_gradient = shape.logits_bytes * hidden
    input_gradient = tokens * shape.whole_hidden_bytes
    return final_norm + gathered + input_gradient + weight_gradient + tokens * shape.logits_bytes
