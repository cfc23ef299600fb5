"""Responses with the tests of their problem, and what each must score."""

import json

FENCE = "```"


def fenced(program: str, info: str = "python") -> str:
    return f"{FENCE}{info}\n{program}\n{FENCE}\n"


def calls(name: str, *cases: tuple[list[object], object]) -> str:
    """A reference of arguments and results."""
    inputs, outputs = zip(*cases, strict=True)
    return json.dumps({"fn_name": name, "inputs": inputs, "outputs": outputs})


def prints(*cases: tuple[str, str]) -> str:
    """A reference of inputs and outputs."""
    inputs, outputs = zip(*cases, strict=True)
    return json.dumps({"inputs": inputs, "outputs": outputs})


def module(code: str, entry_point: str = "add", **fields: str) -> str:
    return json.dumps({"test_code": code, "entry_point": entry_point, **fields})


def method(name: str, parameters: str, body: str) -> str:
    return fenced(f"class Solution:\n    def {name}(self, {parameters}):\n        {body}")


SUM = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = prints(("3 4\n", "7\n"), ("10 -2\n", "8\n"))
ADD = "def add(a, b):\n    return a + b"
LESS = "def add(a, b):\n    return a - b"
ADDED = calls("add", ([3, 4], 7), ([10, -2], 8))
IN_DOCSTRING = f'def add(a, b):\n    """Add.\n\n    {FENCE}\n    add(1, 2)\n    {FENCE}\n    """\n'
GUARD = "\nif __name__ == '__main__':\n    "
ADDS = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.three = 3\n"
    "    def test_a(self):\n        self.assertEqual(add(1, 2), self.three)\n"
)
WITH_MATH = "from math import *\nfrom operator import *\nclass ListNode:\n    pass\n"
LONG = "1" + "0" * 5000
LINES = prints(("1 2\n", "3\n"), ("3 4 5", "12\n\n"))
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [[3], "ab"]})
LIVE = calls("add", ("1\n2", "3"), ('"x"\n"y"', '"xy"'))
ASSERTS = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]
CASES = json.dumps({"assert_case": ASSERTS})
CHECKED = module(
    "def check(candidate):\n    assert candidate(1, 2) == 3\n\n    assert candidate(0, 0) == 0",
    "Solution().add",
    import_prefix="from typing import *\n\n",
)
SOLUTION = fenced(
    "class Solution:\n    def add(self, a: Any, b: Optional[int]):\n        return a + b"
)

FORMS = {
    "lines": (fenced("print(sum(map(int, input().split())))"), LINES),
    "calls": (fenced(ADD), CALLS),
    "calls of a method": (SOLUTION, CALLS),
    "calls by lines": (fenced(ADD), LIVE),
    "asserts in a struct": (fenced(ADD), CASES),
    "asserts": (fenced(ADD), json.dumps(ASSERTS)),
    "an assert": (fenced(ADD), "assert add(2, 2) == 4"),
    "a check": (SOLUTION, CHECKED),
    "output": (fenced("print(6 * 7)"), "42"),
    "output that is nearly equal": (fenced("print(f'{1 / 3:.9f} ok  ')"), "0.3333333 ok"),
}
"""All of them are right."""

