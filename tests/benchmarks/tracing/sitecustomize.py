"""Notes which files of the package hold tokens, in every Python process that has this on its path.

A file holds tokens if one of its functions is called with a record, tensor or array of an episode,
between the request for the first batch and the first optimizer step (``trace_files``).
"""

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

_OUT = os.environ.get("TRACE_FILES_OUT", "")
_PACKAGE = f"{os.sep}bapo_megatron{os.sep}"
_MARKS = {"next_batch": True, "collect": True, "optimizer_step": False}
"""Functions with which the trace begins (True) and ends, in the trainer and in the collector."""
_RECORDS = frozenset(
    (
        *("Prompt", "PromptTokens", "PendingGroup", "PendingSample", "Episode", "Record", "Call"),
        *("Sample", "SampleText", "Group", "RolloutBatch", "EncodedBatch", "GenerateRequest"),
        *("Completion", "Turn", "Conversation", "MicroBatch", "TokenBatch", "SplitUpdate"),
        *("Update", "LossInputs", "TokenLogprobs", "Columns", "Chunks", "Response", "Tensor"),
        "ndarray",
    )
)
_TOOL = 4
_seen: set[str] = set()
_is_on = False


def _holds(value: Any, depth: int = 2) -> bool:
    if type(value).__name__ in _RECORDS:
        return True
    if depth and isinstance(value, dict):
        value = list(value.values())
    if depth and isinstance(value, list | tuple) and value:
        return _holds(value[0], depth - 1)
    return False


def _on_start(code: CodeType, _: int) -> object:
    global _is_on
    if _PACKAGE not in code.co_filename:
        return sys.monitoring.DISABLE
    is_start = _MARKS.get(code.co_name)
    if is_start is not None and "self" in code.co_varnames:
        _is_on = is_start
    if not _is_on or code.co_filename in _seen:
        return None
    frame = sys._getframe(1)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(_holds(frame.f_locals.get(name)) for name in names):
        _seen.add(code.co_filename)
        file = code.co_filename.rpartition(_PACKAGE)[2]
        with Path(_OUT).open("a") as out:
            out.write(f"{file} {code.co_qualname}\n")
    return None


if _OUT:
    sys.monitoring.use_tool_id(_TOOL, "trace_files")
    sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, _on_start)
    sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)
