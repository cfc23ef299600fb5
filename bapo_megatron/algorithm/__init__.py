"""Advantages, clip rules and the policy loss: pure functions on tensors (docs/algorithm.md)."""
