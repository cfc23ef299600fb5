"""Kinds of bad input: each makes one case, from intact files and a seeded choice of damage."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.fuzz import mutations as harm
from tests.fuzz.forks import Case

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

Kind = "Callable[[Path, Path, Random], Case]"
DUMP = "step_000001.parquet"
METADATA = b"bapo_megatron.rollout"
SHOW = ["data", "show"]


def _pick(rng: Random, choices: Any) -> Any:
    return rng.choice(list(choices))


def _poisoned(value: Any, rng: Random, place: tuple[Any, ...]) -> tuple[Any, bool]:
    """Put another value at a place, or remove it; return whether it is of another type now."""
    if place and rng.random() < 0.15 and isinstance(harm.value_at(value, place[:-1]), dict):
        del harm.value_at(value, place[:-1])[place[-1]]
        return value, False
    old, new = harm.value_at(value, place), _pick(rng, harm.POISONS)
    if place and isinstance(new, int | float) and rng.random() < 0.2:
        new = -new if new == new else new
    return harm.put(value, place, new), harm.is_other_type(old, new)


def _damaged(path: Path, rng: Random) -> bool:
    return harm.damage_bytes(path, _pick(rng, harm.bytes_damages()), rng)


def _json_damaged(path: Path, rng: Random, strict: Any = ()) -> tuple[str, bool]:
    """Poison a JSON file; return the field's name, and whether the file is certainly wrong now."""
    tree = json.loads(path.read_text())
    place = _pick(rng, [each for each in harm.places_in(tree) if each])
    tree, is_wrong = _poisoned(tree, rng, place)
    path.write_text(harm.to_json(tree))
    names = [key for key in place if isinstance(key, str)]
    return (names[-1] if names else ""), is_wrong and bool(names) and names[0] in strict


# --- configuration ----------------------------------------------------------------------------


def yaml_value(intact: Path, files: Path, rng: Random) -> Case:
    """A key of the resolved configuration with another value."""
    from bapo_megatron.config.load import dump_yaml, load_config

    tree = yaml.safe_load(dump_yaml(load_config(intact / "run.yaml")))
    tree, _ = _poisoned(tree, rng, _pick(rng, [p for p in harm.places_in(tree) if p]))
    path = files / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return Case(["config", str(path)], (), is_wrong=False)


def yaml_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a file of the configuration, or of the one it inherits from."""
    for name in ("run.yaml", "base.yaml"):
        shutil.copy(intact / name, files / name)
    name = _pick(rng, ("run.yaml", "base.yaml"))
    is_wrong = _damaged(files / name, rng)
    return Case(["config", str(files / "run.yaml")], ("yaml",) if is_wrong else (), is_wrong)


def override(intact: Path, files: Path, rng: Random) -> Case:
    """A key with a value that may be anything."""
    from bapo_megatron.config.describe import describe_keys

    key = _pick(rng, describe_keys()).name.replace("[]", _pick(rng, ("", ".0", "[0]")))
    words = (*harm.POISONS, harm.DIGITS, "[" * 5000, "${" * 300, "a\0b", "1e400", "${seed}", "~")
    value = _pick(rng, words)
    text = value if isinstance(value, str) else harm.to_json(value)
    text = text.encode(errors="replace").decode()
    return Case(["config", str(intact / "run.yaml"), f"{key}={text}"], (), is_wrong=False)


# --- prompts ----------------------------------------------------------------------------------


def rows(intact: Path, files: Path, rng: Random) -> Case:
    """A field of a row, in each format."""
    name = _pick(rng, ("train.jsonl", "train.json"))
    entries = json.loads((intact / "train.json").read_text())
    number, field = rng.randrange(len(entries)), _pick(rng, ("prompt", "answer"))
    new = _pick(rng, harm.POISONS)
    entries[number][field] = new
    lines = [json.dumps(entry) for entry in entries]
    text = "\n".join(lines) + "\n" if name == "train.jsonl" else f"[{', '.join(lines)}]"
    (files / name).write_text(text)
    is_wrong = new is None or new == "" or isinstance(new, dict)
    places = (name, field) if is_wrong else (name,)
    return Case(_show(intact, f"data.train.path={files / name}"), places, is_wrong)


def rows_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a file of prompts."""
    name = _pick(rng, ("train.jsonl", "train.json", "train.parquet"))
    shutil.copy(intact / name, files / name)
    is_wrong = _damaged(files / name, rng)
    return Case(_show(intact, f"data.train.path={files / name}"), (name,), is_wrong)


