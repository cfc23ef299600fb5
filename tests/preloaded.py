"""What forks have imported when they begin: Megatron, as commands do, and what they load late."""

import gc

from bapo_megatron.policy.megatron_import import import_megatron

import_megatron()

import pyarrow.compute  # noqa: E402, F401
import transformers.models.auto.tokenization_auto  # noqa: E402, F401

import bapo_megatron.cli  # noqa: E402
import bapo_megatron.engine.sglang.kind  # noqa: E402
import bapo_megatron.evaluation.samples  # noqa: E402
import bapo_megatron.tiny.model  # noqa: E402
import bapo_megatron.trainer.loop  # noqa: E402, F401

gc.freeze()  # a fork's collections need not go through all that was imported: 0.2 s each
