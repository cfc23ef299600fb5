"""Errors that more than one package raises or handles."""

import errno

_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "check the path: one of its parents is a file",
    errno.EEXIST: "choose another path, or move away what is there",
    errno.EACCES: "grant this user access",
    errno.EROFS: "choose another path; this file system is read-only",
    errno.ENOSPC: "free space, or choose another file system",
    errno.EMFILE: "raise the limit of open files with ulimit -n",
    errno.ENFILE: "raise the machine's limit, fs.file-max",
}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class RolloutError(RuntimeError):
    """Generation failed and cannot go on; the message is one line that says what to do."""


class RefusedError(RolloutError):
    """A server refuses a call because of a wrong setting; every server would."""


class ServerError(RolloutError):
    """One server failed; others may go on."""


class ServerGoneError(ServerError):
    """A server did not answer: it exited, hangs, or took too long."""


class BrokenConnectionError(ServerGoneError):
    """The connection failed or broke; the server may still be running."""


def describe_cause(error: BaseException) -> str:
    """Return the error's text on one line, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def describe_os_error(error: OSError) -> str:
    """Return the operating system's error for a file, with a remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the path and its file system")
    return f"{(error.strerror or type(error).__name__).lower()}; {remedy}"


def first_cause(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class StoppedError(Exception):
    """A run stops early on request and loses nothing; the message names the request."""


class InterruptedRunError(Exception):
    """Ctrl-C ended a command that can be continued; the message says how."""
