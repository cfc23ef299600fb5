"""An asynchronous reward function: runs the program in a response and compares what it prints.

    reward:
      timeout_s: 20
      functions:
        - {name: program, function: "examples.rewards.run_program:grade"}

Model-written code runs with the rights of this process. Use it in a container that holds nothing of
value and has no network; the worker's limits hold for the program as well.
"""

from __future__ import annotations

import asyncio
import re
import sys

_PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)


async def grade(response: str, answer: str) -> float:
    """1 if the last program of the response prints the reference answer."""
    programs = _PROGRAM.findall(response)
    if not programs:
        return 0.0
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    printed, _ = await process.communicate(programs[-1].encode())
    return float(printed.decode(errors="replace").strip() == answer)
