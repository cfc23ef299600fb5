"""How a command imports Megatron-core: without noise, and on the CPU without the compiler."""

import importlib.util
import logging
import re
import sys
import types
import warnings

import torch
from torch import Tensor

from bapo_megatron.ops.chunked import add_product_
from bapo_megatron.runtime.cpu_torch import uncompiled_imports

APEX_PRODUCTS = "fused_weight_gradient_mlp_cuda"
"""The only apex module that Megatron uses: it accumulates weight gradients."""

MESSAGES = (
    r"(Transformer Engine and )?Apex (is|are) not installed",  # optional; layer_spec.py chooses
    r"If you are using transformer_engine as the transformer implementation",  # Megatron's guess
    r"full scope is deprecated",  # Megatron about its own default
    r"`torch\.distributed\.\w+` is deprecated",  # torch about Megatron's calls
    r"When using (sequence parallelism|async grad allreduce) it is recommended",  # tuning for GPUs
    r"TypedStorage is deprecated",  # torch 2.10 about its own writer
    r"`load_state_dict` is deprecated",  # torch about Megatron's checkpoints
    r"Please use DTensor instead and we are deprecating ShardedTensor",  # the same
    r"The \.grad attribute of a Tensor that is not a leaf",  # Megatron inspects activations
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of experts
    r"\s*MimoModelConfig is experimental",  # Megatron's optimizer imports a model that is not ours
    r"The argument order of load has been changed",  # torch about Megatron's call
    r"torch\.distributed is disabled, unavailable or uninitialized",  # reading the common state
)
"""Beginnings of the warnings muted at every start, with who emits them and why."""

LOGGED = {
    # nvcc without a GPU; Megatron imports the module whether it compiles or not.
    "torch.utils.cpp_extension": r"No CUDA runtime is found",
    # docs/architecture.md says why it stays.
    "megatron.core.models.gpt.gpt_model": r"GPTModel IS DEPRECATED",
    # The layout that it computes is the one to pass.
    "megatron.core.distributed.distributed_data_parallel": r".*full_param_layout not provided",
}
"""Beginnings of the messages muted at every start, by logger."""


def import_megatron() -> None:
    """Import Megatron-core; to be called before any module that imports it."""
    for message in MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    for name, pattern in LOGGED.items():
        _mute(name, pattern)
    if torch.cuda.is_available():
        stand_in_for_apex()
    # Importing W&B creates temporary directories, which a killed rank leaves behind: hide it from
    # Megatron. A run that uses it imports it later.
    is_imported = "wandb" in sys.modules
    if not is_imported:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        with uncompiled_imports():
            import megatron.core  # noqa: F401
    finally:
        if not is_imported:
            del sys.modules["wandb"]


def _mute(logger: str, pattern: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: not re.match(pattern, record.getMessage()))


def stand_in_for_apex() -> None:
    """Register a substitute for ``APEX_PRODUCTS`` if there is no apex."""
    if importlib.util.find_spec(APEX_PRODUCTS) is not None:
        return
    module = types.ModuleType(APEX_PRODUCTS)
    module.__spec__ = importlib.util.spec_from_loader(APEX_PRODUCTS, None)
    # Megatron calls the one for a float32 sum, or the one for a 16-bit sum.
    vars(module).update(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)
    sys.modules[APEX_PRODUCTS] = module


def _accumulate(input_NI: Tensor, gradient_NO: Tensor, sum_OI: Tensor) -> None:
    """Add the weight's gradient: N tokens, I inputs and O outputs of a linear layer."""
    add_product_(sum_OI, gradient_NO.t(), input_NI)
