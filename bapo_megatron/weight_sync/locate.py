"""Which kind of layer makes servers' log-probs differ from the trainer's: each is muted in turn."""

from collections.abc import Callable

import torch

from bapo_megatron.errors import RolloutError
from bapo_megatron.policy.adapters import layer_kind
from bapo_megatron.policy.architecture import HfConfig, Weight
from bapo_megatron.policy.hf_weights import local_weights
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.weight_table import weight_table
from bapo_megatron.weight_sync.verify import Comparison

_OUTPUTS = (".linear_proj.", ".out_proj.", ".linear_fc2.")


@torch.no_grad()
def locate(model: Model, rescore: Callable[[], Comparison | None], tolerance: float) -> str:
    """Return, on rank 0, the end of a sentence about a mismatch; the weights stay as they are.

    Collective, as ``rescore``, which syncs the weights and compares log-probs on rank 0. A muted
    layer adds nothing to its input, because the weights and adapters of its output are 0.
    """
    kinds = {w: kind for w in weight_table(model.hf) if (kind := _kind(w, model.hf))}
    local, causes = local_weights(model.chunks, model.hf, model.groups), ""
    if model.lora is not None:
        local += [(w, p) for w, a in model.lora.adapters.items() for p in a.parameters()]
    try:
        before = rescore()
        for kind in dict.fromkeys(kinds.values()):
            kept = [(p, p.to("cpu", copy=True)) for w, p in local if kinds.get(w) == kind]
            try:
                for parameter, _ in kept:
                    parameter.zero_()
                after = rescore()
            finally:
                for parameter, values in kept:
                    parameter.copy_(values)
            if before is None or after is None:
                continue
            if before.shows_no_change_of(after):
                causes += f"; muting {kind} does nothing on the server: their weights do not arrive"
            elif after.difference <= max(tolerance, before.difference / 10):
                causes += f"; it vanishes without {kind}: check config.json and kernels for them"
    except (OSError, RolloutError) as error:
        return f"{causes}; not all kinds of layers could be muted ({error})"
    return causes or ("; no kind of layer alone explains it" if before is not None else "")


def _kind(weight: Weight, hf: HfConfig) -> str | None:
    """Return what messages call the layers whose output a weight is; None for other weights."""
    if weight.layer is None or not any(name in weight.megatron for name in _OUTPUTS):
        return None
    names = {"mlp": "MLPs", "experts": "experts"}
    return names.get(layer_kind(weight, hf), hf.mixers[weight.layer].title)