def rows_timestamps(intact: Path, files: Path, rng: Random) -> Case:
    """Columns of a type whose values Python cannot hold."""
    huge = _pick(rng, (2**62, -(2**62), 2**55))
    kind = _pick(rng, (pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.duration("s"), pa.date64()))
    table = pq.read_table(intact / "train.parquet")
    column = pa.array([huge] * len(table), pa.int64()).view(kind)
    pq.write_table(table.append_column("when", column), files / "train.parquet")
    return Case(_show(intact, f"data.train.path={files / 'train.parquet'}"), (), is_wrong=False)


def _show(intact: Path, *overrides: str) -> list[str]:
    return [*SHOW, str(intact / "run.yaml"), *overrides]


# --- rollout dumps ----------------------------------------------------------------------------

NUMBERS = (0, -1, 1, 5, 2**31 - 1, -(2**31), None)
COMPONENTS = ("", "[]", "1", '{"math": "1"}', '{"math": null}', '{"a": NaN}', "{", '{"a": {}}')
TEXTS = ("", "stop ", "STOP", None, "x\0y")


def dump_cell(intact: Path, files: Path, rng: Random) -> Case:
    """A value, or the type, of a column of a dump."""
    table = pq.read_table(intact / "dumps" / DUMP)
    column, row = _pick(rng, table.column_names), rng.randrange(len(table))
    values = table[column].to_pylist()
    kind = table.schema.field(column).type
    if rng.random() < 0.15:
        other = _pick(rng, (pa.string(), pa.int64(), pa.list_(pa.int64()), pa.list_(pa.float32())))
        stored = pa.nulls(len(table), other)
    else:
        values[row] = _bad_value(column, values[row], kind, rng)
        stored = pa.array(values, kind)
    index = table.column_names.index(column)
    return replay_of(intact, files, table.set_column(index, pa.field(column, stored.type), stored))


def _bad_value(column: str, old: Any, kind: Any, rng: Random) -> Any:
    if column == "reward_components":
        return _pick(rng, COMPONENTS)
    if kind == pa.string():
        return _pick(rng, TEXTS)
    if kind == pa.bool_():
        return None
    if kind == pa.float64():
        return _pick(rng, (float("nan"), float("inf"), None))
    if not isinstance(old, list):
        return _pick(rng, NUMBERS)
    new = list(old)
    if new and rng.random() < 0.6:
        new[rng.randrange(len(new))] = _pick(rng, NUMBERS)
        return new
    return _pick(rng, (None, [], new[:-1], [*new, 1], new[::-1]))


def dump_metadata(intact: Path, files: Path, rng: Random) -> Case:
    """What the metadata of a dump say."""
    table = pq.read_table(intact / "dumps" / DUMP)
    about = json.loads(table.schema.metadata[METADATA])
    place = _pick(rng, list(harm.places_in(about)))
    about, is_wrong = _poisoned(about, rng, place)
    content = harm.to_json(about).encode()
    content = _pick(rng, (*[content] * 6, content[:-3], b"\xff", b"[" * harm.DEEP))
    table = table.replace_schema_metadata({METADATA: content})
    return replay_of(intact, files, table, is_wrong=is_wrong)


def dump_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a dump, or of the texts beside it."""
    shutil.copytree(intact / "dumps", files / "dumps")
    path = files / "dumps" / _pick(rng, (DUMP, f"texts/{DUMP}"))
    is_wrong = _damaged(path, rng) and (path.is_dir() or path.exists() or path.is_symlink())
    return Case([*SHOW, str(files / "dumps" / DUMP)], (DUMP,), is_wrong)


def replay_of(intact: Path, files: Path, table: Any, *, is_wrong: bool = False) -> Case:
    """Train on a table as the dump of step 1."""
    (files / "dumps").mkdir()
    pq.write_table(table, files / "dumps" / DUMP)
    given = [f"replay={files / 'dumps'}", f"run_dir={files / 'run'}", "log.console=false"]
    return Case(["train", str(intact / "replay.yaml"), *given], (DUMP,), is_wrong)


# --- models -----------------------------------------------------------------------------------


def model_config(intact: Path, files: Path, rng: Random) -> Case:
    """A field of config.json."""
    return _convert(intact, files, "model", "config.json", rng, _MODEL_SIZES)


def model_index(intact: Path, files: Path, rng: Random) -> Case:
    """The index of the shards."""
    name = "model.safetensors.index.json"
    return _convert(intact, files, "sharded", name, rng, ("weight_map",))


_MODEL_SIZES = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("intermediate_size", "max_position_embeddings"),
)


def _convert(
    intact: Path, files: Path, model: str, name: str, rng: Random, strict: tuple[str, ...]
) -> Case:
    shutil.copytree(intact / model, files / "model")
    _, is_wrong = _json_damaged(files / "model" / name, rng, strict)
    target = files / "target"
    return Case(["convert", str(files / "model"), str(target)], ("model",), is_wrong, target)


def model_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of config.json, of the index, or of a file with weights."""
    shutil.copytree(intact / "sharded", files / "model")
    names = [p.name for p in (files / "model").iterdir() if "tokenizer" not in p.name]
    name = _pick(rng, sorted(n for n in names if n.startswith(("model", "config"))))
    _damaged(files / "model" / name, rng)
    target = files / "target"
    return Case(["convert", str(files / "model"), str(target)], ("model",), False, target)


