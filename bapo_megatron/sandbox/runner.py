"""The first code in the sandbox: limits its own process, then runs a program or cells.

The interpreter there may be of any version from 3.9 on and has no package of ours. Standard input
holds frames: the number of bytes in 8 bytes (big-endian), then a text.

    program: one frame; what follows is the program's standard input
    cells: a mark of 16 bytes, then a frame, over and over; after each cell the mark and 0 or 1 for
        an error are written to standard output

The program may read and change everything here. Nothing that is decided outside depends on it: the
mark only says that a cell's output is complete. Imports are late because each costs every run, and
``os`` costs a tenth of one.
"""

import builtins
import posix
import sys

_SELF = sys.modules["__main__"]  # kept, since the program's module takes its place


def main(kind: str, limits: str, path: str) -> None:
    """Run what standard input holds.

    ``limits`` is ``RLIMIT_AS=…,RLIMIT_NPROC=…``, ``path`` the entries of ``sys.path`` line by line.
    """
    import resource

    for limit in limits.split(","):
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    sys.path[1:] = path.splitlines()
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [""]
    _run_program(module.__dict__) if kind == "program" else _run_cells(module.__dict__)


def _run_program(variables: dict[str, object]) -> None:
    text = _read_text(0)
    try:
        exec(compile(text, "<program>", "exec"), variables)
    except Exception as error:  # noqa: BLE001 - the program's own
        _show(error, "<program>", text)
        sys.exit(1)


def _run_cells(variables: dict[str, object]) -> None:
    cells, null = posix.dup(0), posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(null, 0)
    posix.dup2(1, 2)
    number = 0
    while True:
        mark, text = _read(cells, 16), _read_text(cells)
        number += 1
        try:
            _run_cell(text, f"<cell {number}>", variables)
            status = b"0"
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the cell's own
            _show(error, f"<cell {number}>", text)
            status = b"1"
        _flush()
        posix.write(1, mark + status)


def _run_cell(text: str, name: str, variables: dict[str, object]) -> None:
    import ast

    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), variables)
    if isinstance(last, ast.Expr):
        sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), variables))


def _show(error: BaseException, name: str, text: str) -> None:
    """Print a traceback without the frames of this file."""
    import linecache
    import traceback

    _flush()
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib costs an import
            stream.flush()
        except Exception:  # noqa: BLE001 - the program may have replaced or closed it
            pass


def _read(source: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = posix.read(source, size - len(content))
        if not part:
            posix._exit(0)  # the sandbox was closed
        content += part
    return content


def _read_text(source: int) -> str:
    size = int.from_bytes(_read(source, 8), "big")
    return _read(source, size).decode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main(*sys.argv[1:])
