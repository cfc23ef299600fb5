"""A module of a user that computes in float64 everywhere."""

import torch

torch.set_default_dtype(torch.float64)


def loss(tokens):
    """Return −A r."""
    return -tokens.advantage * tokens.ratio
