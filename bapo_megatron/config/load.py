"""Reading a run's configuration: YAML files, inheritance, dotted overrides, validation.

A file may name the file it builds on, relative to its own directory: ``inherit: base.yaml``. Files
are merged from the base up and then the overrides, in their order; a list is replaced as a whole,
and so is a section by a list or a list by a section. ``${key}`` and ``${oc.env:NAME}`` are
resolved by OmegaConf. Paths inside a configuration are relative to the current working directory.
"""

import contextlib
import functools
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from pydantic import ValidationError

from bapo_megatron.config.describe import Place, explain
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import Section
from bapo_megatron.runtime.calls import dotted
from bapo_megatron.runtime.files import read_regular

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(?P<value>.*)", re.DOTALL)
_MAX_DEPTH = 50
"""Levels of a YAML value; its C parser recurses over them without a limit of its own."""
_MAX_FILES = 20
"""Files of one chain of ``inherit``."""
_MAX_SHOWN = 120
"""Characters of an override in a message."""


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
    except (OmegaConfBaseException, RecursionError) as error:
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


def parse_section[SectionT: Section](section: type[SectionT], given: Any, place: Place) -> SectionT:
    """Validate one section from its keys; what is not given has its default.

    Raises:
        ConfigError: As by ``load_config``.
    """
    # Strict JSON: a list may be a tuple and a string a path, but not "100" an integer or true a 1.
    _refuse_unsendable(given, place)
    try:
        return section.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, section, place)) from error


def dump_yaml(config: RunConfig) -> str:
    """The configuration with every default as YAML; ``load_config`` reads it back equal."""
    values = literal(config.model_dump(mode="json"))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def literal(value: Any) -> Any:
    """Return a JSON value as a file must hold it, so that "${" in its texts is no reference."""
    # OmegaConf's escape is a backslash, and two are one before "${"; JSON writes each twice.
    return json.loads(re.sub(r"(\\*)\$\{", r"\1\1\\\\${", json.dumps(value)))


def _refuse_unsendable(value: Any, place: Place, location: tuple[Any, ...] = ()) -> None:
    """Refuse text that neither files nor other processes can be given, and bytes."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_unsendable(key, place, location)
            _refuse_unsendable(each, place, (*location, key))
        return
    if isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            if "\0" not in value:
                return
    if isinstance(value, str | bytes):
        file = place if isinstance(place, str) else place(location)
        raise ConfigError(
            f"{file}: '{dotted(location)}' must be text without NUL and halves of surrogate pairs, "
            f"got {ascii(value)[:_MAX_SHOWN]}; correct it"
        )


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file other than a run's configuration.

    References stay as they are.

    Raises:
        ConfigError: It is missing, or not a YAML mapping.
    """
    found: dict[str, Any] = OmegaConf.to_container(_read_file(path))
    return found


def _read_files(path: Path, inheriting: Sequence[Path]) -> list[tuple[str, Any]]:
    """Files and their OmegaConf mappings: what a file inherits from, most basic first, then it."""
    # Not ``resolve``, which raises a RuntimeError for a loop of symbolic links.
    if os.path.realpath(path) in [os.path.realpath(other) for other in inheriting]:
        chain = " -> ".join(str(other) for other in [*inheriting, path])
        raise ConfigError(f"{path}: inherits from itself ({chain}); remove one 'inherit'")
    if len(inheriting) == _MAX_FILES:
        raise ConfigError(
            f"{path}: 'inherit' must not lead through more than {_MAX_FILES} files, got them from "
            f"{inheriting[0]} on; merge some of them"
        )
    settings = _read_file(path, f"{inheriting[-1]}: inherit: " if inheriting else "")
    base = settings.pop("inherit", None)
    if base is None:
        return [(str(path), settings)]
    if not isinstance(base, str) or "\0" in base:
        raise ConfigError(f"{path}: 'inherit' must be one file name, got {base!r}; name one file")
    return [*_read_files(path.parent / base, [*inheriting, path]), (str(path), settings)]


def _read_file(path: Path, asked_by: str = "") -> Any:
    """One file's OmegaConf mapping."""
    try:
        text = read_regular(path).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{asked_by}{path}: no such file; check the path") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; give a readable YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); give a YAML file") from error
    remedy = "correct this line"
    settings = _parse(text, str(path), remedy, lambda: OmegaConf.load(io.StringIO(text)))
    if not isinstance(settings, DictConfig):
        raise ConfigError(
            f"{path}: must be a mapping of keys, got a list; write 'key: value' lines"
        )
    return settings


def _parse_override(override: str) -> tuple[str, Any]:
    is_long = len(override) > _MAX_SHOWN
    place = f"override '{override[:_MAX_SHOWN]}{'…' if is_long else ''}'"
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError(
            f"{place}: must be dotted.key=value, such as rollout.temperature=0.6; correct it"
        )
    if not match["value"].strip():
        override = f"{match['key']}=''"
    remedy = "quote the value, or close its brackets"
    load = functools.partial(OmegaConf.from_dotlist, [override])
    return place, _parse(match["value"], place, remedy, load)


def _parse(text: str, place: str, remedy: str, load: Callable[[], Any]) -> Any:
    """What ``load`` makes of a YAML text, in a file or an override; errors are ``ConfigError``."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError(
                    f"{place}: must not be nested more than {_MAX_DEPTH} levels deep, got that in "
                    f"line {getattr(event.start_mark, 'line', 0) + 1}; correct it"
                )
        return load()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{place}:{mark.line + 1}" if mark and not place.endswith("'") else place
        raise ConfigError(f"{line}: not valid YAML: {_problem(error)}; {remedy}") from error
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(f"{place}: {_problem(error)}; correct this key") from error
    # Python's error for an integer of thousands of digits, OmegaConf's for a file of one scalar.
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{place}: not a mapping of keys ({_problem(error)}); {remedy}"
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
    return " ".join(str(text).split())[:_MAX_SHOWN] or type(error).__name__
