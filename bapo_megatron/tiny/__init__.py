"""A tiny task, its tokenizer and a warmed-up 100k-parameter Qwen2, made on the spot.

``make_tiny`` needs a minute on a laptop's processor and nothing from the network.
"""

from bapo_megatron.tiny.make import TinyReport, TinySettings, make_tiny

__all__ = ["TinyReport", "TinySettings", "make_tiny"]
