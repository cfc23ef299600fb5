r"""Matrices, vectors, intervals and cases in the one spelling that the parser reads.

Points are columns where they are added, scaled, transposed or compared with a matrix. ``|M|`` and
``vmatrix`` are determinants, never matrices.
"""

import itertools
import re

_OPEN, _CLOSE = "([{", ")]}"
_BRACES = re.compile(r"(?<!\\)\{(\{(?:[^{}]|\{[^{}]*\})*\})\}")
"""Needless ones, with each of which the parser's time doubles."""
_MATRIX = re.compile(
    r"\\(begin|end)\{(?:[pbB]?(?:small)?matrix\*?\}(?:\[[lcr]\])?|array\}(?:\{[lcr| ]*\})?)"
)
_TURNED = re.compile(
    r"(?<=[\])}])\^(?:T|\{\s*(?:T|\\text\{T\}|\\top|\\intercal)\s*\}|\\(?:text\{T\}|(?:top|intercal)\b))"
)
_D = re.compile(r"(?<![A-Za-z\\{])([a-ce-z]?)d(?![A-Za-z])")
"""A letter in a matrix, but the start of ``dx`` to the parser."""
_ANGLED = re.compile(r"(?:\\langle|⟨|^<)\s*([^<>⟨⟩]*?,[^<>⟨⟩]*?)\s*(?:\\rangle|⟩|>$)")
_VECTOR = re.compile(
    r"\\(?:(?:hat|widehat)\s*(?=\{?\s*\\?[ijk])|vec|overrightarrow)(?![A-Za-z])\s*"
    r"(?:\{\s*\\?([a-df-zA-Z])(?:math)?\s*\}|\\?([a-df-zA-Z])(?:math)?(?![A-Za-z]))"
)
"""Bold letters have lost their mark before."""
_AXIS = re.compile(r"(?<![A-Za-z\\])([ijk])(?![A-Za-z])")
_INTERVAL = re.compile(r"^((?:.*?(?:\\in|=))?)([\[\](])([^,;\[\]]+)[,;]([^,;\[\]]+)([\[\])])$")
_UNION = re.compile(r"(\\(?:cup|cap|setminus)(?![A-Za-z]))")
_POINT = re.compile(r"\(((?:[^()]|\([^()]*\))*)\)(\^T)?")
_SCALE = re.compile(
    r"(?:[+\-\d]|(?<![A-Za-z\\])[a-eik-z]|\\(?:cdot|lambda|mu|alpha|beta|tau)"
    r"|\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\})\s*$"
)
"""What stands before a point that it adds to or scales; a function's name does not."""
_ROWS = re.compile(
    r"((?:[^=\\]+=)?)(?:\\begin\{[dr]?cases\}|\\\{\s*\\begin\{array\}\{[lcr| ]*\})(.*?)"
    r"(?:\\\\)?\\end\{(?:[dr]?cases|array)\}\s*\.?"
)
_CASE = re.compile(r"(.*?)(?:[,;]?\s*&\s*|[,;]\s*(?=\\text)|[,;](?=[^,;]*$)|\s*(?=\\text))(.+)")
_IF = re.compile(r"(?:\\text\{\s*)?(?:if|for|when|where|当)\b\s*\}?\s*|[.,;]$")

_PROSE = re.compile(r"\\text\{\s*(?:is\b)?|\bis\b|[}\s]")


def spelled_out(text: str) -> str:
    """One spelling of the structures in a canonical answer, which keeps its value."""
    while "{{" in text and (shorter := _BRACES.sub(r"\1", text)) != text:
        text = shorter
    text = _VECTOR.sub(r"\1\2 ", _ANGLED.sub(r"(\1)", text)).strip()
    text = "".join(_INTERVAL.sub(_with_round_ends, part) for part in _UNION.split(text))
    if (rows := _ROWS.fullmatch(text)) is not None:  # cases, or equations one below the other
        is_system = cases(text) is None
        return ",".join(rows[2].replace("&", "").split(r"\\")) if is_system else text
    text = _with_columns(_TURNED.sub("^T", text))
    if "matri" not in text and "array}" not in text:
        return text
    return _D.sub(r"\1{d}", _MATRIX.sub(r"\\\1{pmatrix}", text))


def _with_round_ends(interval: re.Match[str]) -> str:
    head, first, low, high, last = interval.groups()
    return f"{head}{first.replace(']', '(')}{low},{high}{last.replace('[', ')')}"


