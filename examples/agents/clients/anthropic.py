# requires: anthropic==2.14.0
"""The anthropic SDK, messages."""

from typing import Any

from anthropic import AsyncAnthropic

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOLS: Any = [{"name": "add", "input_schema": SCHEMA}]


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    messages = list(task["messages"])
    asked: Any = {"model": "policy", "max_tokens": 4096, "messages": messages, "tools": TOOLS}
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        while True:
            turn = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": turn.content})
            calls = [part for part in turn.content if part.type == "tool_use"]
            if not calls:
                return turn.content[-1].text
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": str(sum(c.input.values()))}
                for c in calls
            ]
            messages.append({"role": "user", "content": results})
