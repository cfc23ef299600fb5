"""Messages of one shape between pipeline stages, for micro-batches of different lengths.

Every stage knows the lengths of all micro-batches, so what travels is padded to the longest one and
cut where it arrives: nothing is computed on padding. Megatron's own way (``variable_seq_lengths``)
sends the shape ahead of each message and waits for it on the host, and hangs with interleaved
stages, where a stage waits for the shape of a gradient before it sends the activations that lead to
it.

Shape legend: N = tokens of a micro-batch on this rank, M = tokens of the longest, H = hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from megatron.core.utils import get_attr_wrapped_model

if TYPE_CHECKING:
    from torch import Tensor, nn


def cut_input(model: nn.Module, length: int) -> None:
    """Cut what the previous stage sent, [M, 1, H], to [N, 1, H]; the first stage got nothing."""
    decoder = get_attr_wrapped_model(model, "decoder")
    if not decoder.pre_process:
        decoder.set_input_tensor(decoder.input_tensor[:length])


def pad_output(model: nn.Module, output: Tensor, longest: int) -> Tensor:
    """Pad what the next stage gets, [N, 1, H], to [M, 1, H]; the last stage's output stays."""
    padding = longest - len(output)
    if get_attr_wrapped_model(model, "post_process") or padding == 0:
        return output
    return F.pad(output, (0, 0, 0, 0, 0, padding))