def tokenizer(intact: Path, files: Path, rng: Random) -> Case:
    """The files of the tokenizer."""
    shutil.copytree(intact / "model", files / "model")
    path = files / "model" / _pick(rng, ("tokenizer.json", "tokenizer_config.json"))
    if rng.random() < 0.5:
        _damaged(path, rng)
    else:
        _json_damaged(path, rng)
    return Case(_show(intact, f"model.path={files / 'model'}"), ("model",), is_wrong=False)


TEMPLATES = (
    *("{{", "{% for %}", "{{ messages | nothing }}", "{{ 1 // 0 }}", "{{ messages[5].content }}"),
    *("{{ raise_exception('no') }}", "{{ undefined.field.field }}", "{{ messages.pop(9) }}"),
    *("{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{{ 1 < 'a' }}"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 'x' * 10 ** 10 }}", ""),
    *("{{ range(10 ** 10) | join }}", "{{ messages | sum }}", "{{ '%d' | format('x') }}"),
    *("{{ messages | tojson(indent=[]) }}", "{{ strftime_now(1) }}", "{{ 'a' + 1 }}"),
    *("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% for x in 1 %}{% endfor %}"),
    *("{% set x.y = 1 %}", "{{ ''.__class__.__mro__ }}", "{{ 9 ** 9 ** 9 }}", "{{ 2 ** 1e9 }}"),
    *("{{ namespace(1) }}", "{{ lipsum.__globals__ }}", "{{ [1] | first(1, 2) }}"),
)


def template(intact: Path, files: Path, rng: Random) -> Case:
    """A chat template with an error of each kind."""
    return template_of(intact, files, _pick(rng, TEMPLATES))


def template_of(intact: Path, files: Path, text: str) -> Case:
    """Render the prompts with a template."""
    (files / "template.jinja").write_text(text)
    given = _show(intact, f"data.chat_template={files / 'template.jinja'}")
    return Case(given, ("template",), is_wrong=True)


# --- evaluations ------------------------------------------------------------------------------


def samples(intact: Path, files: Path, rng: Random) -> Case:
    """A field of a sample, or the bytes of the file."""
    path = _copy_samples(intact, files)
    lines = path.read_text().splitlines()
    is_wrong, places = False, ["sums.jsonl"]
    if rng.random() < 0.3:
        is_wrong = _damaged(path, rng)
    else:
        number, entry = rng.randrange(len(lines)), json.loads(lines[0])
        entry = json.loads(lines[number])
        field = _pick(rng, [name for name in entry if name not in ("state", "row")])
        entry, is_wrong = _poisoned(entry, rng, (field,))
        places += [field] if is_wrong else []
        lines[number] = harm.to_json(entry)
        path.write_text("\n".join(lines) + "\n")
    return _evaluate(intact, path, rng, tuple(places), is_wrong)


def settings(intact: Path, files: Path, rng: Random) -> Case:
    """A setting beside samples."""
    path = _copy_samples(intact, files)
    beside = files / "sums.settings.json"
    if rng.random() < 0.3:
        _damaged(beside, rng)
    else:
        _json_damaged(beside, rng)
    return _evaluate(intact, path, rng, ("sums",), is_wrong=False)


def _copy_samples(intact: Path, files: Path) -> Path:
    shutil.copy(intact / "sums.settings.json", files / "sums.settings.json")
    shutil.copy(intact / "sums.jsonl", files / "sums.jsonl")
    return files / "sums.jsonl"


def _evaluate(
    intact: Path, path: Path, rng: Random, places: tuple[str, ...], is_wrong: bool
) -> Case:
    files = path.parent
    if rng.random() < 0.5:
        given = ["compare", str(path), str(intact / "sums.jsonl"), "--resamples", "100"]
        return Case(given, places, is_wrong)
    target = files / "again"
    return Case(["eval", "--from", str(path), "--out", str(target)], places, is_wrong, target)


def results(intact: Path, files: Path, rng: Random) -> Case:
    """A field of eval.json, or its bytes."""
    path = files / "eval.json"
    shutil.copy(intact / "eval.json", path)
    if rng.random() < 0.3:
        _damaged(path, rng)
    else:
        _json_damaged(path, rng)
    given = ["compare", str(path), str(intact / "eval.json"), "--resamples", "100"]
    return Case(given, ("eval.json",), is_wrong=False)


