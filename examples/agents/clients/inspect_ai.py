# requires: inspect-ai==0.3.285 openai==3.57.0
"""A model of Inspect, which runs the tools itself."""

from typing import Any

from inspect_ai.model import get_model
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    """Make the tool."""

    async def execute(a: float, b: float) -> str:
        """Add two numbers.

        Args:
            a: One
            b: The other
        """
        return str(a + b)

    return execute


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    model = get_model("openai-api/x/policy", base_url=base_url, api_key=api_key)
    _, output = await model.generate_loop(task["messages"][-1]["content"], tools=[add()])
    return output.completion
