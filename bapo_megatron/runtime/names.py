"""Names: objects of a configuration (``package.module:attribute``), and terms of the reward."""

import importlib
import operator
import os
import traceback
from pathlib import Path
from typing import Any

SHAPING_TERMS = ("truncated", "overlong", "format", "repetition")
"""What training adds to the reward: keys of ``reward``, of ``Sample.reward_components`` and
metrics."""
_OUT_OF_MEMORY = ("Cannot allocate memory", "cannot allocate memory", "failed to map segment")
"""Messages of the dynamic loader when address space is exhausted."""
_NOT_USER_CODE = (f"{Path(__file__).parents[1]}/", f"{Path(os.__file__).parent}/", "<")
"""Prefixes of paths of this package, of the standard library and of code without a file."""
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Directories of installed packages; Debian and NVIDIA's containers have the second one."""


class LoadError(ValueError):
    """The named object cannot be loaded; the message says why and what to do."""


def load_named(name: str, *, memory_remedy: str = "free memory") -> Any:
    """Import what ``package.module:attribute`` names; ``Class.method`` is an attribute as well.

    The current directory and PYTHONPATH are searched. ``memory_remedy`` is for an import that runs
    out of memory.

    Raises:
        LoadError: The module cannot be imported, or lacks the attribute.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and type(error) is not SystemExit:
            raise  # from a signal (``processes.RequestedExit``)
        remedy = "correct the name, add its directory to PYTHONPATH, or correct the module"
        if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            remedy = memory_remedy
        problem = with_place(shown(error), error)
        raise LoadError(f"cannot import {module_name}: {problem}; {remedy}") from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise LoadError(f"module {module_name} has no '{attribute}'; correct the name") from error


def shown(error: BaseException, max_chars: int = 200) -> str:
    """Return an error's type and message, to be part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:max_chars]


def with_place(text: str, error: BaseException) -> str:
    """Append the place in the user's code where an error was raised, if there is one."""
    place = raised_at(error)
    return f"{text} ({place})" if place else text


def raised_at(error: BaseException, file: str = "") -> str | None:
    """Return ``file:line`` of the innermost frame of user code; None without one.

    Frames in ``file`` are preferred, then those outside this package and installed packages.
    """
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    user_frames = [frame for frame in frames if frame.filename == file] or [
        frame
        for frame in frames
        if not frame.filename.startswith(_NOT_USER_CODE)
        and _INSTALLED.isdisjoint(Path(frame.filename).parts)
    ]
    return f"{user_frames[0].filename}:{user_frames[0].lineno}" if user_frames else None
