"""Hides warnings that tell a user of this project nothing; call it before megatron is imported."""

import warnings

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


def ignore_known_warnings() -> None:
    """Add filters for warnings of Megatron-core and of torch about Megatron-core."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
