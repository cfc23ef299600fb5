"""Errors in code that the configuration names: one line, with the user's file and line."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from bapo_megatron.names import LoadError, load_named, raised_at, shown


class UserCodeError(ValueError):
    """Code that the configuration names failed, or returned what cannot be used."""


class UserCode:
    """An object named by a configuration key."""

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
        except (UserCodeError, MemoryError):
            raise
        except Exception as error:
            defined_at = self._defined_at(self.object)
            place = raised_at(error, defined_at.rpartition(":")[0]) or defined_at
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
        culprit = inspect.unwrap(culprit)
        try:
            lines, first = inspect.getsourcelines(culprit)
            file = inspect.getsourcefile(culprit) or self.name
        except (TypeError, OSError):
            return self.name
        begins = ("class ",) if inspect.isclass(culprit) else ("def ", "async def ")
        decorators = (i for i, line in enumerate(lines) if line.lstrip().startswith(begins))
        return f"{file}:{first + next(decorators, 0)}"
