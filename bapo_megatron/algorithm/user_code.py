"""Errors in code that the configuration names: one line, with the user's file and line."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

from bapo_megatron.runtime.names import LoadError, load_named, raised_at, shown
from bapo_megatron.runtime.processes import RequestedExit, forks_ended


class UserCodeError(ValueError):
    """Code that the configuration names failed, or returned what cannot be used."""


class UserCode:
    """An object named by a configuration key."""

    def __init__(self, key: str, name: str) -> None:
        """Import ``name``, the ``package.module:attribute`` that ``key`` holds.

        Raises:
            UserCodeError: It cannot be imported.
        """
        self.key = key
        self.name = name
        try:
            with self._forks_ended():
                self.object: Any = load_named(name)
        except LoadError as error:
            raise UserCodeError(f"{key}: '{name}': {error}") from error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an exception of the user's code into one line with file and line number."""
        try:
            with self._forks_ended():
                yield
        except (UserCodeError, MemoryError, RequestedExit):
            raise
        except (Exception, SystemExit) as error:
            defined_at = self._defined_at()
            place = raised_at(error, defined_at.rpartition(":")[0]) or defined_at
            raise UserCodeError(
                f"{self.key}: '{self.name}' raised {shown(error)} ({place}); correct it"
            ) from error

    def _forks_ended(self) -> AbstractContextManager[None]:
        """End a forked child that returns: it would continue as a second rank."""
        line = f"{self.key}: '{self.name}' forked a process that returned; it was ended\n"
        return forks_ended(lambda _: sys.stderr.write(line))

    def guarded[**P, ReturnT](self, function: Callable[P, ReturnT]) -> Callable[P, ReturnT]:
        """Return a function that is called under ``guard``."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> ReturnT:
            with self.guard():
                return function(*args, **kwargs)

        return call

    def refuse(self, problem: str) -> NoReturn:
        """Raise for a result that cannot be used; ``problem`` follows the name."""
        raise UserCodeError(f"{self.key}: '{self.name}' ({self._defined_at()}) {problem}")

    def _defined_at(self) -> str:
        """``file:line`` where the function or class begins."""
        definition = inspect.unwrap(self.object)
        try:
            return f"{inspect.getsourcefile(definition)}:{inspect.getsourcelines(definition)[1]}"
        except (TypeError, OSError):
            return self.name


def kind_of(value: Any) -> str:
    """Describe a value for messages."""
    import torch  # reading a configuration imports this module

    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor {list(value.shape)}".replace("torch.", "")
    return f"a {type(value).__module__}.{type(value).__name__}".replace(" builtins.", " ")
