"""A tiny model that learns to use an interpreter for sums beyond it."""
