# requires: aisuite[openai]==0.2.0
"""aisuite's client, which runs the tools itself."""

from typing import Any

import aisuite


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    client = aisuite.Client({"openai": {"base_url": base_url, "api_key": api_key}})
    completion = client.chat.completions.create(
        model="openai:policy", messages=list(task["messages"]), tools=[add], max_turns=6
    )
    return completion.choices[0].message.content