EXTRACTION = {
    "text after": (fenced(SUM) + "Input:\n" + fenced("3 4", "text") + fenced("7", "text"), SUMS),
    "C++ before": (
        "In C++:\n" + fenced("int main(){}", "cpp") + "In Python:\n" + fenced(SUM),
        SUMS,
    ),
    "output without language": (fenced(SUM) + "It prints\n" + fenced("7", "") + "Done.", SUMS),
    "without language": ("Input\n" + fenced("3 4", "") + fenced(SUM, "") + fenced("7", ""), SUMS),
    "several in Python": (
        fenced("print(1)") + "Better:\n" + fenced(SUM) + fenced("x", "text"),
        SUMS,
    ),
    "a longer fence": (f"{FENCE}`python\nx = '''\n{FENCE}\n'''\n{SUM}\n{FENCE}`\n", SUMS),
    "CRLF": (fenced(SUM).replace("\n", "\r\n"), SUMS),
    "tildes": (f"~~~python\n{SUM}\n~~~\n", SUMS),
    "title": (fenced(SUM, 'python title="add.py"'), SUMS),
    "class": (fenced(SUM, "{.python}"), SUMS),
    "classes": (fenced(SUM, "{.numberLines .python}"), SUMS),
    "version": (fenced(SUM, "Python 3.11"), SUMS),
    "file name": (fenced(SUM, "python3:main.py"), SUMS),
    "in a list": (
        "1. It:\n\n" + fenced(SUM).replace("\n", "\n   ").replace(FENCE, f"   {FENCE}", 1),
        SUMS,
    ),
    "after a list mark": (
        f"- {FENCE}py\n  a, b = map(int, input().split())\n  print(a + b)\n  {FENCE}",
        SUMS,
    ),
    "after text": (f"Here it is: {FENCE}python\n{SUM}{FENCE}\nDone.", SUMS),
    "in a docstring": (fenced(IN_DOCSTRING + "    return a + b"), ADDED),
    "at the margin of a docstring": (
        fenced(f'"""Add.\n\n{FENCE}python\nadd(1, 2)\n{FENCE}\n"""\n{SUM}'),
        SUMS,
    ),
}
"""All of them are right."""

NAMES = {
    "pow of three": (
        fenced("a, b = map(int, input().split())\nprint(pow(a, b, 1000))"),
        prints(("3 4\n", "81")),
    ),
    "pow in a function": (
        fenced("def f(n, m):\n    return pow(2, n, m)"),
        calls("f", ([10, 1000], 24)),
    ),
    "pow in asserts": (
        fenced("def f(n):\n    return pow(2, n, 7)"),
        '["assert f(3) == pow(2, 3, 7)"]',
    ),
    "pow after a prefix": (
        method("f", "n", "return pow(2, n, 7)"),
        module(
            "def check(candidate):\n    assert candidate(4) == 2",
            "Solution().f",
            import_prefix=WITH_MATH,
        ),
    ),
    # Names that starter code imports, too.
    **{
        name: (method(name, "n", "return n // 2"), calls(name, ([6], 3)))
        for name in (
            *("count", "insort", "reduce", "compress", "repeat", "merge", "product", "dist"),
            *("cycle", "partial", "bisect", "inf", "e", "copy"),
        )
    },
    "a name that it imports": (
        fenced(
            "from heapq import *\nfrom itertools import *\n"
            "class Solution:\n    def merge(self, n):\n        return [*accumulate(n)]"
        ),
        calls("merge", ([[1, 2]], [1, 3])),
    ),
    "a function": (
        fenced("def gcd(a, b):\n    return a if not b else gcd(b, a % b)"),
        calls("gcd", ([4, 6], 2)),
    ),
    "a builtin's name": (fenced("def sum(a, b):\n    return a * b"), '["assert sum(2, 3) == 6"]'),
    "what starter code has": (
        method(
            "f",
            "xs: List[int]",
            "return [gcd(*xs), bisect.bisect_left(xs, 5), deque(xs)[0], inf > 1]",
        ),
        calls("f", ([[4, 6]], [2, 1, 4, True])),
    ),
    "names of the tests": (
        fenced("e = 7\ndef f():\n    return e"),
        module("from math import *\nassert f() == 7 and e < 3"),
    ),
    "future": (fenced("from __future__ import annotations\n" + SUM), prints(("3 4\n", "7\n"))),
    "future after comments": (
        fenced(
            "#!/usr/bin/env python3\n# -*- coding: utf-8 -*-\n\n"
            "from __future__ import annotations\ndef f(x: Y) -> Y:\n    return x"
        ),
        calls("f", ([1], 1)),
    ),
    "future and dataclasses": (
        fenced(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
            "class P:\n    x: int = 3\ndef f():\n    return P().x"
        ),
        '["assert f() == 3"]',
    ),
}
"""All of them are right."""

