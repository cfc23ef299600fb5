"""The spelling of answers: one form for what typesetting, units and Unicode allow to vary.

Nothing here evaluates anything. Whatever is rewritten keeps its value; where that is not sure, the
text is left as it is, and the comparison decides.

Units are compared, never converted. A word that is no known unit ("apples") is no unit that could
differ; words that belong to mathematics or to a sentence are refused, so that "5 or 6" is not 5.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_COMMANDS = {
    "×": "times", "±": "pm", "π": "pi", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "∪": "cup",
    "∩": "cap", "∅": "emptyset", "∈": "in", "√": "sqrt", "≈": "approx", "≡": "equiv", "·": "cdot",
    "⋅": "cdot",
}  # fmt: skip
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000", " "),
        **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("°º", r"^\circ "),
        **{sign: rf"\{command} " for sign, command in _COMMANDS.items()},
        **{
            sign: rf"\frac{{{top}}}{{{bottom}}}"
            for sign, top, bottom in ("½12", "⅓13", "⅔23", "¼14", "¾34")
        },
        **{"、": ",", "。": ".", "￥": "¥"},
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"\\sqrt\s+(\d+|[A-Za-z])")
_LATEX_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~")
_NEGATIVE_SPACE = re.compile(r"\s*(?<!\\)\\!\s*")
_DOLLAR = re.compile(r"(?<!\\)\$")
_SIZING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|bf|rm|it|bm|boldsymbol|underline)(?![A-Za-z])"
)
_FRACTION = re.compile(r"\\[dtc](frac|binom)(?![A-Za-z])")
_ARGUMENT = r"(\d|[A-Za-z]|\\(?:pi|alpha|beta|theta)(?![A-Za-z])|\{[^{}]*\})"
_BRACELESS = re.compile(
    rf"\\(frac|binom)\s*{_ARGUMENT}\s*{_ARGUMENT}"
    r"|\\(overline|math(?:bb|bf)|sqrt\[\w+\])\s*(\d+|[A-Za-z])"
)
"""TeX takes one digit or letter where there are no braces: ``\\frac13`` is 1/3."""
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|hbox"
    r"|operatorname)\s*\{([^{}]*)\}"
)
_FUNCTIONS = {
    name: rf"\{command}"
    for command, names in {
        "sin": "sin", "cos": "cos", "tan": "tan tg", "cot": "cot ctg cotg", "sec": "sec",
        "csc": "csc cosec", "arcsin": "arcsin", "arccos": "arccos", "arctan": "arctan arctg",
        "arccot": "arccot arcctg", "sinh": "sinh sh", "cosh": "cosh ch", "tanh": "tanh th",
        "ln": "ln", "log": "log", "exp": "exp", "log_{10}": "lg",
    }.items()
    for name in names.split()
}  # fmt: skip
_NAMES = "|".join(_FUNCTIONS)
_FUNCTION = re.compile(rf"\\text\{{\s*({_NAMES})\s*\}}(?=\s*[\w\\({{|^])|\\({_NAMES})(?![A-Za-z])")
"""A function in upright text, which has an argument, or as a command, also of Russian schools."""
_UPRIGHT = re.compile(r"(?<=[A-Za-z])(?=\\text\{[ei]\})|\\text\{([ei])\}")
_END_MARKS = re.compile(r"(?:[\s,;:]|\\[,;:! \\]|\\text\{[.,;]\})+$")
_REMARK = re.compile(
    r"(?<=[\w})])\s*(?:\\text\{\s*\(([^(){}]{2,})\)\s*\}|\(\\text\{([^(){}]+)\}\))$"
)
"""What stands in brackets behind a value: ``6\\text{ (ways)}``, ``5 (\\text{cm})``."""
_MOD = re.compile(r"\(?\s*\\(?:[pb]?mod|text\{\s*mod\s*\})\s*\{?(\w+)\}?\s*\)?")
_NAMED_CHOICE = re.compile(
    r"(?:\\text\{\s*)?(?:(?:option|choice|answer)s?\b|选项?|答案)[\s:]*\}?(?=\W*[A-Ja-j](?!\w))",
    re.IGNORECASE,
)
_NEEDLESS_SPACE = re.compile(r"(?<![\w,\\]) | (?![\w\\])|(?<=,) (?!\d)|(?<=\w) (?=\\)")
_BRACED_COMMA = re.compile(r"\s*(?:\\text)?\{\s*,\s*\}\s*")
_MATH_MARKS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_UNIT = re.compile(
    r"(?!0[xXbBoO][\dA-Fa-f]+$)(?P<value>.*[\d\w})\]!|])\s*"
    r"(?:\\text\{(?P<text>[^{}]*)\}|(?<![一-鿿])(?P<chinese>[一-鿿][一-鿿/]*)"
    r"|(?<![A-Za-z])(?<![A-Za-z]{2} )(?<!\\)(?P<plain>[A-Za-z][A-Za-z/. ]*))"
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
_OPTION = re.compile(
    r"(?:\\text\{\s*\(([A-J])\)\s*\}|\(([A-J])\)(?=\s|\\text\{)|([A-J])[.:)](?![A-Z]\b))[\s:]*"
    r"(?!.*(?<![\w(])(?:\([A-J]\)|[A-J][.:)])|(?:\\text\{)?\W*(?:(?:and|or|nor|but|if|unless|maybe|perhaps)\b"
    r"|(?:is|was)(?:\b(?! correct| right)|n't)|(?:not|wrong|incorrect)\W*$))(?=\S)(?P<rest>.+)"
)
"""An option and its text, which neither names another option nor takes this one back."""
_WORDS = re.compile(r"[^\W\d_]+(?:[ '.,-]+[^\W\d_]+)*[.!]?")
_NUMBER = re.compile(
    r"(?=[+-]?\.?\d)[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d*)?"
    r"(?:[eE][+-]?\d{1,3})?"
)
_REPEATING = re.compile(
    r"(?P<sign>-?)(?P<whole>\d*)\.(?P<fixed>\d*)\\overline\{(?P<repeated>\d+)\}(?:\.\.\.|\\ldots)?"
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
    degree deg 度; radian rad; km/hour km/h kmh kph kmph 千米/时 千米/小时; mile/hour mph mi/h;
    m/s 米/秒; joule j; newton n; watt w; volt v; % percent percentage pct
    """