def graded(intact: Path, files: Path, rng: Random) -> Case:
    """A line of responses."""
    path = files / "responses.jsonl"
    shutil.copy(intact / "responses.jsonl", path)
    places: tuple[str, ...] = ("responses.jsonl",)
    if rng.random() < 0.4:
        return Case(["grade", str(path)], places, _damaged(path, rng))
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    entry = json.loads(lines[number])
    field, new = _pick(rng, list(entry)), _pick(rng, harm.POISONS)
    entry[field] = new
    lines[number] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    is_wrong = not isinstance(new, str) if field == "response" else new is None
    return Case(["grade", str(path)], (*places, field) if is_wrong else places, is_wrong)


# --- archives and metrics ---------------------------------------------------------------------


def archive(intact: Path, files: Path, rng: Random) -> Case:
    """Tokens for the bound search."""
    name = _pick(rng, ("tokens.npz", "tokens.parquet"))
    path = files / name
    shutil.copy(intact / name, path)
    if rng.random() < 0.5:
        return Case(["bounds", str(path)], (name,), _damaged(path, rng))
    columns = dict(np.load(intact / "tokens.npz"))
    field = _pick(rng, sorted(columns))
    bad = (
        *(np.full(3, np.nan), np.full(3, 1e308), np.zeros(2), np.zeros((3, 1)), np.float64(1)),
        *(np.array(["a", "b", "c"]), np.array([1 + 2j, 0, 0]), np.full(3, 7), np.zeros(3, "M8[s]")),
        np.zeros(3, [("a", "f4")]),
    )
    columns[field] = _pick(rng, bad)
    np.savez(files / "tokens.npz", **columns)
    return Case(["bounds", str(files / "tokens.npz")], ("tokens.npz", field), is_wrong=False)


def metrics(intact: Path, files: Path, rng: Random) -> Case:
    """The metrics of a run."""
    path = files / "run" / "metrics.jsonl"
    path.parent.mkdir()
    shutil.copy(intact / "run" / "metrics.jsonl", path)
    lines = path.read_text().splitlines()
    if rng.random() < 0.4:
        _damaged(path, rng)
    else:
        row = json.loads(lines[0])
        named = ("step", "reward/mean", "bapo/clip_high")
        row, _ = _poisoned(row, rng, (_pick(rng, [name for name in named if name in row]),))
        lines.append(harm.to_json(row))
        path.write_text("\n".join(lines) + "\n")
    target = files / "picture.png"
    given = ["plot", str(path.parent), "--out", str(target)]
    return Case(given, ("metrics.jsonl",), False, target)


# --- checkpoints ------------------------------------------------------------------------------


def resumed(intact: Path, files: Path, rng: Random) -> Case:
    """The state, the pointers and the unfinished samples of a run that is continued."""
    shutil.copytree(intact / "run", files / "run")
    root = files / "run" / "checkpoints"
    path = _pick(rng, (root / "step_1" / "state.json", root / "latest"))
    if path.suffix == ".json" and rng.random() < 0.6:
        _json_damaged(path, rng)
    else:
        _damaged(path, rng)
    given = ["train", str(intact / "replay.yaml"), f"run_dir={files / 'run'}", "resume=true"]
    return Case([*given, "log.console=false"], ("checkpoints",), is_wrong=False)


def checkpoint(intact: Path, files: Path, rng: Random) -> Case:
    """A file of a checkpoint that is converted."""
    shutil.copytree(intact / "checkpoint", files / "checkpoint")
    path = _pick(rng, sorted(p for p in (files / "checkpoint").rglob("*") if p.is_file()))
    _damaged(path, rng)
    target = files / "target"
    given = ["convert", str(files / "checkpoint"), str(target)]
    return Case(given, ("checkpoint",), False, target)


KINDS = {
    "yaml_value": (yaml_value, 8),
    "yaml_bytes": (yaml_bytes, 6),
    "override": (override, 14),
    "rows": (rows, 6),
    "rows_bytes": (rows_bytes, 8),
    "rows_timestamps": (rows_timestamps, 1),
    "dump_cell": (dump_cell, 6),
    "dump_metadata": (dump_metadata, 4),
    "dump_bytes": (dump_bytes, 6),
    "model_config": (model_config, 8),
    "model_index": (model_index, 3),
    "model_bytes": (model_bytes, 5),
    "tokenizer": (tokenizer, 4),
    "template": (template, 3),
    "samples": (samples, 6),
    "settings": (settings, 4),
    "results": (results, 6),
    "graded": (graded, 3),
    "archive": (archive, 8),
    "metrics": (metrics, 6),
    "resumed": (resumed, 3),
    "checkpoint": (checkpoint, 3),
}
"""Every kind, and how often it comes."""