NUMBERS = {
    "printed": (fenced("print(10**5000 // 10**int(input()))"), prints(("3\n", LONG[:-3]))),
    "returned": (
        fenced("def f(n):\n    return 10**n"),
        f'{{"fn_name": "f", "inputs": [[5000]], "outputs": [{LONG}]}}',
    ),
    "given": (
        fenced("def f(n):\n    return n % 7"),
        f'{{"fn_name": "f", "inputs": [[{LONG}]], "outputs": [2]}}',
    ),
    "read": (fenced("print(int(input()) % 7)"), prints((LONG, "2"))),
    "in asserts": (
        fenced("def f(n):\n    return 10**n"),
        f'["assert f(5000) == {LONG}", "assert len(str(f(5000))) == 5001"]',
    ),
    "a sum of decimals": (fenced("def f(n):\n    return 0.1 + 0.2"), calls("f", ([3], 0.3))),
    "in lists": (
        fenced("def f():\n    return [0.1 + 0.2, {'a': (1, 1.1 + 2.2)}]"),
        calls("f", ([], [0.3, {"a": [1, 3.3]}])),
    ),
    "deep recursion": (
        fenced("def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))"),
        prints(("20000", "20000")),
    ),
    "deep recursion with a cache": (
        fenced(
            "from functools import cache\n@cache\ndef f(n):\n"
            "    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))"
        ),
        prints(("20000", "20000")),
    ),
}
"""All of them are right."""

GUARDS = {
    "reads input": (
        fenced(ADD + GUARD + "a, b = map(int, input().split())\n    print(add(a, b))"),
        ADDED,
    ),
    "exits": (fenced(ADD + GUARD + "import sys\n    sys.exit(0)"), '["assert add(3, 4) == 7"]'),
    "fails": (fenced(ADD + GUARD + "main()"), module(ADDS)),
    "prints": (
        fenced("def main():\n    print(int(input()) + 1)" + GUARD + "main()"),
        prints(("3", "4")),
    ),
}
"""All of them are right."""

RIGHT = [FORMS, EXTRACTION, NAMES, NUMBERS, GUARDS]

TESTS = {
    "over several lines": (
        "def check(candidate):\n    assert candidate(\n        1,\n        2,\n"
        "    ) == 3\n    assert candidate(0, 0) == 0\n"
    ),
    "a loop": (
        "def check(candidate):\n    inputs = [[1, 2], [3, 4]]\n    results = [3, 7]\n"
        "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
        "        assert candidate(*inp) == exp, f'{i}'\n"
    ),
    "metadata": "METADATA = {'author': 'x'}\n\n\n" + ADDS,
    "a docstring": (
        'def check(candidate):\n    """Tests."""\n    # two of them\n'
        "    assert candidate(1, 2) == 3\n"
    ),
    "a text over lines": (
        'def check(candidate):\n    assert candidate("""a\nb""", "c") == "a\\nbc"\n'
    ),
    "unittest": UNITTEST,
    "unittest and main": UNITTEST + "if __name__ == '__main__':\n    unittest.main()\n",
    "main": UNITTEST.replace("import unittest", "from unittest import TestCase, main").replace(
        "unittest.T", "T"
    )
    + "main()\n",
    "asynchronous cases": UNITTEST.replace("TestCase", "IsolatedAsyncioTestCase").replace(
        "    def test", "    async def test"
    ),
    "class fixtures": UNITTEST.replace("def setUp(self)", "@classmethod\n    def setUpClass(self)"),
    "functions": (
        "from solution import add\n\ndef test_one():\n    assert add(1, 2) == 3\n\n"
        "def test_two():\n    assert add('a', 'b') == 'ab'\n"
    ),
    "classes": "class TestAdd:\n    def test_one(self):\n        assert add(1, 2) == 3\n",
    "asserts": (
        "x = [1, 2]\nfor y in range(3):\n    assert add(*x) == 3 + 0 * y\n"
        "assert add(\n    0, 0) == 0"
    ),
    "imports": "import math\nfrom typing import *\n"
    + ADDS
    + "    assert candidate(math.inf, 1) == math.inf\n",
    "a helper": (
        "def same(a, b):\n    assert a == b\n\ndef check(candidate):\n"
        "    same(candidate(1, 2), 3)\n"
    ),
    "a call of its own": ADDS + "\ncheck(add)\n",
    "a guard": "if __name__ == '__main__':\n    assert add(1, 2) == 3\n",
    "a text like an import": '"""\nimport nothing\n"""\n' + ADDS,
    "an optional import": "try:\n    import no_such\nexcept ImportError:\n    pass\n" + ADDS,
    "an error": "try:\n    add(1, 2, 3)\nexcept TypeError:\n    assert add(1, 2) == 3\n",
}
"""``test_code`` that ``ADD`` passes, and ``LESS`` does not."""

