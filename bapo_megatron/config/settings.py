"""A configuration as a flat table of settings, and what of it may leave the machine.

Pages and trackers get ``public_setting``: a path is reduced to its last name, and what may hold a
secret is left out.
"""

import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from bapo_megatron.config.describe import describe_keys
from bapo_megatron.config.load import ConfigError, load_config, read_mapping
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.types import FinishReason

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORD = re.compile(
    r"(.*(password|secret|credential|apikey|token)|key|passphrase|auth|authorization)s?"
    r"|pwd|pass|passwd|bearer|private"
)
_SECRET_TEXT = re.compile(
    r"[^\s/@:]+:[^\s/@]+@[\w.-]"  # user:password@host
    r"|\bbearer\s+\S"
    r"|(?<![a-z])(token|key|password|passwd|pwd|secret|authorization)s?"
    r"(=|[\"']?\s*:\s|[\"']\s*:)(?!\s*[\d.]+(\s|$))",
    re.I,
)
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)([^\s/?#]*@)?"  # user and password
    r"(?P<host>([\w.-]+|\[[0-9a-f:.]+\])(:\d+)?)([/?#][^\s@]*)?",
    re.I,
)
_PATH_KEY = re.compile(r"(path|dir|directory|folder|file|dumps|template)(\.\d+)?$")
_PATH_START = re.compile(r"\.{0,2}/|~/")
_WINDOWS_START = re.compile(r"[a-z]:[\\/]|\\\\|[.~]{1,2}\\", re.I)
_FREE = tuple(f"{key.name}." for key in describe_keys() if key.type == "mapping")
"""Beginnings of keys that the user chooses."""

_MASKED_BY = {
    FinishReason.LENGTH: "reward.truncated",
    FinishReason.ENVIRONMENT: "rollout.episodes.on_error",
}
"""Settings that, as ``mask``, keep responses that ended so out of the loss."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a run's ``config.yaml`` by dotted key, also that of another version of the project.

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
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        children = list(enumerate(value))
    if not children:
        return [(key, value)]
    start = f"{key}." if key else ""
    return [pair for name, child in children for pair in _flattened(child, f"{start}{name}")]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys by which two configurations differ, in their order.

    They may be of two versions of the project: a key of which only one knows makes no difference.
    What only one has for another reason does: entries of a list or of a mapping without a schema,
    and a section that is null in the other.
    """
    unequal = {key for key in one.keys() & other.keys() if one[key] != other[key]}
    if one.keys() != other.keys():
        unequal |= _chosen_alone(one, other) | _chosen_alone(other, one)
    return [key for key in {**one, **other} if key in unequal]


def _chosen_alone(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """The keys that only ``one`` has, and not for its version."""
    nodes, found = {node for key in other for node in _nodes(key)}, set()
    for key in one.keys() - nodes:
        missing = next(node for node in _nodes(key) if node not in nodes)
        above, _, name = missing.rpartition(".")
        if name.isdigit() or key.startswith(_FREE) or above in other:
            found.add(key)
    return found


def _nodes(key: str) -> list[str]:
    """The sections that a key is in, from the outermost on, and itself."""
    return list(accumulate(key.split("."), "{}.{}".format))


def masked_reasons(settings: Mapping[str, Any]) -> frozenset[FinishReason]:
    """Return the reasons whose responses stay out of the loss."""
    return frozenset(reason for reason, key in _MASKED_BY.items() if settings.get(key) == "mask")


def public_settings(config: RunConfig) -> dict[str, bool | int | float | str]:
    """Return all settings by dotted key: numbers as they are, others as ``public_setting``.

    Trackers compare runs by them, so every key is there, also one with its default.
    """
    return {
        key: value
        if isinstance(value, int | float) and not _is_secret(key, value)
        else public_setting(key, value)
        for key, value in flat_settings(config).items()
    }


def public_setting(key: str, value: Any) -> str:
    """Return a value of the configuration as others may see it.

    Paths keep their last name, addresses scheme, host and port; options of servers lose their
    values. What is named like a secret is not shown, nor is a text that holds an address or what
    looks like a secret.
    """
    if isinstance(value, list):
        if "extra_args" in key:
            value = [re.split(r"[=\s]", str(each))[0] for each in value]
            value = [each for each in value if each.startswith("-")]
        return ", ".join(public_setting(key, each) for each in value) or "none"
    if value is None or value == "":
        return "none"
    if _is_secret(key, value):
        return "not shown"
    text = str(value)
    if "://" in text:
        address = _ADDRESS.fullmatch(text)
        return "".join(address.group("scheme", "host")) if address else "not shown"
    if _SECRET_TEXT.search(text):
        return "not shown"
    is_windows = bool(_WINDOWS_START.match(text))
    is_path = is_windows or _PATH_KEY.search(key) or _PATH_START.match(text)
    if isinstance(value, str) and (is_path or ("/" in text and " " not in text)):
        separators = "/\\" if is_windows else "/"
        return re.split(f"[{re.escape(separators)}]", text.rstrip(separators))[-1]
    return text


def _is_secret(key: str, value: Any) -> bool:
    """Whether a key, or a section that it is in, is named like a secret.

    Numbers of tokens are none, nor are names of variables of the environment.
    """
    if key.endswith("_variable"):
        return False
    words = {word.lower() for word in _WORD.findall(key)}
    if isinstance(value, int | float):
        words = {word for word in words if word not in ("token", "tokens")}
    return any(map(_SECRET_WORD.fullmatch, words))
