"""Prompts in, rollout dumps in and out, packed micro-batches out."""
