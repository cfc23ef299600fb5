"""Objects that a configuration names: ``package.module:attribute``."""

import importlib
import operator
from typing import Any

_OUT_OF_MEMORY = ("Cannot allocate memory", "cannot allocate memory", "failed to map segment")
"""What the dynamic loader says when the address space is used up."""


class LoadError(ValueError):
    """The named object cannot be loaded; the message says why and what to do."""


def load_named(name: str, *, memory_remedy: str = "free memory", kind: str = "functions") -> Any:
    """Import what ``package.module:attribute`` names; ``Class.method`` is an attribute as well.

    The current directory and PYTHONPATH are searched. ``memory_remedy`` is for an import that runs
    out of memory, and ``kind`` what the module should have, in the plural.

    Raises:
        LoadError: The module cannot be imported, or lacks the attribute.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        remedy = "correct the name, add its directory to PYTHONPATH, or correct the module"
        if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            remedy = memory_remedy
        raise LoadError(f"cannot import {module_name}: {shown(error)}; {remedy}") from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise LoadError(
            f"module {module_name} has no '{attribute}'; name one of its {kind}"
        ) from error


def shown(error: BaseException, max_chars: int = 200) -> str:
    """Return an error's kind and text as part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:max_chars]
