"""The spelling of answers: one form for what typesetting, units and Unicode allow to vary.

Nothing here evaluates anything. Whatever is rewritten keeps its value; where that is not sure, the
text is left as it is, and the comparison decides.

Units are compared, never converted. Other words behind a value ("apples", "north") may be missing
on one side, but not differ; words that belong to mathematics or to a sentence are refused, so that
"5 or 6" is not 5.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_PLAIN_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)
_COMMANDS = {
    "×": "times", "±": "pm", "π": "pi", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "∪": "cup",
    "∩": "cap", "∅": "emptyset", "∈": "in", "√": "sqrt", "≈": "approx", "≡": "equiv", "·": "cdot",
    "⋅": "cdot", "∠": "angle", "∛": "sqrt[3]", "ℕ": "mathbb{N}", "ℤ": "mathbb{Z}",
    "ℚ": "mathbb{Q}", "ℝ": "mathbb{R}", "ℂ": "mathbb{C}",
}  # fmt: skip
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " "),
        **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("°º", r"^\circ "),
        **{sign: rf"\{command} " for sign, command in _COMMANDS.items()},
        **{"、": ",", "。": ".", "￥": "¥", "’": "'", "′": "'"},
    }
)
_SCRIPTS = {"<super>": "^{%s}\1", "<sub>": "_{%s}\2", "<fraction>": "\\frac{%s}"}
"""Forms of characters that Unicode knows; the last character marks where a script may go on."""
_BRACKETED = r"\((?:[^()]|\([^()]*\))*\)"
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_ROOT = re.compile(rf"\\sqrt(\[3\])?(?: (\d+|[A-Za-z](?![A-Za-z]))| ?({_BRACKETED}))")
_LATEX_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_NEGATIVE_SPACE = re.compile(r"\s*(?<!\\)\\!\s*")
_DOLLAR = re.compile(r"(?<!\\)\$")
_SIZING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|(?:display|text|script|scriptscript)style|bf|rm|it|bm|boldsymbol"
    r"|underline|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
)
_FRACTION = re.compile(r"\\(?:[dtc]|nice|s)(frac|binom)(?![A-Za-z])")
_PART = rf"((?:[^{{}}=<>,]|{_GROUP})*)"
_OVER = re.compile(rf"\{{{_PART}\\over(?![A-Za-z]){_PART}\}}")
_ARGUMENT = r"(\d|[A-Za-z]|\\(?:pi|alpha|beta|theta)(?![A-Za-z])|\{[^{}]*\})"
_BRACELESS = re.compile(
    rf"\\(frac|binom)\s*{_ARGUMENT}\s*{_ARGUMENT}"
    r"|\\(overline|math(?:bb|bf)|sqrt\[\w+\])\s*(\d+|[A-Za-z])"
)
"""TeX takes one digit or letter where there are no braces: ``\\frac13`` is 1/3."""
_SCRIPT = re.compile(
    rf"([\^_]|\\sqrt(?=\\))\s*(\\(?:frac|binom){_GROUP}{_GROUP}|\\sqrt(?:\[\w+\])?(?:{_GROUP}|\d)"
    rf"|\\text{_GROUP})"
)
"""A command without braces around it and its arguments: ``x^\\frac{1}{2}``."""
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|hbox"
    r"|operatorname)\s*\{([^{}]*)\}"
)
_SCHOOL_NAMES = {
    "tg": "tan", "ctg": "cot", "cotg": "cot", "cosec": "csc", "arctg": "arctan",
    "arcctg": "arccot", "sh": "sinh", "ch": "cosh", "th": "tanh", "lg": "log_{10}",
}  # fmt: skip
_NAMES = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|arccot|sinh|cosh|tanh|ln|log|exp|"
_NAMES += "|".join(_SCHOOL_NAMES)
_FUNCTION = re.compile(rf"\\text\{{\s*({_NAMES})\s*\}}(?=\s*[\w\\({{|^])|\\({_NAMES})(?![A-Za-z])")
"""A function in upright text, which has an argument, or as a command, also of Russian schools."""
_UPRIGHT = re.compile(r"(?<=[A-Za-z])(?=\\text\{[eijk]\})|\\text\{([eijk]|\d+)\}")
_SAME = {
    "varnothing": r"\emptyset", "colon": ":", "degree": r"^\circ", "textdegree": r"^\circ",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")",
    "thinspace": " ",
}  # fmt: skip
_SAME_COMMAND = re.compile(rf"(\^\{{?)?\\({'|'.join(_SAME)})(?![A-Za-z])(?(1)\}}?)")
_TYPED = re.compile(
    r"(?<![A-Za-z\\])(?<!\\text\{)(pi(?![A-Za-z])|(?:sqrt|sin|cos|tan|ln|log|exp)(?=[({\d]))"
)
"""A command as programs spell it: ``2pi``, ``sqrt(3)/2``."""
_TYPED_POWER = re.compile(
    rf"(?:\*\*|\^(?=-(?:\d+|[A-Za-z])(?!\w)))\s*(-?(?:\d+|[A-Za-z])|{_BRACKETED})"
)
_OPERATOR = re.compile(r"(?:^|(?<=[_{]))\\(max|min|sup|inf|dim|deg|det)(?![A-Za-z])(?=.*=)")
_GROUPS = re.compile(r"(?<![\w'.])\d{1,3}(?:(?:'\d{3})+|(?:\\?_\d{3}){2,})(?![\w'])")
_ORDINAL = re.compile(
    r"\^\{\\text\{ ?(?:st|nd|rd|th) ?\}\}|(?<![\w.}])(?=\d+(?:\^\{)?(?:st|nd|rd|th)\b)"
    r"(\d*(?:1[123]|1(?=\W*st)|2(?=\W*nd)|3(?=\W*rd)|[04-9](?=\W*th)))(\^\{)?[a-z]{2}(?(2)\})"
)
_LABEL = re.compile(
    r"^(?P<text>\\text\{\s*)?(?:(?:so|thus|hence|therefore)\b[\s,:]*)?(?:"
    r"(?:(?:option|choice|answer)s?\b|选项?|答案)[\s:]*\}?(?=\W*[A-J](?!\w))|"
    r"(?:(?:the|my|our|final|correct|right)\s+)*(?:ans(?:wer)?|solution|result|答案)"
    r"(?:\s*(?:is|are)\b[\s:=]*|\s*[:=.]\s*))?",
    re.IGNORECASE,
)
"""What says only that the answer follows."""
_NAMED = re.compile(
    r"\\text\{\s*(?!\(?[A-J][:)])([^{}]*?)\s*(?:[:=]|\b(?:is|equals))\s*\}\s*(?=[^\s},;])"
)
_FLIP = re.compile(
    r"(?<!\\)\b(?:not|no|never|neither|nor|none|without|negative|wrong|incorrect|cannot"
    r"|non(?!ag|e\b)[a-z-]+|[a-z]+n't)\b",
    re.IGNORECASE,
)
"""A word that says the contrary of what stands beside it."""
_CONDITION = re.compile(r"^\\text\{ ?(if|when|unless|at most|at least)\b")
_MARKED_DIGITS = re.compile(
    r"(?<=[.\d])\\(?:overline|bar|dot|widehat|overset\{\.\})\s*\{?(\d+)\}?"
    r"(?:(\d*)\\dot\s*\{?(\d)\}?)?"
)
_ELLIPSIS = r"(?:\.\.\.|\\[lc]?dots)"
_REPEATING = re.compile(
    rf"(?<![\d.,])(?P<whole>\d{{0,30}})\.(?:(?P<fixed>\d{{0,30}})"
    rf"(?:\\overline\{{(?P<marked>\d{{1,30}})\}}{_ELLIPSIS}?|\((?P<bracketed>\d{{1,30}})\)(?=$|%|\\text))"
    rf"|(?P<before>\d{{0,30}}?)(?P<digit>\d)(?P=digit){{2,30}}{_ELLIPSIS}"
    rf"|(?P<digits>\d{{2,15}}?)(?P=digits){{1,15}}{_ELLIPSIS})(?!\d)"
)
_END_MARKS = re.compile(r"(?:[\s,;:]|(?<!\.)\.|\\[,;:! \\]|\\text\{[.,;]\})+$")
_REMARK = re.compile(
    r"(?<=[\w})])\s*(?:\\text\{\s*\(([^(){}]{2,})\)\s*\}|\(\\text\{([^(){}]+)\}\))$"
)
"""What stands in brackets behind a value: ``6\\text{ (ways)}``, ``5 (\\text{cm})``."""
_MOD = re.compile(r"\(?\s*\\(?:[pb]?mod|text\{\s*mod\s*\})\s*\{?(\w+)\}?\s*\)?")
_START_MARKS = re.compile(
    r"^(?:\s|=|\\(?:approx|therefore|implies|(?:Long)?[Rr]ightarrow)(?![A-Za-z]))+"
)
_NEEDLESS_SPACE = re.compile(
    r"(?<!^\([A-J]\))(?:(?<![\w,\\]) | (?![\w\\])|(?<=,) (?!\d)|(?<=\w) (?=\\))"
)
"""Not the one between an option's letter and its text."""
_BRACED_MARK = re.compile(r"\s*(?:\\text)?\{\s*\\?([,:.])\s*\}\s*")
_MARKS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")),
    *(("*", "*"), ("`", "`"), ("'", "'"), ('"', '"'), ("“", "”")),
)
"""Of mathematics, Markdown and quotations."""
_UNIT = re.compile(
    r"(?!0[xXbBoO][\dA-Fa-f]+$)(?P<value>.*[\d\w})\]!|%])\s*"
    r"(?:\\text\{(?P<text>[^{}]*)\}|(?<![一-鿿])(?P<chinese>[一-鿿][一-鿿/]*)"
    r"|(?<![A-Za-z])(?<![A-Za-z]{2} )(?<!\\)(?P<plain>[A-Za-z][A-Za-z/.' ]*))"
    r"(?P<power>\^\{?[23]\}?)?\.?",
    re.DOTALL,
)
_DEGREE = re.compile(
    r"(?P<value>.*[\d})])\s*\^\{?\s*\\(?:circ|degree)\s*\}?\s*"
    r"(?:\\text\{)?\s*(?P<scale>[CF]?)\s*\}?"
)
OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
"""In what stands before a degree sign, which then belongs to the function's argument."""
_PERCENT = re.compile(
    r"(?P<value>.+?)\s*(?:\\?%|\\text\{\s*(?:percent|percentage|pct)\s*\}|(?:percent|percentage|pct))"
)
_SUM = re.compile(r".[+-]|\\$")
"""In what stands before a percent sign, which then belongs to the last part alone."""
_CURRENCY = re.compile(r"(?P<sign>-?)\s*(?P<mark>\\\$|£|€|¥|₹)\s*(?P<value>[\d.,].*)")
_CHOICE = re.compile(r"\\text\{\s*\(?([A-Ja-j])\)?[.:]?\s*\}|\(([A-Ja-j])\)|([A-J])[.):]?")
_CHOICES = re.compile(r"\s*[A-J](?:(?:[\s,;]|and|和)*[A-J])+\s*")
_CHOICE_ENDS = tuple("ABCDEFGHIJ}")
_OPTION = re.compile(
    r"(?:\\text\{\s*\(?([A-J])[.:)]+\s*\}|\(([A-J])\)(?=[\s:]|\\text\{)|([A-J])[.:)](?![A-Z]\b))[\s:]*"
    r"(?!.*(?<![\w(])(?:\([A-J]\)|[A-J][.:)])|(?:\\text\{)?\W*(?:(?:and|or|nor|but|if|unless|maybe|perhaps)\b"
    r"|(?:is|was)(?:\b(?! correct| right)|n't)|(?:not|wrong|incorrect)\W*$))(?=\S)(?P<rest>.+)"
)
"""An option and its text, which neither names another option nor takes this one back."""
_WORDS = re.compile(r"[^\W\d_]+(?:[ '.,-]+[^\W\d_]+)*[.!]?")
_NUMBER = re.compile(
    r"(?=[+-]?\.?\d)[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d*)?"
    r"(?:[eE][+-]?\d{1,3})?"
)
_RATIO = re.compile(
    r"(?P<sign>-?)(?:(?P<whole>\d+)(?: |(?=\\)))?"
    r"(?:(?P<top>\d+)/(?P<bottom>\d+)|\\frac\{(?P<latex_top>-?\d+)\}\{(?P<latex_bottom>\d+)\})"
)
_MAX_DIGITS = 1000
"""A number is compared exactly up to this length; Python refuses far longer ones."""

