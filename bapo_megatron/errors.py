"""Errors that more than one package raises or handles."""

import errno

_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EEXIST: "choose another path, or move away what is there",
    errno.EACCES: "give this user the right to it",
    errno.EROFS: "choose another file system, this one is read-only",
    errno.ENOSPC: "free space, or choose another file system",
    errno.EMFILE: "raise its limit, with ulimit -n",
    errno.ENFILE: "raise the machine's limit, fs.file-max",
}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def describe_os_error(error: OSError) -> str:
    """Return what the operating system says of a file, and what to do about it."""
    remedy = _REMEDIES.get(error.errno or 0, "check the path and its file system")
    return f"{(error.strerror or type(error).__name__).lower()}; {remedy}"


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of nested task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class StoppedError(Exception):
    """A run ends early because it was asked to, and loses nothing; the message says by what."""


class InterruptedRunError(Exception):
    """Ctrl-C ended a command that can be continued; the message says how."""
