"""A configuration as a flat table of settings, and which of them may leave the machine.

Pages and trackers get ``public_setting``: paths are reduced to their last names, and texts under
keys that are not the schema's are left out, since they may be secrets.
"""

import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from bapo_megatron.config.describe import describe_keys
from bapo_megatron.config.load import ConfigError, load_config, read_mapping
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.types import FinishReason

_ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)([^\s/?#]*@)?"  # user and password
    r"(?P<host>([\w.-]+|\[[0-9a-f:.]+\])(:\d+)?)([/?#][^\s@]*)?",
    re.I,
)
_SECRET = re.compile(r"pass|pwd|secret|key|token|auth|credential|bearer|private", re.I)
_HIDDEN = "not shown"
_KEYS = {key.name.replace("[]", ""): key.type for key in describe_keys()}
"""Types of all keys of the schema."""
_ABSENT = object()

_MASKED_BY = {
    FinishReason.LENGTH: "reward.truncated",
    FinishReason.ENVIRONMENT: "rollout.episodes.on_error",
}
"""Setting whose value ``mask`` keeps responses with a finish reason out of the loss."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a run's ``config.yaml``, possibly of another version of the project, by dotted key.

    Keys that are newer than the file have their defaults. A file that this version cannot use is
    returned as it is.

    Raises:
        ConfigError: It cannot be read, or is not a YAML mapping.
    """
    try:
        return flat_settings(load_config(path))
    except ConfigError:
        return flat_settings(read_mapping(path))  # of another version


def flat_settings(config: RunConfig | dict[str, Any]) -> dict[str, Any]:
    """Return the values of nested sections, and of lists of sections, by dotted key."""
    if isinstance(config, RunConfig):
        config = config.model_dump(mode="json")
    return dict(_flattened(config, "")) if config else {}


def _flattened(value: Any, key: str) -> list[tuple[str, Any]]:
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        children = list(enumerate(value))
    if not children:
        return [(key, value)]
    start = f"{key}." if key else ""
    return [pair for name, child in children for pair in _flattened(child, f"{start}{name}")]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two configurations differ, in their order.

    A section, list or mapping that only one of them has is named by the keys in it.
    """
    values = {key: [flat.get(key, _ABSENT) for flat in (one, other)] for key in {**one, **other}}
    unequal = [key for key, (first, second) in values.items() if first != second]
    return [key for key in unequal if not any(k.startswith(f"{key}.") for k in unequal)]


def masked_reasons(settings: Mapping[str, Any]) -> frozenset[FinishReason]:
    """Return the finish reasons whose responses are masked out of the loss."""
    return frozenset(reason for reason, key in _MASKED_BY.items() if settings.get(key) == "mask")


def public_settings(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return all settings by dotted key: numbers as they are, others as ``public_setting``.

    Trackers compare runs by them, so every key is there, also one with its default.
    """
    pairs = {
        key: (value, public_setting(key, value)) for key, value in flat_settings(config).items()
    }
    return {
        key: value if isinstance(value, int | float) and text != _HIDDEN else text
        for key, (value, text) in pairs.items()
    }


def public_setting(key: str, value: Any) -> str:
    """Return a value of the configuration as others may see it.

    Paths keep their last name, addresses scheme, host and port. Options of servers lose their
    values, and an agent's command ends before its first ``--option``. Under keys that are not the
    schema's only numbers are shown, and none whose key is named like a secret.
    """
    if key == "rollout.agent" and value:  # a command, whose options may hold secrets
        words = value if isinstance(value, list) else value.split()
        words = takewhile(lambda word: not word.startswith("--"), words)
        value = " ".join(word.rpartition("/")[2] for word in words)
    if isinstance(value, list):
        if key.endswith("extra_args"):
            options = [re.split(r"[=\s]", str(option))[0] for option in value]
            value = [option for option in options if option.startswith("-")]
        return ", ".join(public_setting(key, entry) for entry in value) or "none"
    if value is None or value == "":
        return "none"
    kind, text = _KEYS.get(re.sub(r"\.\d+", "", key)), str(value)
    if kind is None and (not isinstance(value, int | float) or _SECRET.search(key)):
        return _HIDDEN
    if "://" in text:
        address = _ADDRESS.fullmatch(text)
        return "".join(address.group("scheme", "host")) if address else _HIDDEN
    if isinstance(value, str) and ("path" in str(kind) or ("/" in text and " " not in text)):
        return text.rstrip("/").rpartition("/")[2]
    return text
