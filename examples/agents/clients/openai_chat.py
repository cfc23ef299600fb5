# requires: openai==3.57.0
"""The openai SDK, chat completions."""

import json
from typing import Any

from openai import AsyncOpenAI

NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
SCHEMA = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


async def play(task: dict[str, Any], base_url: str, api_key: str) -> str:
    """Return the policy's last turn."""
    messages = list(task["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            turn = completion.choices[0].message
            messages.append(turn.model_dump(exclude_none=True))
            if not turn.tool_calls:
                return turn.content or ""
            for call in turn.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