WRONG = {
    "wrong": [
        (fenced("import sys\nsys.exit(0)"), module(ADDS)),
        (fenced(ADD.replace("return a + b", "exit()")), ADDED),
        (fenced("def add(a, b):\n    import os\n    os._exit(0)"), module(UNITTEST)),
        (fenced("def add(a, b):\n    import os\n    os._exit(0)"), '["assert add(1, 2) == 3"]'),
        (fenced(LESS), ADDED),
        (fenced("def add(a, b):\n    return [a + b]"), ADDED),
        (fenced("def f():\n    return 0.31"), calls("f", ([], 0.3))),
        (fenced("def f():\n    return 3.0000001"), calls("f", ([], 3))),
        (fenced("def f():\n    return [0.3]"), calls("f", ([], [0.3, 0.3]))),
        (fenced("def f():\n    return {'a': 0.3}"), calls("f", ([], {"b": 0.3}))),
        (fenced("def f(n):\n    return 10**n + 1"), NUMBERS["returned"][1]),
        (fenced("def f():\n    return 10**400"), calls("f", ([], 1.5))),
        (
            fenced(
                "import sys\ndef f():\n    sys.setrecursionlimit(10**6)\n    x = []\n"
                "    for _ in range(900):\n        x = [x]\n    return x"
            ),
            calls("f", ([], 1.5)),
        ),
        (fenced("print('[' * 100000)"), prints(("", "1"))),
        (fenced(SUM.replace("+", "*")) + fenced("7\n8", ""), SUMS),
        (fenced(SUM) + fenced("print(7)"), SUMS),
        (fenced(SUM) + fenced("print(7)", ""), SUMS),
        (fenced("print(3)"), LINES),
        (fenced("print(3, 12)"), prints(("", "3\n12"))),
        (fenced("def add(a, b): return a"), CALLS),
        (fenced("print(6 * 8)"), "42"),
        (fenced("print('42.0000001')"), "42"),
        # It ends before the tests, with exit status 0.
        (fenced("import os; os._exit(0)"), LIVE),
        (fenced("print('passed'); raise SystemExit"), CHECKED),
    ],
    "error": [
        (fenced(LESS), module(ADDS)),
        (fenced(LESS + "\ndef check(candidate):\n    pass"), module(ADDS)),
        (
            fenced("import unittest\nunittest.TestCase.assertEqual = print\n" + LESS),
            module(UNITTEST),
        ),
        (
            fenced(
                "import sys, types\nsys.modules['unittest'] = types.ModuleType('unittest')\n" + LESS
            ),
            module(UNITTEST),
        ),
        (fenced("import unittest\ndef add(a, b):\n    raise unittest.SkipTest"), module(UNITTEST)),
        (
            fenced("def add(a, b):\n    import unittest\n    raise unittest.SkipTest"),
            module(UNITTEST),
        ),
        (fenced(ADD), module(ADDS.replace("3", "4"))),
        (fenced("def other():\n    pass"), module(ADDS)),
        (fenced("merge = 1"), calls("product", ([[1]], 1))),
        (fenced("def f(x):\n    return f(x)"), calls("f", ([1], 1))),
        (fenced("def f(x):\n    return g(x)\ndef g(x):\n    return f(x)"), calls("f", ([1], 1))),
        (fenced(f"{SUM}\n{FENCE}", "text\n") + fenced("Then add them.", "py"), SUMS),
        (fenced("x = '\0'"), SUMS),
        (fenced("1 / 0"), LINES),
        (fenced(LESS), CASES),
        (SOLUTION.replace("+", "-"), CHECKED),
        (fenced("def other(): pass"), CALLS),
        (fenced("def add("), CASES),
    ],
    "timeout": [(fenced("while True: pass"), LINES)],
    "output": [(fenced("while True: print('3' * 1000)"), LINES)],
    "no_program": [
        ("The answer is 7.", SUMS),
        (fenced(SUM, "cpp"), SUMS),
        (fenced(">>> 3 + 4\n7", "pycon"), SUMS),
        (f"{FENCE}python\n{SUM}\n", SUMS),
        (f"<think>{fenced(SUM)}</think>It is 7.", SUMS),
        (f"{FENCE}python\n{FENCE}", SUMS),
        (fenced(" "), SUMS),
    ],
}
"""Responses that score 0, by their reason."""

