"""What forks have imported when they begin: Megatron, as commands do, and what they load late."""

import gc
import sys

from bapo_megatron.policy.megatron_import import import_megatron

import_megatron()


COMPILER = {"torch._dynamo", "torch._inductor", "torch.onnx"} & set(sys.modules)

import pyarrow.compute  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401 - as torch does for the first optimizer of a process
import transformers.models.auto.tokenization_auto  # noqa: E402, F401
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer  # noqa: E402, F401

import examples.tiny.model  # noqa: E402, F401

gc.freeze()  # a collection in a fork, of which a checkpoint makes several, skips what is imported


def compiler_of_imports() -> set[str]:
    """Parts of torch's compiler that the imports of a training load."""
    return COMPILER
