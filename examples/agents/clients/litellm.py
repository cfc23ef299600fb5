# requires: litellm==1.110.2
"""litellm's completion."""

import json
from typing import Any

import litellm

NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
SCHEMA = {"type": "object", "properties": NUMBERS}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    messages: list[Any] = list(task["messages"])
    place = {"model": "openai/policy", "base_url": base_url, "api_key": api_key}
    while True:
        completion = await litellm.acompletion(messages=messages, tools=TOOLS, **place)
        turn = completion.choices[0].message
        messages.append(turn)
        if not turn.tool_calls:
            return turn.content
        for call in turn.tool_calls:
            result = str(sum(json.loads(call.function.arguments).values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