_SPELLINGS = r"""
    m meter metre 米; km kilometer kilometre 千米 公里; cm centimeter centimetre 厘米;
    dm decimeter decimetre 分米; mm millimeter millimetre 毫米; inch in inche; foot ft feet;
    yard yd; mile mi; g gram gm 克; kg kilogram 千克 公斤; mg milligram; pound lb £; ounce oz;
    ton tonne 吨; s sec second 秒; minute min 分钟; hour h hr 时 小时 个小时; day 天 日;
    week 周 星期; month 月 个月; year yr 年; liter l litre 升; ml milliliter millilitre 毫升;
    gallon gal; dollar \$ usd buck 美元; cent ¢; euro € eur 欧元; yen ¥ 元; rupee ₹ rs; 角; 斤;
    degree deg 度; radian rad; am; pm; unit; km/hour km/h kmh kph kmph 千米/时 千米/小时;
    mile/hour mph mi/h; m/s 米/秒; joule j; newton n; watt w; volt v; % percent percentage pct
    """
"""Units with their spellings, the canonical one first."""
_CANONICAL: dict[str, str] = {
    spelling: spellings.split()[0]
    for spellings in _SPELLINGS.split(";")
    for spelling in spellings.split()
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3}
_SCALES |= {"million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNIT_WORDS = """
    a all alpha also alternatively although an and approximately arccos arcsin arctan are as at
    base because beta billion but choose cos cot csc cubed delta depending det divided dozen e
    eight eighteen eighty either eleven equals except exp factor factorial false fifteen fifth
    fifths fifty five for forty four fourteen fourth fourths from gamma gcd greater half halves
    however hundred i if inf infinity infty instead is lcm least less ln log max maybe million
    minus mod modulo more most neither nine nineteen ninety no none nor not of one oo or
    otherwise over perhaps phi pi plus possibly probably quarter quarters rather seven seventeen
    seventy sin since six sixteen sixty sqrt squared sum tan tau ten than then theta third
    thirds thirteen thirty though thousand three through times to trillion true twelve twenty
    twice two union unless until up versus vs when whenever where which with xor yes zero
    """
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split())
_NO_CHINESE_UNIT = re.compile(
    "[万亿千百十半零一二两三四五六七八九几多余或和与及且但不非无没若如除至到上下内外以约近左右大小于等加减乘"
    "是否的之折成打倍方模双对]"
)
_POWER_WORDS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3"}
_POWER_WORDS |= {"平方": "^2", "立方": "^3"}
_DOTTED = re.compile(r"(?<![a-z])[a-z]\.(?: ?[a-z](?:\.|(?![a-z])))+")
"""An abbreviation: ``p.m.``, ``B.C.``"""
_FILLERS = {
    "in", "total", "altogether", "oclock", "st", "nd", "rd", "th", "people", "person", "ways",
}  # fmt: skip
"""Words behind a value that say nothing about it."""
_SAME_WORDS = {"bce": "bc", "ce": "ad", "favour": "favor", "anticlockwise": "counterclockwise"}
_POWER_IN_TEXT = re.compile(r"\\text\{([^{}]*[a-z])\^\{?([23])\}?\}")
_MIN_WORD = 4
_LETTERS = frozenset("uvwxyz")
"""``5ab`` and ``5 xy`` are products: fewer letters right after a number, or these alone."""
_MIN_LETTERS = 2
"""A unit outside ``\\text{}`` has at least this many: a single letter is a variable."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer in parts."""

    value: str
    """Without its unit."""
    unit: str = ""
    """Canonical name of a known unit, ``%`` for percentages; empty for none or an unknown one."""
    words: str = ""
    """Other words behind the value, in one spelling."""


def canonical(answer: str) -> str:
    r"""Return one spelling of an answer; ``\text{…}`` stands for all commands of upright text."""
    if _PLAIN_NUMBER.fullmatch(answer):
        return answer
    text = _END_MARKS.sub("", _unwrapped(_plain_unicode(answer).strip()))
    text = with_braces(_typeset(text))
    if "\\" in text:
        text = _POWER_IN_TEXT.sub(r"\\text{\1}^\2", text) if "^" in text else text
        text = _NEGATIVE_SPACE.sub("", text)
    text = " ".join(_LATEX_SPACE.sub(" ", text).replace(r"\%", "%").split())
    text = _REPEATING.sub(_repeating, text) if "." in text else text
    if (whole := _TEXT.fullmatch(text)) is not None and not _CHOICE.fullmatch(text):
        text = _END_MARKS.sub("", whole[1]).strip()
    elif whole is None and "\\" in text:
        text = _FUNCTION.sub(_command, text)
        text = _REMARK.sub(r"\\text{\1\2}", text) if r"\text{" in text else text
        text = _OPERATOR.sub(r"\\text{\1}", text) if "=" in text else text
        text = _SCRIPT.sub(r"\1{\2}", text)
        text = _UPRIGHT.sub(lambda match: match[1] or " ", text) if r"\text{" in text else text
    if r"\equiv" in text:
        text = _MOD.sub(r"\\pmod{\1}", text)
    text = _ORDINAL.sub(r"\1", _LABEL.sub(r"\g<text>", text, 1))
    if r"\text{" in text:
        text = _NAMED.sub(r"\\text{\1}=", text).replace(r"\text{}", "")
    return _START_MARKS.sub("", _NEEDLESS_SPACE.sub("", text).strip())


def _typeset(text: str) -> str:
    """LaTeX for what programs and keyboards spell in another way: powers, roots, thousands, π."""
    if "'" in text or "_" in text:
        text = _GROUPS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = text.replace("**", "") if text.startswith("**") else _TYPED_POWER.sub(r"^{\1}", text)
    return _ROOT.sub(r"\\sqrt\1{\2\3}", _TYPED.sub(r"\\\1", text))


def with_braces(text: str) -> str:
    """Return an answer with commands by one name each, and braces around their arguments."""
    if "\\" in text:
        text = _SIZING.sub("", text)
        text = _MARKED_DIGITS.sub(r"\\overline{\1\2\3}", text) if "." in text else text
        text = _SAME_COMMAND.sub(lambda match: _SAME[match[2]], text)
        if r"\over" in text:
            text = _OVER.sub(r"{\\frac{\1}{\2}}", f"{{{text}}}")[1:-1]
        text = _BRACELESS.sub(_braced, _FRACTION.sub(r"\\\1", text))
    if "{" not in text:
        return text
    return _TEXT.sub(r"\\text{\1}", _BRACED_MARK.sub(r"\1", text))


def _plain_unicode(text: str) -> str:
    """ASCII characters and LaTeX; marks that show nothing are dropped."""
    if text.isascii():
        return text
    text = "".join(map(_shown, text)).translate(_SYMBOLS)
    return re.sub("[\1\2]", "", text.replace("}\1^{", "").replace("}\2_{", ""))


def _shown(char: str) -> str:
    """A character by those of which Unicode says that it is another form."""
    if char.isascii() or ord(char) in _SYMBOLS:
        return char
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if unicodedata.category(char) == "Cf":
        return ""
    form, *codes = unicodedata.decomposition(char).split() or [""]
    if not form.startswith("<"):
        return char
    shown = "".join(_shown(chr(int(code, 16))) for code in codes)
    return _SCRIPTS.get(form, "%s") % shown.replace("⁄", "}{")


def _unwrapped(text: str) -> str:
    """Without the marks of mathematics and boxes around all of it."""
    for _ in range(4):
        before = text
        for start, end in _MARKS:
            if not text.startswith(start):
                continue
            inner = text[len(start) : -len(end)]
            is_whole = len(text) > len(start) + len(end) and start not in inner and end not in inner
            if is_whole and text.endswith(end):
                text = inner.strip()
        boxed = re.fullmatch(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", text)
        text = boxed[1].strip() if boxed else text
        if text == before:
            break
    return _DOLLAR.sub("", text)


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    fixed = match["fixed"] or match["before"] or ""
    repeated = next(filter(None, match.group("marked", "bracketed", "digit", "digits")))
    scale = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    start = match["whole"] + fixed
    number = Fraction(int(start + repeated) - int(start or "0"), scale)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _command(function: re.Match[str]) -> str:
    """Its command, parted from a letter that follows."""
    name = function[1] or function[2]
    command = _SCHOOL_NAMES.get(name, name)
    return rf"\{command}" + " " * function.string[function.end() :][:1].isalpha()


def _braced(match: re.Match[str]) -> str:
    if match[4]:
        return rf"\{match[4]}{{{match[5]}}}"
    top, bottom = (part.strip("{}") for part in (match[2], match[3]))
    return rf"\{match[1]}{{{top}}}{{{bottom}}}"


def quantity(text: str) -> Quantity:
    r"""Split a canonical text into value, unit and other words.

    Only what follows a value is a unit, and a single letter only in ``\text{}``: ``3t`` is a
    product.
    """
    if (money := _CURRENCY.fullmatch(text)) is not None:
        inner = quantity(money["value"])
        currency = _CANONICAL[money["mark"]]
        if inner.unit in ("", currency):
            return Quantity(money["sign"] + inner.value, currency, inner.words)
    percent = _PERCENT.fullmatch(text)
    if percent is not None and not _SUM.search(percent["value"]):
        return Quantity(percent["value"], "%")
    degree = _DEGREE.fullmatch(text)
    if degree is not None and not OF_AN_ANGLE.search(degree["value"]):
        scales = {"C": "celsius", "F": "fahrenheit"}
        return Quantity(degree["value"], scales.get(degree["scale"], "degree"))
    match = _UNIT.fullmatch(text)
    return Quantity(text) if match is None else _with_unit(text, match)


def _with_unit(text: str, match: re.Match[str]) -> Quantity:
    is_text = match["plain"] is None
    words = match["plain"] or match["chinese"] or match["text"] or ""
    value = match["value"].strip()
    first, _, rest = words.strip().lower().partition(" ")  # "million dollars"
    if first in _SCALES and (number := as_number(value)) is not None:
        return quantity(rf"{number * _SCALES[first]}\text{{{rest}}}")
    unit_and_words = _unit_and_words(words, match["power"] or "", is_text=is_text)
    if unit_and_words is None:
        return Quantity(text)
    unit, others = unit_and_words
    if not is_text and len(first) < _MIN_WORD and (not unit or words in ("am", "pm")):
        is_attached = ":" not in value and not text[: match.start("plain")].endswith(" ")
        if is_attached or set(first) <= _LETTERS:
            return Quantity(text)
    if unit:
        return Quantity(value, unit, others)
    inner = quantity(value)  # "30 degrees west"
    return Quantity(inner.value, inner.unit, f"{inner.words} {others}".strip())


def _unit_and_words(words: str, power: str, *, is_text: bool) -> tuple[str, str] | None:
    r"""The canonical unit that the words behind a number name, and the words that name none.

    ``power`` is ``^2``, ``^{3}`` or nothing; ``is_text``: the words stood in ``\text{}``. None for
    what cannot stand behind a number without a change of its meaning.
    """
    plain = _DOTTED.sub(lambda name: re.sub(r"[. ]", "", name[0]), words.strip().lower())
    plain = plain.replace("'", "")
    parts = re.findall(r"平方|立方|[^\s.]+?(?=平方|立方|[\s.]|$)", plain)
    if not parts:
        return ("", "") if is_text and not power else None
    exponent = power.replace("{", "").replace("}", "")
    if len(parts) > 1 and parts[0] in _POWER_WORDS:
        exponent, parts = _POWER_WORDS[parts[0]], parts[1:]
    elif len(parts) > 1 and parts[-1] == "squared":
        exponent, parts = "^2", parts[:-1]
    is_short = any(len(part) < _MIN_LETTERS and part.isascii() for part in parts)
    if is_short and not is_text:
        return None
    named = _named("/".join(part for part in parts if part != "per"), is_rate="per" in parts)
    if named is not None:
        return named + exponent, ""
    if exponent or is_short or _NO_CHINESE_UNIT.search(words):
        return None
    if not all(part.isalpha() and part not in _NO_UNITS for part in parts):
        return None
    unit = _named(parts[0], is_rate=False) or ""
    others = parts[1:] if unit else parts
    return unit, " ".join(_word(other) for other in others if other not in _FILLERS)


def _word(word: str) -> str:
    """A word without the end of its plural, in one of its spellings."""
    word = _SAME_WORDS.get(word, word)
    stem = word if word.endswith("ss") else word.removesuffix("s")
    return re.sub("y$", "i", stem.removesuffix("e"))


def _named(text: str, *, is_rate: bool) -> str | None:
    if text in _CANONICAL:
        return _CANONICAL[text]
    parts = text.split("/")
    if len(parts) == 1:
        return _CANONICAL.get(text.removesuffix("s")) or _CANONICAL.get(text.removesuffix("es"))
    if len(parts) != 2 or not is_rate:
        return None
    top, bottom = (_named(part, is_rate=False) for part in parts)
    return f"{top}/{bottom}" if top and bottom else None


def are_same_units(one: str, other: str) -> bool:
    """Whether two units agree, of which one may be missing, or ``unit`` without its name."""
    (name, _, power), (other_name, _, other_power) = one.partition("^"), other.partition("^")
    is_any = "unit" in (name, other_name) and "%" not in (name, other_name)
    return one == other or not (one and other) or (is_any and power == other_power)


def as_number(text: str) -> Fraction | None:
    """Return the exact value of a plain number, fraction or mixed number; else None."""
    if len(text) > _MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(text) is not None:
        return Fraction(text.replace(",", "").replace(" ", ""))
    if (match := _RATIO.fullmatch(text)) is None:
        return None
    top, bottom = (int(match[name] or match[f"latex_{name}"]) for name in ("top", "bottom"))
    if bottom == 0 or (match["whole"] and not 0 <= top < bottom):
        return None  # with a whole number, rather a product
    number = int(match["whole"] or 0) + Fraction(top, bottom)
    return -number if match["sign"] else number


def are_same_choices(one: str, other: str) -> bool:
    """Whether two texts name the same several options, at least one of them in a list: A, C."""
    if not one.endswith(_CHOICE_ENDS) or not other.endswith(_CHOICE_ENDS):
        return False
    plain = [_TEXT.sub(r" \1 ", text) for text in (one, other)]
    if not all(map(_CHOICES.fullmatch, plain)):
        return False
    letters = [sorted(re.findall("[A-J]", text)) for text in plain]
    return letters[0] == letters[1] and not all(text.isalpha() for text in plain)


def choice(text: str) -> tuple[str, str]:
    r"""Split ``\text{(B)} 12`` into letter and text, of which one may be empty."""
    if (match := _CHOICE.fullmatch(text)) is not None:
        return next(filter(None, match.groups())).upper(), ""
    if (match := _OPTION.fullmatch(text)) is None:
        return "", text
    return next(filter(None, match.groups())), match["rest"].strip()


def flips(text: str) -> set[str]:
    """The words that turn what stands beside them into its contrary."""
    return {word.lower() for word in _FLIP.findall(text)} | set(_CONDITION.findall(text))


@lru_cache(maxsize=256)
def words(text: str) -> str | None:
    """Return a text of words alone in one spelling, without case and marks; else None."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    if _WORDS.fullmatch(plain) is None:
        return None
    return " ".join(re.findall(r"[^\W\d_]+", plain.casefold()))
