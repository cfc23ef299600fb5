"""The reward that a framework gave, for the interpreter of training, which has no framework."""

from typing import Any


def score(state: dict[str, Any] | None) -> float:
    """Return the reward of an agent's value; 0 for one that met a limit, and has none."""
    return float(state["reward"]) if state else 0.0