"""Units with their spellings, the canonical one first."""
_MEASURES = (
    "个人名位只条本张支枝块棵辆件种次组倍页题间箱袋瓶杯盒台套把根颗粒朵头匹座层"
    "排行列步场局轮圈班份岁分项类点"
)
"""Chinese words behind a number that are no units: 5个."""
_CANONICAL: dict[str, str] = {
    spelling: spellings.split()[0]
    for spellings in _SPELLINGS.split(";")
    for spelling in spellings.split()
} | dict.fromkeys([*_MEASURES, "个人"], "")
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


def canonical(answer: str) -> str:
    r"""Return one spelling of an answer; ``\text{…}`` stands for all commands of upright text."""
    text = _END_MARKS.sub("", _unwrapped(_plain_unicode(answer).strip()))
    text = text.removesuffix(".").strip() if not text.endswith("..") else text
    text = _BRACELESS.sub(_braced, _FRACTION.sub(r"\\\1", _SIZING.sub("", text)))
    text = text.replace(r"\varnothing", r"\emptyset").replace(r"\colon", ":")
    text = _TEXT.sub(r"\\text{\1}", _BRACED_COMMA.sub(",", text))
    text = _NEGATIVE_SPACE.sub("", text)
    text = " ".join(_LATEX_SPACE.sub(" ", text).replace(r"\%", "%").split())
    if (whole := _TEXT.fullmatch(text)) is not None and not _CHOICE.fullmatch(text):
        text = _END_MARKS.sub("", whole[1]).strip()
    elif whole is None and "\\" in text:
        text = _REMARK.sub(r"\\text{\1\2}", _FUNCTION.sub(_command, text))
        text = _UPRIGHT.sub(lambda match: match[1] or " ", text)
    if r"\equiv" in text:
        text = _MOD.sub(r"\\pmod{\1}", text)
    text = _NAMED_CHOICE.sub("", text, 1) if _NAMED_CHOICE.match(text) else text
    text = _NEEDLESS_SPACE.sub("", text).strip()
    return text.removeprefix("=").removeprefix(r"\approx").strip()


def _plain_unicode(text: str) -> str:
    """ASCII digits, full-width forms and signs as LaTeX; marks that show nothing are dropped."""
    if text.isascii():
        return text
    shown = "".join(
        str(unicodedata.decimal(char)) if char.isdecimal() else char
        for char in text.translate(_FULL_WIDTH)
        if unicodedata.category(char) != "Cf"
    )
    shown = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", shown)
    return _ROOT.sub(r"\\sqrt{\1}", shown.translate(_SYMBOLS))


