"""The reward ``program``: runs the last program of a response against tests, in the sandbox.

A reference answer is one of these, as text or JSON; the objects are those of code data sets such as
Skywork-OR1, TACO and LiveCodeBench:

    {"inputs": […], "outputs": […]}                        standard input and output
    {"fn_name": "f", "inputs": […], "outputs": […]}        arguments and result of f or Solution().f
    {"assert_case": ["assert f(1) == 2", …]}, or the list  statements after the program
    {"import_prefix": "…", "test_code": "…", "entry_point": "f"}
                           test_code: the header of check(candidate), then one assert in each line
    any other text                                         what the program prints

Output and results are compared here, outside of the sandbox. Statements run in the program's own
process and pass if all of them are reached: a program that ends early fails, one that changes what
they compare does not.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.reward import ProgramConfig
from bapo_megatron.reward.base import RowError, Score
from bapo_megatron.runtime.calls import decode
from bapo_megatron.runtime.names import LoadError
from bapo_megatron.sandbox.base import SandboxError
from bapo_megatron.sandbox.load import open_sandbox

_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_PRELUDE = (
    "import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, "
    "random, re, string, sys\n"
    "from typing import *\nfrom collections import *\nfrom functools import *\n"
    "from itertools import *\nfrom heapq import *\nfrom bisect import *\nfrom math import *\n"
    "inf = float('inf')\n"
)
"""Names that starter code of such data sets takes for granted."""
_CALL = """
import json as _json
_call = globals().get({name!r}) or getattr(Solution(), {name!r})
_result = _call(*_json.loads({arguments!r}))
print({mark!r} + _json.dumps(_result, default=list))
"""
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
    """One run: what is added to the program, and what its output must be."""

    is_passed: Callable[[str], bool]
    before: str = ""
    after: str = ""
    stdin: str = ""


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
        try:
            cases = _cases(answer)[: self._config.max_tests]
        except ValueError as error:
            raise RowError(str(error)) from error
        programs = _BLOCK.findall(response.rpartition("</think>")[2])
        if not programs:
            return Score(0.0, answer_found=False, reason="no_program")
        num_passed, reason = 0, "passed"
        for case in cases:
            outcome = self._sandbox.run(f"{case.before}{programs[-1]}\n{case.after}", case.stdin)
            if outcome.ending == "ok" and case.is_passed(outcome.stdout):
                num_passed += 1
                continue
            reason = "wrong" if outcome.ending == "ok" else outcome.ending
            if self._config.score == "all":
                break
        share = num_passed / len(cases)
        return Score(
            reward=share if self._config.score == "share" else float(num_passed == len(cases)),
            extracted=programs[-1],
            reason=reason,
            metrics={"passed_share": share},
        )


def _cases(answer: str) -> list[_Case]:
    """Read the tests of a reference answer."""
    try:
        value = json.loads(answer) if answer.lstrip().startswith(("{", "[")) else answer
    except ValueError:
        value = answer
    if isinstance(value, str):
        is_assert = value.startswith("assert ")
        return [_statements(value)] if is_assert else [_Case(lambda text: _equal(text, value))]
    if isinstance(value, list):
        value = {"assert_case": value}
    tests = decode(_Tests, {k: v for k, v in value.items() if k in _Tests.__annotations__})
    cases = list(_cases_of(tests))
    if not cases:
        raise ValueError(f"the reference answer must hold tests, got {answer:.80}; correct the row")
    return cases


def _cases_of(tests: _Tests) -> Iterator[_Case]:
    if tests.inputs is not None and tests.outputs is not None:
        for given, wanted in zip(tests.inputs, tests.outputs, strict=True):
            if tests.fn_name is None:
                yield _printed(given, wanted)
            else:
                yield _called(tests.fn_name, given, wanted)
    elif tests.assert_case is not None:
        yield from map(_statements, tests.assert_case)
    elif tests.test_code is not None:
        header, *asserts = [line for line in tests.test_code.splitlines() if line.strip()]
        for line in asserts:
            yield _statements(f"{header}\n{line}\ncheck({tests.entry_point})", tests.import_prefix)


def _printed(stdin: Any, stdout: Any) -> _Case:
    # Some sets have a list of lines.
    given, wanted = (
        "\n".join(map(str, text)) if isinstance(text, list) else str(text)
        for text in (stdin, stdout)
    )
    return _Case(lambda text: _equal(text, wanted), _PRELUDE, stdin=given)


def _called(name: str, arguments: Any, result: Any) -> _Case:
    if isinstance(arguments, str):  # LiveCodeBench: JSON, one argument in each line
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        result = json.loads(result)
    mark = secrets.token_hex(8)

    def is_passed(text: str) -> bool:
        _, has_ended, printed = text.rpartition(mark)
        if not has_ended:
            return False
        try:
            value = json.loads(printed)
        except ValueError:
            return False
        # TACO wraps a result in a list of one.
        return value == result or (isinstance(result, list) and [value] == result)

    call = _CALL.format(name=name, arguments=json.dumps(arguments), mark=mark)
    return _Case(is_passed, _PRELUDE, call)


def _statements(text: str, prefix: str = _PRELUDE) -> _Case:
    mark = secrets.token_hex(8)
    return _Case(
        lambda printed: printed.rstrip().endswith(mark), prefix, f"{text}\nprint({mark!r})\n"
    )


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
