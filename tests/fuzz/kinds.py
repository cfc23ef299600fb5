"""Kinds of bad input: each makes one case, from intact files and a seeded choice of damage."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.fuzz import mutations as harm
from tests.fuzz.forks import Case

DUMP = "step_000001.parquet"
METADATA = b"bapo_megatron.rollout"
SHOW = "data show {intact}/run.yaml"
SHOW_DUMP = f"samples show dumps/{DUMP}"
RUN = "run_dir={files}/run log.console=false"
REPLAY = "train {intact}/replay.yaml replay={files}/dumps " + RUN
RESUME = "train {intact}/replay.yaml resume=true " + RUN
CONVERT = "convert model target"
REPORT = "report run --out page.html"
GRADE_AGAIN = "eval --from sums.jsonl --out again"
COMPARE = "compare eval.json {intact}/eval.json"


# --- configuration ----------------------------------------------------------------------------


def yaml_value(intact: Path, files: Path, rng: Random) -> Case:
    """A key of the resolved configuration with another value."""
    from bapo_megatron.config.load import dump_yaml, load_config

    tree = yaml.safe_load(dump_yaml(load_config(intact / "run.yaml")))
    tree, _ = harm.poisoned(tree, rng, harm.pick(rng, [p for p in harm.places_in(tree) if p]))
    (files / "run.yaml").write_text(yaml.safe_dump(tree))
    return Case("config run.yaml")


def yaml_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a file of the configuration, or of the one it inherits from."""
    names = ("run.yaml", "base.yaml")
    harm.copied(intact, files, *names)
    is_wrong = harm.damaged(files / harm.pick(rng, names), rng)
    return Case("config run.yaml", ("yaml",) if is_wrong else (), is_wrong)


def override(intact: Path, files: Path, rng: Random) -> Case:
    """A key with a value that may be anything."""
    from bapo_megatron.config.describe import describe_keys

    key = harm.pick(rng, describe_keys()).name.replace("[]", harm.pick(rng, ("", ".0", "[0]")))
    words = (*harm.POISONS, harm.DIGITS, "[" * 5000, "${" * 300, "a\0b", "1e400", "${seed}", "~")
    value = harm.pick(rng, words)
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.encode(errors="replace").decode()
    return Case(["config", "{intact}/run.yaml", f"{key}={text}"])


# --- prompts ----------------------------------------------------------------------------------


def show(name: str, is_wrong: bool = False, places: tuple[str, ...] = ()) -> Case:
    """Show the prompts of a file."""
    return Case(SHOW + f" data.train.path={{files}}/{name}", places, is_wrong)


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
    # An empty reference is left out and counted (reward.no_answers).
    is_wrong = isinstance(new, dict) or (field == "prompt" and new in (None, ""))
    return show(name, is_wrong, (name, field) if is_wrong else (name,))