def _unwrapped(text: str) -> str:
    """Without the marks of mathematics and boxes around all of it."""
    for _ in range(4):
        before = text
        for start, end in _MATH_MARKS:
            inner = text[len(start) : -len(end)]
            is_whole = len(text) > len(start) + len(end) and start not in inner and end not in inner
            if is_whole and text.startswith(start) and text.endswith(end):
                text = inner.strip()
        boxed = re.fullmatch(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", text)
        text = boxed[1].strip() if boxed else text
        if text == before:
            break
    return _DOLLAR.sub("", text)


def _command(function: re.Match[str]) -> str:
    """Its command, parted from a letter that follows."""
    command = _FUNCTIONS[function[1] or function[2]]
    return command + " " * function.string[function.end() :][:1].isalpha()


def _braced(match: re.Match[str]) -> str:
    if match[4]:
        return rf"\{match[4]}{{{match[5]}}}"
    top, bottom = (part.strip("{}") for part in (match[2], match[3]))
    return rf"\{match[1]}{{{top}}}{{{bottom}}}"


def quantity(text: str) -> Quantity:
    r"""Split a canonical text into value and unit; words that are no known unit are dropped.

    Only what follows a value is a unit, and a single letter only in ``\text{}``: ``3t`` is a
    product.
    """
    if (money := _CURRENCY.fullmatch(text)) is not None:
        inner = quantity(money["value"])
        currency = _known_unit(money["mark"])
        if inner.unit in ("", currency):
            return Quantity(money["sign"] + inner.value, currency or "")
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
    unit = _known_unit(words, match["power"] or "", is_text=is_text)
    if unit == "" and not is_text and len(first) < _MIN_WORD:
        is_attached = not text[: match.start("plain")].endswith(" ")
        if is_attached or set(first) <= _LETTERS:
            return Quantity(text)
    return Quantity(text) if unit is None else Quantity(value, unit)


def _known_unit(words: str, power: str = "", *, is_text: bool = True) -> str | None:
    r"""The canonical unit that the words behind a number name.

    ``power`` is ``^2``, ``^{3}`` or nothing; ``is_text``: the words stood in ``\text{}``. Words
    that name no unit, such as "apples", give an empty text; what cannot be a unit gives None.
    """
    parts = re.findall(r"平方|立方|[^\s.]+?(?=平方|立方|[\s.]|$)", words.strip().lower())
    if not parts:
        return "" if is_text and not power else None
    exponent = power.replace("{", "").replace("}", "")
    if len(parts) > 1 and parts[0] in _POWER_WORDS:
        exponent, parts = _POWER_WORDS[parts[0]], parts[1:]
    elif len(parts) > 1 and parts[-1] == "squared":
        exponent, parts = "^2", parts[:-1]
    if not is_text and any(len(part) < _MIN_LETTERS for part in parts):
        return None
    named = _named("/".join(part for part in parts if part != "per"), is_rate="per" in parts)
    if named is not None:
        return named + exponent
    if power or any(part in _NO_UNITS or len(part) < _MIN_LETTERS for part in parts):
        return None
    if _NO_CHINESE_UNIT.search(words):
        return None
    if exponent or not all(part.isalpha() for part in parts):
        return "" if parts in (["unit"], ["units"]) else None
    return _named(parts[0], is_rate=False) or ""


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


def as_number(text: str) -> Fraction | None:
    """Return the exact value of a plain number, fraction or mixed number; else None."""
    if len(text) > _MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(text) is not None:
        return Fraction(text.replace(",", "").replace(" ", ""))
    if (match := _REPEATING.fullmatch(text)) is not None:
        return _repeating_number(match)
    if (match := _RATIO.fullmatch(text)) is None:
        return None
    top, bottom = (int(match[name] or match[f"latex_{name}"]) for name in ("top", "bottom"))
    if bottom == 0 or (match["whole"] and not 0 <= top < bottom):
        return None  # with a whole number, rather a product
    number = int(match["whole"] or 0) + Fraction(top, bottom)
    return -number if match["sign"] else number


def _repeating_number(match: re.Match[str]) -> Fraction:
    start, repeated = match["whole"] + match["fixed"], match["repeated"]
    scale = 10 ** len(match["fixed"]) * (10 ** len(repeated) - 1)
    number = Fraction(int(start + repeated) - int(start or "0"), scale)
    return -number if match["sign"] else number


def choice_letter(text: str) -> str | None:
    r"""Return the letter of a multiple-choice answer such as ``B``, ``(b)``, ``\text{B}``."""
    match = _CHOICE.fullmatch(text)
    return None if match is None else next(filter(None, match.groups())).upper()


def are_same_choices(one: str, other: str) -> bool:
    """Whether two texts name the same several options, at least one of them in a list: A, C."""
    plain = [_TEXT.sub(r" \1 ", text) for text in (one, other)]
    if not all(map(_CHOICES.fullmatch, plain)):
        return False
    letters = [sorted(re.findall("[A-J]", text)) for text in plain]
    return letters[0] == letters[1] and not all(text.isalpha() for text in plain)


def option(text: str) -> tuple[str | None, str]:
    r"""Split ``\text{(B)} 12`` into letter and text; None and the whole text without a letter."""
    if (match := _OPTION.fullmatch(text)) is None:
        return None, text
    return next(filter(None, match.groups())), match["rest"].strip()


def words(text: str) -> str | None:
    """Return a text of words alone in one spelling, without case and marks; else None."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    if _WORDS.fullmatch(plain) is None:
        return None
    return " ".join(re.findall(r"[^\W\d_]+", plain.casefold()))
