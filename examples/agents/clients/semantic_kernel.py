# requires: semantic-kernel==1.45.0
"""An agent of Semantic Kernel."""

from typing import Any

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Adder:
    """Its name becomes part of the tool's."""

    @kernel_function
    def add(self, a: float, b: float) -> float:
        """Add two numbers."""
        return a + b


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    service = OpenAIChatCompletion("policy", async_client=client)
    agent = ChatCompletionAgent(service=service, name="adder", plugins=[Adder()])
    return str((await agent.get_response(task["messages"][-1]["content"])).content)
