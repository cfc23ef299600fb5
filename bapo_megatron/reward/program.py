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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from bapo_megatron.config.reward import ProgramConfig
from bapo_megatron.reward.base import RowError, Score
from bapo_megatron.runtime.calls import decode, shown_value
from bapo_megatron.runtime.files import parse_json
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.sandbox.base import SandboxError
from bapo_megatron.sandbox.bubblewrap import BubblewrapSandbox, open_sandbox

_BLOCK = re.compile(
    r"^(?:[ \t>*+\d.)-]*+|[^`\n]*+(?=```[ \t]*py))(?P<fence>`{3,}+|~{3,}+)(?P<info>[ \t]*"
    r"(?P<python>(?i:(?:\{(?:[^}`\n]*[.\s])?)?(?:python|pypy|py)[\d.]*(?![\w+-])))?[^`\n]*+)\n"
    r"(?P<text>(?:(?!(?P=fence)[`~]*+[ \t]*+$)"
    r"(?:\\.|\"{3}(?:\\.|(?!\"{3}).)*+\"{3}|'{3}(?:\\.|(?!'{3}).)*+'{3}|.))*+)(?P<end>(?P=fence)|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""Fences in pairs; one inside of a docstring ends no block. What follows the first may name Python:
``python3``, ``py title="a.py"``, ``{.python}``."""
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
_UNCALLED_CHECK = re.compile(r"^def check\(\s*\w(?!(?s:.)*^check\()", re.MULTILINE)
_ASSERT = re.compile(r"\b_*(?:assert|raise|fail|exit)")
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"

_MODULES = (
    *("bisect", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "string", "sys"),
)
_OPEN_MODULES = ("typing", "collections", "functools", "itertools", "heapq", "bisect", "math")
_PRELUDE = {
    name: (module.__name__, name)
    for module in map(import_module, _OPEN_MODULES)
    for name in getattr(module, "__all__", dir(module))
    if not name.startswith("_") and not hasattr(builtins, name)
} | {name: (name, "") for name in _MODULES}
"""Names that starter code takes for granted: their module, and what they are there. They are looked
up after the program's names and Python's own."""
_START = """
import builtins, resource, sys
getattr(sys, "set_int_max_str_digits", int)(0)
sys.setrecursionlimit(50_000)
_hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
_soft = 64 << 20  # recursion through C functions, such as lru_cache's
resource.setrlimit(resource.RLIMIT_STACK, (_soft if _hard < 0 else min(_soft, _hard), _hard))
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
_main = sys.modules["__main__"] = type(sys)("__main__")
_main.__builtins__ = {**vars(builtins), **vars(_solution)}
if "unittest" in _tests:  # a new one: the program may have changed its own
    for _name in [name for name in sys.modules if name.partition(".")[0] == "unittest"]:
        del sys.modules[_name]
    import unittest
    unittest.main = unittest.TestProgram = lambda *_, **__: None
exec(compile(_tests, "<tests>", "exec"), vars(_main))
if "unittest" in _tests:
    unittest.defaultTestLoader.loadTestsFromModule(_main).debug()
for _name, _test in list(vars(_main).items()):
    if getattr(_test, "__module__", "") != "__main__":
        continue
    if isinstance(_test, type):
        if _name.startswith("Test") and not hasattr(_test, "debug"):
            for _method in filter(lambda name: name.startswith("test"), dir(_test)):
                getattr(_test(), _method)()
    elif _name.startswith("test") or (_name == "check" and _test.__code__.co_argcount == 0):
        _test()
    elif _name == "check" and _entry_point:
        _test(eval(_entry_point, vars(_main)))
print(_mark + "null")
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


@dataclass(frozen=True, slots=True)
class _Case:
    """One run: its code, what that must print or return, its input and variables."""

    code: str
    wanted: Any
    stdin: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def outcome(self, program: str, sandbox: BubblewrapSandbox) -> str:
        """Return ``passed``, ``wrong``, or how the run ended before."""
        mark = secrets.token_hex(8)
        variables: dict[str, Any] = {**self.variables, "program": program, "mark": mark}
        words = {word for text in variables.values() for word in re.findall(r"[^\W\d]\w*", text)}
        variables["names"] = {name: _PRELUDE[name] for name in _PRELUDE.keys() & words}
        lines = [f"_{name} = {value!r}" for name, value in variables.items()]
        run = sandbox.run("\n".join(lines) + _START + self.code, self.stdin)
        if run.ending != "ok":
            return run.ending
        if self.code == _RUN:
            return "passed" if _equal(run.stdout, self.wanted) else "wrong"
        return "passed" if _returned(run.stdout, mark, self.wanted) else "wrong"


@contextlib.contextmanager
def _any_digits() -> Iterator[None]:
    """Allow integers of any length."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


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

    @_any_digits()
    def grade(self, response: str, answer: str) -> Score:
        """Score the last program of a response.

        Raises:
            RowError: The reference answer holds no tests.
            SandboxError: The sandbox was lost twice; this is no wrong answer.
        """
        cases = read_cases(answer, self._config.sandbox.python)[: self._config.max_tests]
        program = _last_program(response)
        if not program or program.isspace():
            return Score(0.0, answer_found=False, reason="no_program")
        outcomes: list[str] = []
        for case in cases:
            outcomes.append(case.outcome(program, self._sandbox))
            if outcomes[-1] != "passed" and self._config.score == "all":
                break
        failures = [outcome for outcome in outcomes if outcome != "passed"]
        share = outcomes.count("passed") / len(cases)
        return Score(
            reward=share if self._config.score == "share" else float(share == 1),
            extracted=program,
            reason=failures[-1] if failures else "passed",
            metrics={"passed_share": share},
        )


@_any_digits()
def read_cases(answer: str, python: Path) -> list[_Case]:
    """Read the tests of a reference answer, which ``python``, the sandbox's, is to run.

    Raises:
        RowError: It holds none, or some that can never run or never fail.
    """
    try:
        cases = list(_cases(_read(answer), python))
        if not cases:
            raise ValueError("it has neither inputs with outputs, nor assert_case or test_code")
    except (ValueError, SyntaxError, RecursionError) as error:
        raise RowError(
            f"the reference answer must hold tests of a program, got {shown_value(answer)}: {error}"
        ) from error
    return cases


def _last_program(response: str) -> str | None:
    """The last Python block after the thinking; None without one.

    A block without a language counts if it looks like a program, or if there is no other.
    """
    text = response.rpartition("</think>")[2].replace("\r\n", "\n")
    blocks = [block for block in _BLOCK.finditer(text) if block["end"]]
    blocks = [block for block in blocks if block["python"] or not block["info"].strip()]
    programs = [block for block in blocks if block["python"] or _STATEMENT.search(block["text"])]
    if not blocks:
        return None
    program = (programs or blocks)[-1]["text"].rstrip(" \t")
    return textwrap.dedent(program) if program[:1].isspace() else program


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


def _cases(tests: _Tests, python: Path) -> Iterator[_Case]:
    if tests.inputs is not None and tests.outputs is not None:
        name = tests.fn_name
        for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
            yield _printed(given, wanted) if name is None else _called(name, given, wanted)
        return
    names = {"prefix": tests.import_prefix, "entry_point": tests.entry_point}
    for text in tests.assert_case or filter(None, [tests.test_code]):
        _check_module(text, python=python, **names)
        yield _Case(_IMPORT + _TEST, None, variables={**names, "tests": text})


def _printed(stdin: Any, stdout: Any) -> _Case:
    if not all(isinstance(text, str | int | float | list) for text in (stdin, stdout)):
        raise ValueError("inputs and outputs must be texts, or lists of lines")
    # Some sets have a list of lines.
    given, wanted = (
        "\n".join(map(str, text)) if isinstance(text, list) else str(text)
        for text in (stdin, stdout)
    )
    return _Case(_RUN, wanted, given)


def _called(name: str, arguments: Any, result: Any) -> _Case:
    if isinstance(arguments, str):  # LiveCodeBench: JSON, one argument in each line
        arguments = [parse_json(line) for line in arguments.splitlines() if line.strip()]
        result = parse_json(result) if isinstance(result, str) else result
    if not isinstance(arguments, list) or not name.isidentifier():
        raise ValueError(f"must have a name and a list of arguments, got {name}({arguments})")
    variables = {"function": name, "arguments": json.dumps(arguments), "prefix": ""}
    return _Case(_IMPORT + _CALL, result, variables=variables)


@lru_cache(maxsize=64)
def _check_module(text: str, prefix: str, entry_point: str, python: Path) -> None:
    """Raise ValueError or SyntaxError for tests that can never run or never fail."""
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(f"{prefix}\n{text}\n{entry_point}")
    packages = {
        (getattr(node, "module", None) or alias.name).partition(".")[0]
        for part in tree.body
        if not isinstance(part, ast.Try)
        for node in ast.walk(part)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for name in sorted(packages - sys.stdlib_module_names - {"solution"}):
        if _lacks(python, name):
            raise ValueError(f"{python} has no module '{name}', which it imports")
    if pytest := _ONLY_PYTEST.search(text):
        raise ValueError(f"only pytest can run '{pytest[0].strip()}'")
    if not entry_point and _UNCALLED_CHECK.search(text):
        raise ValueError("check needs an entry_point")
    if not _ASSERT.search(text):
        raise ValueError("it has no assert")


@cache
def _lacks(python: Path, module: str) -> bool:
    return subprocess.run([python, "-I", "-c", _FIND, module], check=False).returncode != 0


def _returned(text: str, mark: str, wanted: Any) -> bool:
    """Whether the wanted result is behind the mark, which a run prints at its end."""
    _, has_ended, printed = text.rpartition(mark)
    try:
        value = json.loads(printed)
        # TACO wraps a result in a list of one.
        return bool(has_ended) and (_is_same(value, wanted) or _is_same([value], wanted))
    except (ValueError, RecursionError):
        return False


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
    words, wanted_words = text.split(), wanted.split()
    return (
        len(text.strip().splitlines()) == len(wanted.strip().splitlines())
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
