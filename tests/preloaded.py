"""What forked processes have imported when they begin: Megatron, as the commands import it."""

import gc
import sys

from bapo_megatron.policy.megatron_import import import_megatron

import_megatron()

from transformers import Qwen2ForCausalLM, Qwen2Tokenizer  # noqa: E402, F401

import bapo_megatron.cli  # noqa: E402
import bapo_megatron.rollout.collector  # noqa: E402
import bapo_megatron.trainer.loop  # noqa: E402, F401

COMPILER = {"torch._dynamo", "torch._inductor", "torch.onnx"} & set(sys.modules)

import torch._dynamo  # noqa: E402, F401 - as torch does for the first optimizer of a process

gc.freeze()  # a collection in a fork, of which a checkpoint makes several, skips what is imported


def compiler_of_imports() -> set[str]:
    """Parts of torch's compiler that the imports of a training load."""
    return COMPILER