UNUSABLE = {
    "{'inputs': ['3 4'], 'outputs': ['7']}": "not valid JSON",
    "[{'input': '3 4', 'output': '7'}]": "not valid JSON",
    SUMS[:-20]: "not valid JSON",
    SUMS[1:]: "no program prints '\"inputs\":'",
    json.dumps(SUMS)[:-9]: "not valid JSON",
    json.dumps([{"input": "3 4", "output": "7", "testtype": "stdin"}]): "a list must hold asserts",
    json.dumps(
        {"language": "python", "test_cases": [{"input": "3", "output": "7"}]}
    ): "it has neither inputs with outputs",
    "[1, 2, 3]": "a list must hold asserts",
    '["3", "4"]': "it has no assert",
    "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3": "no program prints",
    (
        "import pytest\n\n@pytest.mark.parametrize('a', [1])\ndef test_add(a):\n    assert a"
    ): "no program",
    fenced("print(7)"): "no program prints",
    calls("f", (3, 4)): "must have a name and a list of arguments, got f(3)",
    calls("f", ("1\nx", "4")): "not valid JSON",
    prints(({"a": 1}, "7")): "must be texts",
    '{"inputs": ["1"], "outputs": [null]}': "must be texts",
    '{"inputs": [], "outputs": []}': "it has neither inputs with outputs",
    '{"inputs": [1], "outputs": []}': "shorter",
    '{"inputs": 1}': "list",
    module("def check(candidate):\n    assert candidate(1, 2) == "): "invalid syntax",
    module("def check(candidate):\n    return candidate(1, 2) == 3"): "it has no assert",
    module(ADDS, "add("): "was never closed",
    calls("", ([3], 4)): "must have a name",
    module(ADDS, ""): "check needs an entry_point",
    module(ADDS, import_prefix="from typing import"): "invalid syntax",
    module("def test_add(a):\n    assert add(a, 0) == a"): "only pytest can run 'def test_add'",
    module("async def test_add():\n    assert add(1, 0) == 1"): "only pytest can run 'async def",
    module("import no_such_module\n" + ADDS): "has no module 'no_such_module'",
}
"""Reference answers that hold no tests, and why."""
