"""Vocabulary-sized and token-sized kernels behind plain functions (docs in csrc/README.md)."""
