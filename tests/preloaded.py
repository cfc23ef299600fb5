"""What forked processes have imported when they begin: Megatron, as the commands import it."""

from bapo_megatron.policy.megatron_import import import_megatron

import_megatron()

from transformers import Qwen2ForCausalLM, Qwen2Tokenizer  # noqa: E402, F401

import bapo_megatron.cli  # noqa: E402
import bapo_megatron.rollout.collector  # noqa: E402
import bapo_megatron.trainer.loop  # noqa: E402, F401
