# requires: haystack-ai==3.4.1
"""An agent of Haystack."""

from typing import Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    key = Secret.from_token(api_key)
    generator = OpenAIChatGenerator(model="policy", api_base_url=base_url, api_key=key)
    agent = Agent(chat_generator=generator, tools=[add])
    messages = [ChatMessage.from_user(task["messages"][-1]["content"])]
    return agent.run(messages)["last_message"].text