def _with_columns(text: str) -> str:
    """Points that are added, scaled or transposed as columns: ``(1,2)+t(3,4)``, ``(1,2)^T``."""
    text = re.sub(r"\[([^\[\]]*)\](?=\^T)", r"(\1)", text)
    points = [point for point in _POINT.finditer(text) if len(split(point[1])) > 1]
    is_combined = False
    for point in points:
        before = text[: point.start()]
        is_scaled = _SCALE.search(before) is not None
        if before and not before.endswith("=") and not is_scaled:
            return text
        is_combined |= is_scaled or point[2] is not None
    return _POINT.sub(_as_column, text) if is_combined else text


def _as_column(point: re.Match[str]) -> str:
    return _matrix(point[1]) if len(split(point[1])) > 1 else point[0]


def _matrix(point: str, mark: str = r"\\ ") -> str:
    """The column, or with the mark ``&`` the row, of a point's coordinates."""
    return rf"\begin{{pmatrix}}{mark.join(split(point))}\end{{pmatrix}}"


def beside(text: str, other: str) -> str:
    r"""A point compared with a matrix as one; ``i+2j`` compared with either as a column."""
    is_matrix = "matrix}" in other
    if _is_point(text) and (is_matrix or _is_on_axes(other)):
        return _matrix(text[1:-1], "&" if "&" in other and r"\\" not in other else r"\\ ")
    if not _is_on_axes(text) or not (is_matrix or _is_point(other)):
        return text
    size = other.count(r"\\") + 1 if is_matrix else len(split(other[1:-1]))
    units = {
        name: _matrix(",".join("01"[row == number] for row in range(size)))
        for number, name in enumerate("ijk"[:size])
    }
    return _AXIS.sub(lambda axis: units.get(axis[1], axis[1]), text)


def _is_point(text: str) -> bool:
    is_round = text[:1] + text[-1:] == "()"
    return kind_of(text) == "tuple" and (is_round or len(split(text[1:-1])) > 2)


def _is_on_axes(text: str) -> bool:
    """Whether it may be a sum of unit vectors, ``3i-2j``, though not of ``i`` alone."""
    is_sum = kind_of(text) == "single" and "matrix}" not in text
    return is_sum and not {"j", "k"}.isdisjoint(_AXIS.findall(text))


def cases(text: str) -> tuple[str, list[tuple[str, str]]] | None:
    """The name before cases, ``f(x)=``, and their values with conditions; None for others."""
    rows = _ROWS.fullmatch(text)
    parts = [_CASE.fullmatch(row.strip()) for row in rows[2].split(r"\\")] if rows else [None]
    pairs = [(part[1], _condition(part[2])) for part in parts if part]
    is_system = len(pairs) < len(parts) or any(condition[0] in "=<>" for _, condition in pairs)
    return None if rows is None or is_system else (rows[1], pairs)


def _condition(text: str) -> str:
    text = _IF.sub("", text)
    is_prose = r"\text" in text or text.count("{") < text.count("}")
    return _PROSE.sub("", text) if is_prose else text


MAX_ANSWER = 1000
"""Characters; nobody's answer is longer, and symbolic comparison grows faster than its input."""
MAX_NESTING = 24
"""Brackets within brackets; the parser's time grows exponentially with them."""


def nesting(text: str) -> int:
    """Return the greatest depth of brackets; brackets that close nothing count too."""
    depths = [0, *_depths(text)]
    return max(depths) - min(depths)


def _depths(text: str) -> list[int]:
    """How many brackets are open behind each character."""
    return list(itertools.accumulate((char in _OPEN) - (char in _CLOSE) for char in text))


def kind_of(text: str) -> str:
    """``set``, ``tuple`` (intervals and points), ``list`` (without brackets) or ``single``."""
    if len(split(text)) > 1:
        return "list"
    depths = _depths(text)
    if depths[-1:] != [0] or 0 in depths[1:-1]:
        return "single"  # the brackets do not enclose all of it
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    is_bracketed = text[0] in "([" and text[-1] in ")]"
    return "tuple" if is_bracketed and len(split(text[1:-1])) > 1 else "single"


def split(text: str, marks: str = ",;") -> list[str]:
    """The parts between commas and semicolons outside of brackets; thousands stay whole."""
    parts, start = [], 0
    for position, depth in enumerate(_depths(text)):
        if depth == 0 and text[position] in marks and not _is_thousands(text, position):
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _is_thousands(text: str, comma: int) -> bool:
    before = re.search(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})*$", text[:comma])
    return bool(before and re.match(r",\d{3}(?!\d)", text[comma:]))
