"""A module of a user that computes in float64 everywhere."""

import torch

torch.set_default_dtype(torch.float64)


def cispo(tokens: object) -> None:
    """Stand for a loss."""
