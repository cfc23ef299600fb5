"""How a command imports Megatron-core: without noise, and on the CPU without the compiler."""

import warnings

from bapo_megatron.cpu_torch import uncompiled_imports

MESSAGES = (
    r"(Transformer Engine and )?Apex (is|are) not installed",  # optional; layer_spec.py chooses
    r"If you are using transformer_engine as the transformer implementation",  # a guess of its own
    r"full scope is deprecated",  # Megatron about its own default
    r"`torch\.distributed\.\w+` is deprecated",  # torch about Megatron's calls
    r"When using (sequence parallelism|async grad allreduce) it is recommended",  # tuning for GPUs
    r"`load_state_dict` is deprecated",  # torch about Megatron's checkpoints
    r"Please use DTensor instead and we are deprecating ShardedTensor",  # the same
    r"The \.grad attribute of a Tensor that is not a leaf",  # Megatron inspects activations
)


def import_megatron() -> None:
    """Import Megatron-core; to be called before any module that imports it."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    with uncompiled_imports():
        import megatron.core  # noqa: F401
