"""Reading a run's configuration: YAML files, inheritance, dotted overrides, validation.

A file may name the file it builds on, relative to its own directory: ``inherit: base.yaml``. Files
are merged from the base up, then overrides in their order; lists are replaced as a whole, as are
sections by lists and lists by sections. ``${key}`` and ``${oc.env:NAME}`` are resolved by
OmegaConf. Paths inside a configuration are relative to the current working directory.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from bapo_megatron.config.describe import Place, explain, find_key
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import Section
from bapo_megatron.runtime.files import read_regular

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(?P<value>.*)", re.DOTALL)
_QUOTED = re.compile(r"""\s*["']""")
"""The start of a text in quotes, whose escapes YAML reads."""
_MAX_FILES = 20
"""Files of one chain of ``inherit``."""
_MAX_SHOWN = 120
"""Characters of an override or of an error in a message."""


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate the configuration of a run; every default is filled in.

    An override is ``dotted.key=value``. Texts and paths are taken literally, unless quoted or
    ``null`` for a key that may be null; other values are YAML (``rollout.servers=[http://a:1]``).

    Raises:
        ConfigError: A file is missing or not YAML, a key is unknown or missing, or a value breaks
            a rule; one line that names the file or override, the key and the value.
    """
    layers = [*_read_files(path, []), *map(_parse_override, overrides)]
    merged: Any = {}
    for _, settings in layers:
        merged = _merged(merged, settings)
    try:
        resolved = OmegaConf.to_container(
            OmegaConf.create(merged), resolve=True, throw_on_missing=True
        )
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: {_problem(error)}; correct this key") from error

    def place_of(location: Sequence[int | str]) -> str:
        places = (place for place, settings in reversed(layers) if _holds(settings, location))
        return next(places, str(path))

    return parse_section(RunConfig, resolved, place_of)


def parse_section[SectionT: Section](
    section: type[SectionT], values: Any, place: Place
) -> SectionT:
    """Validate one section from its keys; missing ones have their defaults.

    Raises:
        ConfigError: As by ``load_config``.
    """
    try:
        # Strict JSON: a list may be a tuple and a string a path, but not "100" an integer or true
        # a 1.
        return section.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, section, place)) from error
    except TypeError as error:  # YAML's !!binary
        where = place if isinstance(place, str) else place(())
        raise ConfigError(f"{where}: {error}; write a text") from error


def dump_yaml(config: RunConfig) -> str:
    """The configuration with every default as YAML; ``load_config`` reads it back equal."""
    values = literal(config.model_dump(mode="json"))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def literal(value: Any) -> Any:
    """Return a JSON value with "${" in its texts escaped, so that a file holds no reference."""
    # OmegaConf's escape is a backslash, and two are one before "${"; JSON writes each twice.
    return json.loads(re.sub(r"(\\*)\$\{", r"\1\1\\\\${", json.dumps(value)))


def _read_files(path: Path, inheriting: Sequence[Path]) -> list[tuple[str, dict[str, Any]]]:
    """A file and those it inherits from, base first, with their mappings."""
    chain = [*inheriting, path]
    if len(chain) > _MAX_FILES:
        raise ConfigError(
            f"{chain[0]}: 'inherit' leads through more than {_MAX_FILES} files: "
            f"{' -> '.join(map(str, chain[:4]))} -> …; remove the cycle"
        )
    settings = read_mapping(path, f"{inheriting[-1]}: inherit: " if inheriting else "")
    base = settings.pop("inherit", None)
    if base is None:
        return [(str(path), settings)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: 'inherit' must be one file name, got {base!r}; name one file")
    return [*_read_files(path.parent / Path(base).expanduser(), chain), (str(path), settings)]


def read_mapping(path: Path, asked_by: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML file; references stay as they are.

    Raises:
        ConfigError: It is missing (``asked_by`` begins the message), or not a YAML mapping.
    """
    try:
        text = read_regular(path).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{asked_by}{path}: no such file; check the path") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_problem(error)}; give a readable YAML file") from error
    settings = _parse(path, "correct this line", lambda: OmegaConf.load(io.StringIO(text)))
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must be a mapping of keys, got a list; write 'key: value'")
    return settings


def _parse_override(override: str) -> tuple[str, dict[str, Any]]:
    place = f"override '{override[:_MAX_SHOWN]}'"
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError(
            f"{place}: must be dotted.key=value, such as rollout.temperature=0.6; correct it"
        )
    text, is_quoted = match["value"], _QUOTED.match(match["value"]) is not None
    key_info = find_key(match["key"], RunConfig)
    kind, null, _ = key_info.type.partition(" | null") if key_info else ("", "", "")
    settings: Any = text
    if kind not in ("text", "path") or is_quoted or (null and text == "null"):
        setting = f"value={text}" if text.strip() else "value=''"
        remedy = "quote the value, or close its brackets"
        value = _parse(place, remedy, lambda: OmegaConf.from_dotlist([setting]))["value"]
        # Mappings with free keys may hold texts, too.
        settings = text if key_info is None and isinstance(value, str) and not is_quoted else value
    for part in reversed(match["key"].split(".")):
        settings = {part: settings}
    return place, settings


def _parse(place: str | Path, remedy: str, load: Callable[[], Any]) -> Any:
    """The values that ``load`` parses from the YAML of a file or an override."""
    try:
        return OmegaConf.to_container(load())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark and isinstance(place, Path) else ""
        problem = f"not valid YAML: {_problem(error)}"
        raise ConfigError(f"{place}{line}: {problem}; {remedy}") from error
    # Also excessive nesting, an integer of thousands of digits, and a file of one scalar.
    except (OmegaConfBaseException, RecursionError, ValueError, OSError) as error:
        raise ConfigError(f"{place}: {_problem(error)}; {remedy}") from error


def _merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}
    return above


def _holds(settings: Any, location: Sequence[int | str]) -> bool:
    for part in location:
        try:
            settings = settings[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _problem(error: Exception) -> str:
    """The text of a YAML error, or the first line of another."""
    text = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return " ".join(str(text).split())[:_MAX_SHOWN] or type(error).__name__
