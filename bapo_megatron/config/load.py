"""Reading a run's configuration: YAML files, inheritance, dotted overrides, validation.

A file may name the file it builds on, relative to its own directory: ``inherit: base.yaml``. Files
are merged from the base up and then the overrides, in their order; a list is replaced as a whole,
and so is a section by a list or a list by a section. ``${key}`` and ``${oc.env:NAME}`` are
resolved by OmegaConf. Paths inside a configuration are relative to the current working directory.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from pydantic import ValidationError

from bapo_megatron.config.describe import Place, explain
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import Section

SectionT = TypeVar("SectionT", bound=Section)

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(?P<value>.*)", re.DOTALL)


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate the configuration of a run; every default is filled in.

    An override is ``dotted.key=value`` with the value in YAML (``rollout.servers=[http://a:1]``);
    nothing after the ``=`` is the empty text.

    Raises:
        ConfigError: A file is missing or not YAML, a key is unknown or missing, or a value breaks
            a rule; one line that names the file or override, the key and the value.
    """
    layers = [*_read_files(path, []), *map(_parse_override, overrides)]
    merged = OmegaConf.create()
    try:
        for _, settings in layers:
            _make_way(merged, OmegaConf.to_container(settings))
            merged = OmegaConf.merge(merged, settings)
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        remedy = "correct this key"
        if isinstance(error, InterpolationKeyError) and not any(
            _holds(settings, ["name"]) for _, settings in layers
        ):
            remedy = "this is a base for other files: give one that inherits it and has a name"
        raise ConfigError(f"{path}: {_problem(error)}; {remedy}") from error

    def place_of(location: Sequence[int | str]) -> str:
        holding = (place for place, settings in reversed(layers) if _holds(settings, location))
        return next(holding, str(path))

    return parse_section(RunConfig, resolved, place_of)


def parse_section(section: type[SectionT], given: Any, place: Place) -> SectionT:
    """Validate one section from its keys; what is not given has its default.

    Raises:
        ConfigError: As by ``load_config``.
    """
    # Strict JSON: a list may be a tuple and a string a path, but not "100" an integer or true a 1.
    try:
        return section.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, section, place)) from error


def dump_yaml(config: RunConfig) -> str:
    """The configuration with every default as YAML; ``load_config`` reads it back equal."""
    # OmegaConf would take a literal "${" for a reference.
    escaped = json.dumps(config.model_dump(mode="json")).replace("${", r"\\${")
    return yaml.safe_dump(json.loads(escaped), sort_keys=False, allow_unicode=True)


def _read_files(path: Path, inheriting: Sequence[Path]) -> list[tuple[str, Any]]:
    """Files and their OmegaConf mappings: what a file inherits from, most basic first, then it."""
    if path.resolve() in [other.resolve() for other in inheriting]:
        chain = " -> ".join(str(other) for other in [*inheriting, path])
        raise ConfigError(f"{path}: inherits from itself ({chain}); remove one 'inherit'")
    try:
        settings = OmegaConf.load(path)
    except FileNotFoundError as error:
        asked_by = f"{inheriting[-1]}: inherit: " if inheriting else ""
        raise ConfigError(f"{asked_by}{path}: no such file; check the path") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; give a readable YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); give a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(
            f"{place}: not valid YAML: {_problem(error)}; correct this line"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_problem(error)}; correct this key") from error
    if not isinstance(settings, DictConfig):
        raise ConfigError(
            f"{path}: must be a mapping of keys, got a list; write 'key: value' lines"
        )
    base = settings.pop("inherit", None)
    if base is None:
        return [(str(path), settings)]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: 'inherit' must be one file name, got {base}; name one file")
    return [*_read_files(path.parent / base, [*inheriting, path]), (str(path), settings)]


def _parse_override(override: str) -> tuple[str, Any]:
    place = f"override '{override}'"
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError(f"{place}: must be dotted.key=value, such as rollout.temperature=0.6")
    if not match["value"].strip():
        override = f"{match['key']}=''"
    try:
        return place, OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{place}: the value is not YAML ({_problem(error)}); quote it, or close its brackets"
        ) from error


def _make_way(merged: Any, settings: Any) -> None:
    """Remove the lists that become sections, and the reverse: OmegaConf cannot merge those."""
    for key, value in settings.items():
        if OmegaConf.is_interpolation(merged, key) or not isinstance(value, dict | list):
            continue
        below = merged.get(key)
        if OmegaConf.is_dict(below) and isinstance(value, dict):
            _make_way(below, value)
        elif OmegaConf.is_config(below) and OmegaConf.is_list(below) != isinstance(value, list):
            del merged[key]


def _holds(settings: Any, location: Sequence[int | str]) -> bool:
    """Whether a layer itself sets the key."""
    node = OmegaConf.to_container(settings)
    for part in location:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _problem(error: Exception) -> str:
    """YAML's own words, or the first line of the error."""
    text = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return " ".join(str(text).split())
