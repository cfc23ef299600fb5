# requires: ag2[openai]==1.2.1
"""An agent of AG2."""

from typing import Any

from ag2 import Agent
from ag2.config import OpenAIConfig


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    config = OpenAIConfig(model="policy", base_url=base_url, api_key=api_key)
    reply = await Agent("adder", config=config, tools=[add]).ask(task["messages"][-1]["content"])
    return reply.body
