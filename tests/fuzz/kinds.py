"""Kinds of bad input: each makes one case, from intact files and a seeded choice of damage.

Here are those that a run begins with; ``results`` has those of what a run has written.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.fuzz import mutations as harm
from tests.fuzz import results
from tests.fuzz.forks import Case

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

Kind = "Callable[[Path, Path, Random], Case]"
DUMP = "step_000001.parquet"
METADATA = b"bapo_megatron.rollout"
SHOW = ["data", "show"]
SHOW_DUMP = ["samples", "show"]


# --- configuration ----------------------------------------------------------------------------


def yaml_value(intact: Path, files: Path, rng: Random) -> Case:
    """A key of the resolved configuration with another value."""
    from bapo_megatron.config.load import dump_yaml, load_config

    tree = yaml.safe_load(dump_yaml(load_config(intact / "run.yaml")))
    tree, _ = harm.poisoned(tree, rng, harm.pick(rng, [p for p in harm.places_in(tree) if p]))
    path = files / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return Case(["config", str(path)], (), is_wrong=False)


def yaml_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a file of the configuration, or of the one it inherits from."""
    for name in ("run.yaml", "base.yaml"):
        shutil.copy(intact / name, files / name)
    name = harm.pick(rng, ("run.yaml", "base.yaml"))
    is_wrong = harm.damaged(files / name, rng)
    return Case(["config", str(files / "run.yaml")], ("yaml",) if is_wrong else (), is_wrong)


def override(intact: Path, files: Path, rng: Random) -> Case:
    """A key with a value that may be anything."""
    from bapo_megatron.config.describe import describe_keys

    key = harm.pick(rng, describe_keys()).name.replace("[]", harm.pick(rng, ("", ".0", "[0]")))
    words = (*harm.POISONS, harm.DIGITS, "[" * 5000, "${" * 300, "a\0b", "1e400", "${seed}", "~")
    value = harm.pick(rng, words)
    text = value if isinstance(value, str) else harm.to_json(value)
    text = text.encode(errors="replace").decode()
    return Case(["config", str(intact / "run.yaml"), f"{key}={text}"], (), is_wrong=False)


# --- prompts ----------------------------------------------------------------------------------


def rows(intact: Path, files: Path, rng: Random) -> Case:
    """A field of a row, in each format."""
    name = harm.pick(rng, ("train.jsonl", "train.json"))
    entries = json.loads((intact / "train.json").read_text())
    number, field = rng.randrange(len(entries)), harm.pick(rng, ("prompt", "answer"))
    new = harm.pick(rng, harm.POISONS)
    entries[number][field] = new
    lines = [json.dumps(entry) for entry in entries]
    text = "\n".join(lines) + "\n" if name == "train.jsonl" else f"[{', '.join(lines)}]"
    (files / name).write_text(text)
    is_wrong = new is None or new == "" or isinstance(new, dict)
    places = (name, field) if is_wrong else (name,)
    return Case(_show(intact, f"data.train.path={files / name}"), places, is_wrong)


