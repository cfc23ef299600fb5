"""Errors in code that the configuration names: one line, with the user's file and line."""

from __future__ import annotations

import inspect
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from bapo_megatron.names import LoadError, load_named, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARIES = tuple(
    str(Path(file).parent)
    for file in (torch.__file__, sys.modules["bapo_megatron"].__file__)
    if file is not None
)


class UserCodeError(ValueError):
    """Code that the configuration names failed, or returned what cannot be used."""


class UserCode:
    """One object that a key of the configuration names."""

    def __init__(self, key: str, name: str) -> None:
        """Import it.

        Args:
            key: The key, for messages.
            name: ``package.module:attribute``.

        Raises:
            UserCodeError: It cannot be imported.
        """
        self.key = key
        self.name = name
        try:
            self.object: Any = load_named(name)
        except LoadError as error:
            raise UserCodeError(f"{key}: '{name}': {error}") from error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an exception of the user's code into one line that names its place."""
        try:
            yield
        except UserCodeError:
            raise
        except Exception as error:
            place = _raised_at(error) or self._defined_at(self.object)
            raise UserCodeError(
                f"{self.key}: '{self.name}' raised {shown(error)} ({place}); correct it"
            ) from error

    def refuse(self, problem: str, culprit: Any = None) -> NoReturn:
        """Raise for a result that cannot be used.

        Args:
            problem: What is wrong and what to do, to follow the name.
            culprit: The function that returned it; None: the named object.
        """
        place = self._defined_at(self.object if culprit is None else culprit)
        raise UserCodeError(f"{self.key}: '{self.name}' ({place}) {problem}")

    def _defined_at(self, culprit: Any) -> str:
        """``file:line`` where a function or class begins."""
        try:
            lines, first = inspect.getsourcelines(inspect.unwrap(culprit))
            file = inspect.getsourcefile(culprit) or self.name
        except (TypeError, OSError):
            return self.name
        decorators = next((i for i, line in enumerate(lines) if "def " in line), 0)
        return f"{file}:{first + decorators}"


def _raised_at(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame that is neither torch's nor this package's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{frame.filename}:{frame.lineno}"
    return None
