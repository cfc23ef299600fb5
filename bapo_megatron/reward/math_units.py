"""Units that may follow a number: which are the same, and which are not.

Units are compared, never converted. A word that is no known unit ("apples") is no unit that could
differ; words that belong to mathematics or to a sentence are refused, so that "5 or 6" is not 5.
"""

from __future__ import annotations

import re

_SPELLINGS = {
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "cm": "cm centimeter centimetre",
    "mm": "mm millimeter millimetre",
    "inch": "in inch inche",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "g": "g gram gm",
    "kg": "kg kilogram",
    "mg": "mg milligram",
    "pound": "lb pound £",
    "ounce": "oz ounce",
    "ton": "ton tonne",
    "s": "s sec second",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "liter": "l liter litre",
    "ml": "ml milliliter millilitre",
    "gallon": "gal gallon",
    "dollar": r"\$ dollar usd buck",
    "cent": "cent ¢",
    "euro": "€ euro eur",
    "yen": "¥ yen",
    "rupee": "₹ rupee rs",
    "degree": "degree deg",
    "radian": "rad radian",
    "km/hour": "km/h kmh kph kmph",
    "mile/hour": "mph mi/h",
    "m/s": "m/s",
    "joule": "j joule",
    "newton": "n newton",
    "watt": "w watt",
    "volt": "v volt",
    "%": "% percent percentage pct",
}
_CANONICAL = {
    spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_NO_UNIT_WORDS = """
    a all alpha an and approximately arccos arcsin arctan are as at base beta but choose cos
    cot csc cubed delta det divided dozen e equals exp factorial factor false fifth fifths for
    from fourth fourths gamma gcd greater half halves hundred i if inf infinity infty is lcm
    least less ln log max maybe minus mod modulo more most no none nor not of oo or over phi
    pi plus quarter quarters sin sqrt squared sum tan tau than then theta thirds third
    thousand million billion trillion through times to true twice union unless until up where
    which with yes
    """
_NO_UNITS = frozenset(_NO_UNIT_WORDS.split())
_POWER_WORDS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3"}
_FEWEST_LETTERS = 2
"""Of a word outside ``\\text{}``: a single letter is a variable."""


def known_unit(words: str, power: str = "", *, is_text: bool = True) -> str | None:
    r"""The canonical unit that words name.

    Args:
        words: What follows a number.
        power: ``^2``, ``^{3}`` or nothing.
        is_text: Whether the words stood in ``\text{}``.

    Returns:
        The unit; empty for words that name none, such as "apples"; none for what is no unit.
    """
    parts = re.findall(r"[^\s.]+", words.strip().lower())
    if not parts:
        return "" if is_text and not power else None
    exponent = power.replace("{", "").replace("}", "")
    if len(parts) > 1 and parts[0] in _POWER_WORDS:
        exponent, parts = _POWER_WORDS[parts[0]], parts[1:]
    elif len(parts) > 1 and parts[-1] == "squared":
        exponent, parts = "^2", parts[:-1]
    if not is_text and any(len(part) < _FEWEST_LETTERS for part in parts):
        return None
    named = _named("/".join(part for part in parts if part != "per"), is_rate="per" in parts)
    if named is not None:
        return named + exponent
    if power or any(part in _NO_UNITS or len(part) < _FEWEST_LETTERS for part in parts):
        return None
    if exponent or not all(part.isalpha() for part in parts):
        return "" if parts in (["unit"], ["units"]) else None
    first = _named(parts[0], is_rate=False)
    return first if first is not None else ""


def _named(text: str, *, is_rate: bool) -> str | None:
    if text in _CANONICAL:
        return _CANONICAL[text]
    parts = text.split("/")
    if len(parts) == 1:
        return _CANONICAL.get(text.removesuffix("s")) or _CANONICAL.get(text.removesuffix("es"))
    if len(parts) != 2 or not is_rate:
        return None
    top, bottom = (_named(part, is_rate=False) for part in parts)
    return f"{top}/{bottom}" if top and bottom and is_rate else None


def scale_of(words: str) -> tuple[int, str] | None:
    """The factor of "million dollars" and the words after it; none where there is no factor."""
    first, _, rest = words.strip().lower().partition(" ")
    return (_SCALES[first], rest.strip()) if first in _SCALES else None