def rows_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a file of prompts."""
    name = harm.pick(rng, ("train.jsonl", "train.json", "train.parquet"))
    shutil.copy(intact / name, files / name)
    is_wrong = harm.damaged(files / name, rng)
    return Case(_show(intact, f"data.train.path={files / name}"), (name,), is_wrong)


def rows_timestamps(intact: Path, files: Path, rng: Random) -> Case:
    """Columns of a type whose values Python cannot hold."""
    huge = harm.pick(rng, (2**62, -(2**62), 2**55))
    kind = harm.pick(rng, (pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.duration("s")))
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
    column, row = harm.pick(rng, table.column_names), rng.randrange(len(table))
    values = table[column].to_pylist()
    kind = table.schema.field(column).type
    if rng.random() < 0.15:
        other = harm.pick(
            rng, (pa.string(), pa.int64(), pa.list_(pa.int64()), pa.list_(pa.float32()))
        )
        stored = pa.nulls(len(table), other)
    else:
        values[row] = _bad_value(column, values[row], kind, rng)
        stored = pa.array(values, kind)
    index = table.column_names.index(column)
    return replay_of(intact, files, table.set_column(index, pa.field(column, stored.type), stored))


def _bad_value(column: str, old: Any, kind: Any, rng: Random) -> Any:
    if column == "reward_components":
        return harm.pick(rng, COMPONENTS)
    if kind == pa.string():
        return harm.pick(rng, TEXTS)
    if kind == pa.bool_():
        return None
    if kind == pa.float64():
        return harm.pick(rng, (float("nan"), float("inf"), None))
    if not isinstance(old, list):
        return harm.pick(rng, NUMBERS)
    new = list(old)
    if new and rng.random() < 0.6:
        number = harm.pick(rng, NUMBERS)
        is_float = number is not None and pa.types.is_floating(kind.value_type)
        new[rng.randrange(len(new))] = float(number) if is_float else number
        return new
    return harm.pick(rng, (None, [], new[:-1], [*new, 1], new[::-1]))


def dump_metadata(intact: Path, files: Path, rng: Random) -> Case:
    """What the metadata of a dump say."""
    table = pq.read_table(intact / "dumps" / DUMP)
    about = json.loads(table.schema.metadata[METADATA])
    place = harm.pick(rng, list(harm.places_in(about)))
    about, is_wrong = harm.poisoned(about, rng, place)
    is_wrong = is_wrong and place[-1:] != ("environment_errors",)  # null or an object
    content = harm.to_json(about).encode()
    content = harm.pick(rng, (*[content] * 6, content[:-3], b"\xff", b"[" * harm.DEEP))
    table = table.replace_schema_metadata({METADATA: content})
    return replay_of(intact, files, table, is_wrong=is_wrong)


def dump_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a dump, or of the texts beside it."""
    shutil.copytree(intact / "dumps", files / "dumps")
    path = files / "dumps" / harm.pick(rng, (DUMP, f"texts/{DUMP}"))
    is_wrong = harm.damaged(path, rng) and (path.is_dir() or path.exists() or path.is_symlink())
    return Case([*SHOW_DUMP, str(files / "dumps" / DUMP)], (DUMP,), is_wrong)


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
    _, is_wrong = harm.json_damaged(files / "model" / name, rng, strict)
    target = files / "target"
    return Case(["convert", str(files / "model"), str(target)], ("model",), is_wrong, target)


def model_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of config.json, of the index, or of a file with weights."""
    shutil.copytree(intact / "sharded", files / "model")
    names = [p.name for p in (files / "model").iterdir() if "tokenizer" not in p.name]
    name = harm.pick(rng, sorted(n for n in names if n.startswith(("model", "config"))))
    harm.damaged(files / "model" / name, rng)
    target = files / "target"
    return Case(["convert", str(files / "model"), str(target)], ("model",), False, target)


def tokenizer(intact: Path, files: Path, rng: Random) -> Case:
    """The files of the tokenizer."""
    shutil.copytree(intact / "model", files / "model")
    path = files / "model" / harm.pick(rng, ("tokenizer.json", "tokenizer_config.json"))
    if rng.random() < 0.5:
        harm.damaged(path, rng)
    else:
        harm.json_damaged(path, rng)
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
    return template_of(intact, files, harm.pick(rng, TEMPLATES))


def template_of(intact: Path, files: Path, text: str) -> Case:
    """Render the prompts with a template."""
    (files / "template.jinja").write_text(text)
    given = _show(intact, f"data.chat_template={files / 'template.jinja'}")
    return Case(given, ("template",), is_wrong=True)


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
    "samples": (results.samples, 6),
    "settings": (results.settings, 4),
    "results": (results.results, 6),
    "graded": (results.graded, 3),
    "archive": (results.archive, 8),
    "metrics": (results.metrics, 6),
    "resumed": (results.resumed, 3),
    "checkpoint": (results.checkpoint, 3),
}
"""Every kind, and how often it comes."""
