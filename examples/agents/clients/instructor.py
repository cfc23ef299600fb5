# requires: instructor==1.17.0
"""instructor, with a typed object for each turn."""

from typing import Any

import instructor
from pydantic import BaseModel


class add(BaseModel):  # noqa: N801
    """Add two numbers."""

    a: float
    b: float


async def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return the second sum."""
    messages: list[Any] = list(task["messages"])
    place = {"base_url": base_url, "api_key": api_key, "async_client": True}
    client = instructor.from_provider("openai/policy", **place)
    asked: dict[str, Any] = {"response_model": add, "messages": messages}
    for _ in range(2):
        numbers, completion = await client.chat.completions.create_with_completion(**asked)
        turn = completion.choices[0].message
        messages.append(turn.model_dump())
        answer = {"role": "tool", "content": str(numbers.a + numbers.b)}
        messages.extend({**answer, "tool_call_id": call.id} for call in turn.tool_calls)
    return numbers.a + numbers.b
