"""The base of every section of the configuration, and what several sections share."""

import ipaddress
import re

from pydantic import AfterValidator, BaseModel, ConfigDict

SET_TAG, LIST_TAG = "<set>", "<list>"
"""What validation puts between the keys of a value that is one section or a list of them."""

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_NAMED_OBJECT = re.compile(f"{_DOTTED}:{_DOTTED}")


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def built_in_or_own(built_in: tuple[str, ...], kind: str, remedy: str = "") -> AfterValidator:
    """Accept the names ``built_in``, and ``package.module:object`` of a ``kind`` for messages."""

    def check(name: str | None) -> str | None:
        if name is None or name in built_in or _NAMED_OBJECT.fullmatch(name):
            return name
        wanted = f"{', '.join(built_in)} or package.module:{kind}"
        raise ValueError(f"must be {wanted}, got '{name}'{remedy}")

    return AfterValidator(check)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine's loopback, by address or by name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
