"""The reward ``program``: runs the last program of a response against tests, in the sandbox.

A reference answer is one of these, as text or JSON; the objects are those of code data sets such as
Skywork-OR1, TACO and LeetCodeDataset:

    {"inputs": […], "outputs": […]}                        standard input and output
    {"fn_name": "f", "inputs": […], "outputs": […]}        arguments and result of f or Solution().f
    {"assert_case": ["assert f(1) == 2", …]}, or the list  statements after the program
    {"import_prefix": "…", "test_code": "…", "entry_point": "f"}
                           a module of tests: asserts, check(candidate), test functions, TestCases
    any other text                                         what the program prints

Output and results are compared here, outside of the sandbox. Statements run in the program's own
process and pass if all of them are reached: a program that ends early fails, one that changes what
they compare does not.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import re
import secrets
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bapo_megatron.config.reward import ProgramConfig
from bapo_megatron.reward.base import RowError, Score
from bapo_megatron.runtime.calls import decode, shown_value
from bapo_megatron.runtime.files import parse_json
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.sandbox.base import SandboxError
from bapo_megatron.sandbox.load import open_sandbox

_BLOCK = re.compile(
    r"^(?:[ \t>*+\d.)-]*+|[^`\n]*+(?=```[ \t]*py))(?P<fence>`{3,}+|~{3,}+)(?P<info>[^`\n]*+)\n"
    r"(?P<text>(?:(?!(?P=fence)[`~]*+[ \t]*+$)"
    r"(?:\\.|\"{3}(?:\\.|(?!\"{3}).)*+\"{3}|'{3}(?:\\.|(?!'{3}).)*+'{3}|.))*+)(?P<end>(?P=fence)|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""Fences in pairs; one inside of a docstring ends no block."""
_PYTHON = re.compile(r"\s*(?:\{(?:[^}]*[.\s])?)?(?:python|pypy|py)[\d.]*(?![\w+-])", re.IGNORECASE)
"""The start of what follows a fence: ``python3``, ``py title="a.py"``, ``{.python}``."""
_STATEMENT = re.compile(
    r"^(?![ \t]*(?:>>>|\$))(?:.*\bprint\(|[ \t]*(?:def|class|import|from[ \t]+\S+[ \t]+import)\b)",
    re.MULTILINE,
)
"""A line of a program, unlike one of its input or output."""
_JSON = re.compile(r'\s*(?:"\s*(?:\\+"\s*)*)?[{\[]')
"""The start of JSON, also of JSON in JSON."""
_UNPRINTED = re.compile(
    r"^\s*(?:(?:async )?def \w+\(|class \w+[(:]|assert |```|from [\w.]+ import |import [\w.]+$)"
    r"|[\"'](?:inputs?|outputs?|fn_name|assert_case|test_cases?|test_code|entry_point)[\"']\s*:",
    re.MULTILINE,
)
"""A line of Python, or a field of tests, which no program is meant to print."""
_ONLY_PYTEST = re.compile(
    r"^(?:async def test\w*|def test\w*(?=\(\s*\w)|[ \t]*def (?:setup|teardown)_\w+)", re.MULTILINE
)
"""Tests that are asynchronous, have parameters or have fixtures."""
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"

