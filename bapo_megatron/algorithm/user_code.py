"""Errors in code that the configuration names: one line, with the user's file and line."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from bapo_megatron.runtime.names import LoadError, load_named, raised_at, shown
from bapo_megatron.runtime.processes import RequestedExit, forks_ended


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
            self.object: Any = None
            with forks_ended(self._report_fork), _shared_state_kept(self.refuse):
                self.object = load_named(name)
        except LoadError as error:
            raise UserCodeError(f"{key}: '{name}': {error}") from error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an exception of the user's code into one line that names its place.

        What it changes of the state that all code of the process shares is an error, too. A process
        that it forks ends here, instead of going on as a second trainer.
        """
        try:
            with forks_ended(self._report_fork), _shared_state_kept(self.refuse):
                yield
        except (UserCodeError, MemoryError, RequestedExit):
            raise
        except (Exception, SystemExit) as error:
            defined_at = self._defined_at(self.object)
            place = raised_at(error, defined_at.rpartition(":")[0]) or defined_at
            raise UserCodeError(
                f"{self.key}: '{self.name}' raised {shown(error)} ({place}); correct it"
            ) from error

    def _report_fork(self, error: BaseException | None) -> None:
        line = f"{self.key}: '{self.name}' forked a process that came back; it was ended\n"
        sys.stderr.write(line)

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


@contextmanager
def _shared_state_kept(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Take back what the block changes of torch's defaults and Python's warnings, and refuse it."""
    dtype, has_gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    active_filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters_before = active_filters[:]
    try:
        yield
    finally:
        dtype_after, has_gradients_after = torch.get_default_dtype(), torch.is_grad_enabled()
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        has_new_errors = _num_errors(active_filters) > _num_errors(filters_before)
        if has_new_errors:
            active_filters[:] = filters_before
    changes = {
        f"sets torch's default dtype to {dtype_after}": dtype_after != dtype,
        f"turns gradients {'on' if has_gradients_after else 'off'}": (
            has_gradients_after != has_gradients
        ),
        "makes warnings errors": has_new_errors,
    }
    if actual := [change for change, is_made in changes.items() if is_made]:
        refuse(f"{actual[0]}, for the trainer as well; change it within your own code only")


def _num_errors(filters: Sequence[Any]) -> int:
    """Count the filters that make errors of the warnings that torch and this package give."""
    kinds = (Warning, UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning)
    return sum(
        action == "error" and message is None and module is None and category in kinds
        for action, message, category, module, _ in filters
    )
