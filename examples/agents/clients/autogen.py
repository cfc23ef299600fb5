# requires: autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5
"""An assistant of autogen."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

KNOWN: Any = {
    **{"vision": False, "function_calling": True, "json_output": False},
    **{"family": "unknown", "structured_output": False},
}


async def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    client = OpenAIChatCompletionClient(
        model="policy", base_url=base_url, api_key=api_key, model_info=KNOWN
    )
    agent = AssistantAgent("adder", client, tools=[add], max_tool_iterations=6)
    return (await agent.run(task=task["messages"][-1]["content"])).messages[-1].to_text()
