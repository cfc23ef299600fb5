"""Errors that more than one package raises or handles."""


class RolloutError(RuntimeError):
    """Generation failed and cannot go on; the message is one line that says what to do."""


class RefusedError(RolloutError):
    """A server refuses a call: a setting is wrong, and every server would refuse it."""


class ServerError(RolloutError):
    """One server failed; others may go on."""


class ServerGoneError(ServerError):
    """It did not answer: it ended, hangs, or took too long."""


class BrokenConnectionError(ServerGoneError):
    """The connection could not be made, or broke; the server may live."""


def describe_cause(error: BaseException) -> str:
    """Return the error's text on one line, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of nested task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class StoppedError(Exception):
    """A run ends early because it was asked to, and loses nothing; the message says by what."""


class InterruptedRunError(Exception):
    """Ctrl-C ended a command that can be continued; the message says how."""
