"""Reinforcement learning with verifiable rewards by BAPO, at Megatron scale."""

__version__ = "0.3.0"