def rows_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a file of prompts."""
    name = harm.pick(rng, ("train.jsonl", "train.json", "train.parquet"))
    harm.copied(intact, files, name)
    return show(name, harm.damaged(files / name, rng), (name,))


def rows_timestamps(intact: Path, files: Path, rng: Random) -> Case:
    """Columns of a type whose values Python cannot hold."""
    harm.copied(intact, files, "train.parquet")
    huge = harm.pick(rng, (2**62, -(2**62), 2**55))
    kinds = (pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.duration("s"))
    harm.dates(files / "train.parquet", huge, harm.pick(rng, kinds))
    return show("train.parquet")


# --- rollout dumps ----------------------------------------------------------------------------

NUMBERS = (0, -1, 1, 5, 2**31 - 1, -(2**31), None)
COMPONENTS = ("", "[]", "1", '{"math": "1"}', '{"math": null}', '{"a": NaN}', "{", '{"a": {}}')
TEXTS = ("", "stop ", "STOP", None, "x\0y")
TYPES = (pa.string(), pa.int64(), pa.list_(pa.int64()), pa.list_(pa.float32()))


def dump_cell(intact: Path, files: Path, rng: Random) -> Case:
    """A value, or the type, of a column of a dump."""
    harm.copied(intact, files, "dumps")
    table = pq.read_table(files / "dumps" / DUMP)
    column, row = harm.pick(rng, table.column_names), rng.randrange(len(table))
    values = table[column].to_pylist()
    kind = table.schema.field(column).type
    if rng.random() < 0.15:
        stored = pa.nulls(len(table), harm.pick(rng, TYPES))
    else:
        values[row] = _bad_value(column, values[row], kind, rng)
        stored = pa.array(values, kind)
    pq.write_table(harm.with_column(table, column, stored), files / "dumps" / DUMP)
    return Case(REPLAY, (DUMP,))


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
    """The metadata of a dump."""
    harm.copied(intact, files, "dumps")
    table = pq.read_table(files / "dumps" / DUMP)
    about = json.loads(table.schema.metadata[METADATA])
    place = harm.pick(rng, list(harm.places_in(about)))
    about, is_wrong = harm.poisoned(about, rng, place)
    is_wrong = is_wrong and place[-1:] != ("environment_errors",)  # null or an object
    content = json.dumps(about).encode()
    content = harm.pick(rng, (*[content] * 6, content[:-3], b"\xff", b"[" * harm.DEEP))
    pq.write_table(table.replace_schema_metadata({METADATA: content}), files / "dumps" / DUMP)
    return Case(REPLAY, (DUMP,), is_wrong)


def dump_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """The bytes of a dump, or of the texts beside it."""
    harm.copied(intact, files, "dumps")
    path = files / "dumps" / harm.pick(rng, (DUMP, f"texts/{DUMP}"))
    is_wrong = harm.damaged(path, rng) and (path.is_dir() or path.exists() or path.is_symlink())
    return Case(SHOW_DUMP, (DUMP,), is_wrong)


# --- models -----------------------------------------------------------------------------------

_MODEL_SIZES = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("intermediate_size", "max_position_embeddings"),
)


def model_config(intact: Path, files: Path, rng: Random) -> Case:
    """A field of config.json."""
    harm.copied(intact, files, "model")
    _, is_wrong = harm.json_damaged(files / "model" / "config.json", rng, _MODEL_SIZES)
    return Case(CONVERT, ("model",), is_wrong, "target")


def model_bytes(intact: Path, files: Path, rng: Random) -> Case:
    """A value of the index; the bytes of it, of config.json or of a file with weights."""
    harm.copied(intact, files, "sharded")
    paths = [p for p in (files / "sharded").iterdir() if p.name.startswith(("model", "config"))]
    path = harm.pick(rng, sorted(paths))
    harm.damaged_somehow(path, rng, 0.4 if "index" in path.name else 1.0)
    return Case("convert sharded target", ("sharded",), False, "target")


def tokenizer(intact: Path, files: Path, rng: Random) -> Case:
    """The files of the tokenizer."""
    harm.copied(intact, files, "model")
    name = harm.pick(rng, ("tokenizer.json", "tokenizer_config.json"))
    harm.damaged_somehow(files / "model" / name, rng, 0.5)
    return Case(SHOW + " model.path={files}/model", ("model",))


# --- evaluations ------------------------------------------------------------------------------


def samples(intact: Path, files: Path, rng: Random) -> Case:
    """A field of a sample, or the bytes of the file."""
    harm.copied(intact, files, "sums.jsonl", "sums.settings.json")
    path = files / "sums.jsonl"
    if rng.random() < 0.3:
        return Case(GRADE_AGAIN, ("sums.jsonl",), harm.damaged(path, rng), "again")
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    entry = json.loads(lines[number])
    field = harm.pick(rng, [name for name in entry if name not in ("state", "row")])
    entry, is_wrong = harm.poisoned(entry, rng, (field,))
    harm.edit_line(path, number, lambda _: entry)
    return Case(GRADE_AGAIN, ("sums.jsonl", *[field] * is_wrong), is_wrong, "again")


def settings(intact: Path, files: Path, rng: Random) -> Case:
    """A setting beside samples."""
    harm.copied(intact, files, "sums.jsonl", "sums.settings.json")
    harm.damaged_somehow(files / "sums.settings.json", rng, 0.3)
    return Case(GRADE_AGAIN, ("sums",), target="again")


def results(intact: Path, files: Path, rng: Random) -> Case:
    """A field of eval.json, or its bytes."""
    harm.copied(intact, files, "eval.json")
    harm.damaged_somehow(files / "eval.json", rng, 0.3)
    return Case(COMPARE, ("eval.json",))


def graded(intact: Path, files: Path, rng: Random) -> Case:
    """A line of responses."""
    name = "responses.jsonl"
    harm.copied(intact, files, name)
    path = files / name
    if rng.random() < 0.4:
        return Case(f"grade {name}", (name,), harm.damaged(path, rng))
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    field, new = harm.pick(rng, json.loads(lines[number])), harm.pick(rng, harm.POISONS)
    harm.edit_line(path, number, lambda entry: {**entry, field: new})
    is_wrong = not isinstance(new, str) if field == "response" else new is None
    return Case(f"grade {name}", (name, *[field] * is_wrong), is_wrong)


# --- token dumps, metrics and checkpoints -----------------------------------------------------


def token_dump(intact: Path, files: Path, rng: Random) -> Case:
    harm.copied(intact, files, "tokens.parquet")
    change = harm.damaged(files / "tokens.parquet", rng)
    return Case("bounds tokens.parquet", ("tokens.parquet",), change)


def metrics(intact: Path, files: Path, rng: Random) -> Case:
    """The metrics of a run."""
    (files / "run").mkdir()
    harm.copied(intact, files, "run/metrics.jsonl")
    path = files / "run/metrics.jsonl"
    if rng.random() < 0.4:
        harm.damaged(path, rng)
    else:
        row = json.loads(path.read_text().splitlines()[0])
        names = [name for name in ("step", "reward/mean", "clip/high") if name in row]
        row, _ = harm.poisoned(row, rng, (harm.pick(rng, names),))
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return Case(REPORT, ("metrics.jsonl",), False, "page.html")


def resumed(intact: Path, files: Path, rng: Random) -> Case:
    """The state and the pointer of a run that is continued."""
    harm.copied(intact, files, "run")
    name = harm.pick(rng, ("step_1/state.json", "latest"))
    path = files / "run/checkpoints" / name
    harm.damaged_somehow(path, rng, 0.4 if path.suffix else 1.0)
    return Case(RESUME, ("checkpoints",))


def checkpoint(intact: Path, files: Path, rng: Random) -> Case:
    """A file of a checkpoint that is converted."""
    harm.copied(intact, files, "checkpoint")
    paths = [path for path in (files / "checkpoint").rglob("*") if path.is_file()]
    harm.damaged(harm.pick(rng, sorted(paths)), rng)
    return Case("convert checkpoint target", ("checkpoint",), False, "target")


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
    "model_bytes": (model_bytes, 8),
    "tokenizer": (tokenizer, 4),
    "samples": (samples, 6),
    "settings": (settings, 4),
    "results": (results, 6),
    "graded": (graded, 3),
    "token dump": (token_dump, 5),
    "metrics": (metrics, 6),
    "resumed": (resumed, 3),
    "checkpoint": (checkpoint, 3),
}
"""Every kind, and how often it comes."""
