# requires: smolagents[openai]==1.26.0
"""A tool-calling agent of smolagents."""

from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the final answer."""
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent([add], model, max_steps=6, verbosity_level=0)
    return str(agent.run(task["messages"][-1]["content"]))