_MODULES = (
    *("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "string", "sys"),
)
_PRELUDE = {
    name: (module.__name__, name)
    for module in map(
        import_module,
        ("typing", "collections", "functools", "itertools", "heapq", "bisect", "math"),
    )
    for name in getattr(module, "__all__", dir(module))
    if not name.startswith("_") and not hasattr(builtins, name)
} | {name: (name, "") for name in _MODULES}
"""Names that starter code takes for granted: their module, and what they are there. They are looked
up after the program's names and Python's own."""
_NAME = re.compile(r"[^\W\d]\w*")
_START = """
import builtins, sys
getattr(sys, "set_int_max_str_digits", int)(0)
sys.setrecursionlimit(50_000)
sys.tracebacklimit = 9
_builtin = {*dir(builtins)}
for _name, (_module, _attribute) in _names.items():
    _module = __import__(_module)
    setattr(builtins, _name, getattr(_module, _attribute, None) if _attribute else _module)
"""
_RUN = """
exec(compile(_program, "<response>", "exec"), globals())
"""
_IMPORT = """
_solution = sys.modules["solution"] = type(sys)("solution")
exec(compile(_prefix, "<prefix>", "exec"), vars(_solution))
for _name in [name for name in vars(_solution) if name in _builtin and name[0] != "_"]:
    delattr(_solution, _name)
exec(compile(_program, "<response>", "exec"), vars(_solution))
"""
"""As a module, whose ``__name__`` is not ``"__main__"``."""
_CALL = """
import json
_class = getattr(_solution, "Solution", None)
_call = getattr(_class() if hasattr(_class, _function) else _solution, _function)
print(_mark + json.dumps(_call(*json.loads(_arguments)), default=list))
"""
_TEST = """
if "unittest" in _tests:  # a new one: the program may have changed its own
    for _name in [name for name in sys.modules if name.partition(".")[0] == "unittest"]:
        del sys.modules[_name]
    import unittest
    unittest.main = unittest.TestProgram = lambda *_, **__: None
_main = sys.modules["__main__"] = type(sys)("__main__")
_main.__builtins__ = {**vars(builtins), **vars(_solution)}
exec(compile(_tests, "<tests>", "exec"), vars(_main))
for _name, _test in list(vars(_main).items()):
    if getattr(_test, "__module__", "") != "__main__":
        continue
    if isinstance(_test, type):
        _is_case = hasattr(_test, "setUpClass")
        if _is_case:
            _test.setUpClass()
        for _method in dir(_test) if _is_case or _name.startswith("Test") else ():
            if _method.startswith("test"):
                _test(_method).debug() if _is_case else getattr(_test(), _method)()
    elif _name.startswith("test") or (_name == "check" and _test.__code__.co_argcount == 0):
        _test()
    elif _name == "check" and _entry_point:
        _test(eval(_entry_point, vars(_main)))
print(_mark)
"""
"""Tests see the program's names and cannot lose their own."""
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class _Tests:
    """A reference answer that is an object; unknown fields are ignored."""

    inputs: list[Any] | None = None
    outputs: list[Any] | None = None
    fn_name: str | None = None
    assert_case: list[str] | None = None
    import_prefix: str = ""
    test_code: str | None = None
    entry_point: str = ""

    @property
    def statements(self) -> list[str]:
        """Tests of the third and fourth form."""
        if self.inputs is not None and self.outputs is not None:
            return []
        return self.assert_case or ([] if self.test_code is None else [self.test_code])


@dataclass(frozen=True, slots=True)
class _Case:
    """One run: its code, the variables of that, and what its output must be."""

    is_passed: Callable[[str], bool]
    code: str
    variables: dict[str, str]
    stdin: str = ""

    def text(self, program: str) -> str:
        """Return the code with its variables; ``program`` is one more."""
        variables = {**self.variables, "program": program}
        words = {word for text in variables.values() for word in _NAME.findall(text)}
        names = {name: _PRELUDE[name] for name in _PRELUDE.keys() & words}
        lines = [f"_{name} = {value!r}" for name, value in {**variables, "names": names}.items()]
        return "\n".join(lines) + _START + self.code


class ProgramGrader:
    """Grades responses, one at a time; belongs to one worker process."""

    def __init__(self, config: ProgramConfig) -> None:
        """Open the sandbox.

        Raises:
            LoadError: It does not work here.
        """
        self._config = config
        try:
            self._sandbox = open_sandbox(config.sandbox)
        except SandboxError as error:
            raise LoadError(f"needs a sandbox: {error}") from error

    def grade(self, response: str, answer: str) -> Score:
        """Score the last program of a response.

        Raises:
            RowError: The reference answer holds no tests.
            SandboxError: The sandbox was lost twice; this is no wrong answer.
        """
        with _any_digits():
            with _reading(answer):
                cases = list(_cases(_read(answer)))
            return self._grade(_last_program(response), cases)

    def _grade(self, program: str | None, cases: list[_Case]) -> Score:
        if not program or program.isspace():
            return Score(0.0, answer_found=False, reason="no_program")
        cases = cases[: self._config.max_tests]
        num_passed, reason = 0, "passed"
        for case in cases:
            outcome = self._sandbox.run(case.text(program), case.stdin)
            if outcome.ending == "ok" and case.is_passed(outcome.stdout):
                num_passed += 1
                continue
            reason = "wrong" if outcome.ending == "ok" else outcome.ending
            if self._config.score == "all":
                break
        share = num_passed / len(cases)
        return Score(
            reward=share if self._config.score == "share" else float(num_passed == len(cases)),
            extracted=program,
            reason=reason,
            metrics={"passed_share": share},
        )


def check_reference(answer: str, python: Path) -> None:
    """Refuse a reference answer that holds no tests which ``python``, the sandbox's, can run.

    Raises:
        RowError: It is refused.
    """
    with _any_digits(), _reading(answer), warnings.catch_warnings(action="ignore"):
        tests = _read(answer)
        list(_cases(tests))
        for text in tests.statements:
            tree = ast.parse(f"{tests.import_prefix}\n{text}\n{tests.entry_point}")
            for name in sorted(_imports(tree) - sys.stdlib_module_names - {"solution"}):
                if _lacks(python, name):
                    raise ValueError(f"{python} has no module '{name}', which it imports")
            _check_statements(text, tests.entry_point)


@contextlib.contextmanager
def _any_digits() -> Iterator[None]:
    """Allow integers of any length."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


@contextlib.contextmanager
def _reading(answer: str) -> Iterator[None]:
    """Turn what is wrong with a reference answer into a RowError."""
    try:
        yield
    except (ValueError, SyntaxError, RecursionError) as error:
        raise RowError(
            f"the reference answer must hold tests of a program, got {shown_value(answer)}: {error}"
        ) from error


def _last_program(response: str) -> str | None:
    """The last Python block after the thinking; None without one.

    A block without a language counts if it looks like a program, or if there is no other.
    """
    text = response.rpartition("</think>")[2].replace("\r\n", "\n")
    blocks = [
        (_PYTHON.match(block["info"]), block) for block in _BLOCK.finditer(text) if block["end"]
    ]
    blocks = [(named, block) for named, block in blocks if named or not block["info"].strip()]
    programs = [b["text"] for named, b in blocks if named or _STATEMENT.search(b["text"])]
    programs = [program.rstrip(" \t") for program in programs or [b["text"] for _, b in blocks]]
    if not programs:
        return None
    return textwrap.dedent(programs[-1]) if programs[-1][:1].isspace() else programs[-1]


def _read(answer: str) -> _Tests:
    value: Any = answer
    while isinstance(value, str) and _JSON.match(value):
        value = parse_json(value)
    if isinstance(value, str) and value.startswith("assert "):
        value = [value]
    if isinstance(value, str):
        if line := _UNPRINTED.search(value):
            raise ValueError(f"no program prints '{line[0].strip()}'; give tests as test_code")
        return _Tests(inputs=[""], outputs=[value])
    if isinstance(value, list):
        if not all(isinstance(entry, str) for entry in value):
            raise ValueError('a list must hold asserts; give {"inputs": […], "outputs": […]}')
        value = {"assert_case": value}
    fields = {name: value[name] for name in _Tests.__annotations__ if value.get(name) is not None}
    for name in {"inputs", "outputs", "assert_case"} & fields.keys():
        if isinstance(fields[name], str):
            fields[name] = parse_json(fields[name])
    return decode(_Tests, fields)


def _imports(tree: ast.Module) -> set[str]:
    """The packages that tests import, except under ``try``."""
    parts = [part for part in tree.body if not isinstance(part, ast.Try)]
    names: list[str] = []
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def _check_statements(text: str, entry_point: str) -> None:
    if pytest := _ONLY_PYTEST.search(text):
        raise ValueError(f"only pytest can run '{pytest[0].strip()}'")
    is_called = entry_point or re.search(r"^check\(", text, re.MULTILINE)
    if re.search(r"^def check\(\s*\w", text, re.MULTILINE) and not is_called:
        raise ValueError("check needs an entry_point")
    if not re.search(r"\b_*(?:assert|raise|fail|exit)", text):
        raise ValueError("it has no assert")


@cache
def _lacks(python: Path, module: str) -> bool:
    return subprocess.run([python, "-I", "-c", _FIND, module], check=False).returncode != 0


def _cases(tests: _Tests) -> Iterator[_Case]:
    pairs = zip(tests.inputs or (), tests.outputs or (), strict=True)
    if not tests.statements and not tests.inputs:
        raise ValueError("it has neither inputs with outputs, nor assert_case or test_code")
    for given, wanted in () if tests.statements else pairs:
        if tests.fn_name is None:
            yield _printed(given, wanted)
        else:
            yield _called(tests.fn_name, given, wanted)
    for text in tests.statements:
        mark = secrets.token_hex(8)
        variables = {"prefix": tests.import_prefix, "entry_point": tests.entry_point}
        yield _Case(
            lambda printed, mark=mark: printed.rstrip().endswith(mark),  # type: ignore[misc]
            _IMPORT + _TEST,
            {**variables, "tests": text, "mark": mark},
        )


def _printed(stdin: Any, stdout: Any) -> _Case:
    if not all(isinstance(text, str | int | float | list) for text in (stdin, stdout)):
        raise ValueError("inputs and outputs must be texts, or lists of lines")
    # Some sets have a list of lines.
    given, wanted = (
        "\n".join(map(str, text)) if isinstance(text, list) else str(text)
        for text in (stdin, stdout)
    )
    return _Case(lambda text: _equal(text, wanted), _RUN, {}, given)


def _called(name: str, arguments: Any, result: Any) -> _Case:
    if isinstance(arguments, str):  # LiveCodeBench: JSON, one argument in each line
        arguments = [parse_json(line) for line in arguments.splitlines() if line.strip()]
        result = parse_json(result) if isinstance(result, str) else result
    if not isinstance(arguments, list) or not name.isidentifier():
        raise ValueError(f"must have a name and a list of arguments, got {name}({arguments})")
    mark = secrets.token_hex(8)

    def is_passed(text: str) -> bool:
        _, has_ended, printed = text.rpartition(mark)
        try:
            value = json.loads(printed) if has_ended else None
            # TACO wraps a result in a list of one.
            is_wrapped = isinstance(result, list) and _is_same([value], result)
            return bool(has_ended) and (is_wrapped or _is_same(value, result))
        except (ValueError, RecursionError):
            return False

    variables = {"function": name, "arguments": json.dumps(arguments), "mark": mark, "prefix": ""}
    return _Case(is_passed, _IMPORT + _CALL, variables)


def _is_same(value: Any, wanted: Any) -> bool:
    """Compare results; decimals as ``_equal`` does."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_is_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(_is_same(value[k], wanted[k]) for k in wanted)
    if isinstance(wanted, float) and isinstance(value, int | float):
        return _is_close(str(value), str(wanted))
    return bool(value == wanted)


def _equal(text: str, wanted: str) -> bool:
    """Compare outputs line by line without spaces at line ends; decimals up to 1e-6."""
    lines, wanted_lines = (part.strip().splitlines() for part in (text, wanted))
    if [line.split() for line in lines] == [line.split() for line in wanted_lines]:
        return True
    words, wanted_words = text.split(), wanted.split()
    return (
        len(lines) == len(wanted_lines)
        and len(words) == len(wanted_words)
        and all(
            word == other or ("." in other and _is_close(word, other))
            for word, other in zip(words, wanted_words, strict=True)
        )
    )


def _is_close(word: str, wanted: str) -> bool:
    try:
        return math.isclose(float(word), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False
