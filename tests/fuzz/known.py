"""Known cases of bad input, each by its name; every one has been a traceback or a silent error.

Here are those of files; ``known_commands`` has the others, and all of them together.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.fuzz import mutations as harm
from tests.fuzz.forks import Case
from tests.fuzz.kinds import DUMP, METADATA, SHOW, SHOW_DUMP, replay_of, template_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLE_0 = "sample 0 of group 0"


def _json_file(path: Path, change: Callable[[Any], Any]) -> None:
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(change(tree) or tree))


def put_at(*place: Any, value: Any) -> Callable[[Any], Any]:
    return lambda tree: harm.put(tree, place, value)


# --- rollout dumps ----------------------------------------------------------------------------


def cell(intact: Path, files: Path, *, column: str, value: Any, element: int | None = None) -> Case:
    """Another value in the first row of a dump, or in its list."""
    table = pq.read_table(intact / "dumps" / DUMP)
    values, kind = table[column].to_pylist(), table.schema.field(column).type
    values[0] = value if element is None else harm.put(values[0], (element,), value)
    column_number = table.column_names.index(column)
    table = table.set_column(column_number, pa.field(column, kind), pa.array(values, kind))
    case = replay_of(intact, files, table, is_wrong=True)
    return Case(case.arguments, (DUMP, SAMPLE_0, column), is_wrong=True)


def metadata(intact: Path, files: Path, *, change: Any, place: str = METADATA.decode()) -> Case:
    """Other metadata: a text, or a function of their JSON value; None for none at all."""
    table = pq.read_table(intact / "dumps" / DUMP)
    content = table.schema.metadata[METADATA]
    if callable(change):
        content = json.dumps(change(json.loads(content))).encode()
    stored = None if change is None else {METADATA: content if callable(change) else change}
    case = replay_of(intact, files, table.replace_schema_metadata(stored), is_wrong=True)
    return Case(case.arguments, (DUMP, place), is_wrong=True)


def flipped(intact: Path, files: Path, *, find: Callable[[bytes], int], bits: int) -> Case:
    """A dump with flipped bits in one byte."""
    (files / "dumps").mkdir()
    content = bytearray((intact / "dumps" / DUMP).read_bytes())
    content[find(content)] ^= bits
    (files / "dumps" / DUMP).write_bytes(content)
    return Case([*SHOW_DUMP, str(files / "dumps" / DUMP)], (DUMP,), is_wrong=True)


DUMPS: dict[str, Any] = {
    "token outside the vocabulary": partial(
        cell, column="response_token_ids", element=0, value=10**6
    ),
    "null token": partial(cell, column="response_token_ids", element=0, value=None),
    "null version": partial(cell, column="versions", element=0, value=None),
    "version above the batch's": partial(cell, column="versions", element=0, value=1000),
    "NaN reward": partial(cell, column="reward", value=float("nan")),
    "component that is a text": partial(cell, column="reward_components", value='{"a": "1"}'),
    "component that is a list": partial(cell, column="reward_components", value="[1]"),
    "no metadata": partial(metadata, change=None),
    "broken metadata": partial(metadata, change=b'{"format": 4, "st'),
    "flipped byte in metadata": partial(
        metadata, change=b'{"format": 4, "step": 1, "stats"\xba {}}'
    ),
    "metadata nested deeply": partial(metadata, change=b"[" * harm.DEEP),
    "step of 10^30": partial(metadata, change=put_at("step", value=10**30), place="'step'"),
    "version NaN": partial(
        metadata, change=put_at("version", value=float("nan")), place="'version'"
    ),
    "counter NaN": partial(
        metadata,
        change=put_at("stats", "generation_s", value=float("nan")),
        place="'stats.generation_s'",
    ),
    "unknown counter": partial(
        metadata, change=put_at("stats", "lost", value=1), place="'stats.lost'"
    ),
    "flipped length of the footer": partial(flipped, find=lambda _: -6, bits=1),
    "column name that is not UTF-8": partial(
        flipped, find=lambda content: content.index(b"prompt_id") + 1, bits=0x9B
    ),
}


# --- models and templates ---------------------------------------------------------------------


def model(
    intact: Path,
    files: Path,
    *,
    file: str,
    change: Callable[[Any], Any],
    place: str,
    source: str = "model",
) -> Case:
    """Convert a model of which one JSON file is changed."""
    shutil.copytree(intact / source, files / "model")
    _json_file(files / "model" / file, change)
    target = files / "target"
    return Case(["convert", str(files / "model"), str(target)], (file, place), True, target)


def _wrong_shard(tree: Any) -> None:
    shards = sorted(set(tree["weight_map"].values()))
    name = min(tree["weight_map"])
    tree["weight_map"][name] = next(s for s in shards if s != tree["weight_map"][name])


def integer_weights(intact: Path, files: Path, *, command: str) -> Case:
    """A tensor of integers."""
    shutil.copytree(intact / "model", files / "model")
    path = files / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": torch.ones(64, dtype=torch.int64)}, path)
    given = ["convert", str(files / "model"), str(files / "target")]
    if command == "train":
        replay = [f"replay={intact / 'dumps'}", f"run_dir={files / 'run'}", "log.console=false"]
        given = ["train", str(intact / "replay.yaml"), f"model.path={files / 'model'}", *replay]
    return Case(given, ("model.norm.weight",), is_wrong=True)


def no_tokenizer(intact: Path, files: Path, *, content: str | None) -> Case:
    """Show prompts with a model whose tokenizer is missing, or empty."""
    shutil.copytree(intact / "model", files / "model")
    for path in (files / "model").glob("tokenizer*"):
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
    return Case(
        [*SHOW, str(intact / "run.yaml"), f"model.path={files / 'model'}"], ("model",), True
    )


INDEX = "model.safetensors.index.json"
MODELS: dict[str, Any] = {
    "weight_map that is a list": partial(
        model,
        source="sharded",
        file=INDEX,
        change=put_at("weight_map", value=[]),
        place="weight_map",
    ),
    "weight_map that names the wrong shard": partial(
        model, source="sharded", file=INDEX, change=_wrong_shard, place="model"
    ),
    "a billion layers": partial(
        model, file="config.json", change=put_at("num_hidden_layers", value=10**9), place="layers"
    ),
    "a vocabulary of 10^12": partial(
        model, file="config.json", change=put_at("vocab_size", value=10**12), place="vocab_size"
    ),
    "integer weights in convert": partial(integer_weights, command="convert"),
    "integer weights in train": partial(integer_weights, command="train"),
    "empty tokenizer": partial(no_tokenizer, content="{}"),
    "no tokenizer": partial(no_tokenizer, content=None),
    **{
        f"template: {text[:24]}": partial(template_of, text=text)
        for text in (
            *("{{", "{{ 1 // 0 }}", "{{ messages | nothing }}", "{% include 'x' %}"),
            *(
                "{{ raise_exception('no') }}",
                "{{ lipsum.__globals__ }}",
                "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            ),
            *("{{ 'x' * 10 ** 10 }}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"),
        )
    },
}


# --- files and options ------------------------------------------------------------------------


def content_of(intact: Path, files: Path, *, name: str, content: bytes) -> Case:
    """Tokens for ``bounds`` in a file of another format."""
    (files / name).write_bytes(content)
    return Case(["bounds", str(files / name)], (name,), is_wrong=True)


def misnamed(intact: Path, files: Path) -> Case:
    """An archive with a flipped bit in the name that precedes a column."""
    content = bytearray((intact / "tokens.npz").read_bytes())
    content[content.index(b"advantage.npy") + len("advantage")] ^= 1
    (files / "tokens.npz").write_bytes(content)
    return Case(["bounds", str(files / "tokens.npz")], ("tokens.npz",), is_wrong=True)


def pickled(intact: Path, files: Path) -> Case:
    """An archive with objects, for which NumPy advises ``allow_pickle``."""
    columns = dict(np.load(intact / "tokens.npz"))
    np.savez(files / "tokens.npz", **{**columns, "advantage": np.array([{}, {}, {}])})
    return Case(["bounds", str(files / "tokens.npz")], ("tokens.npz",), is_wrong=True)


def prompts(intact: Path, files: Path, *, name: str, content: bytes | None) -> Case:
    """A file of prompts; None for a symbolic link to itself."""
    path = files / name
    if content is None:
        path.symlink_to(name)
    else:
        path.write_bytes(content)
    return Case([*SHOW, str(intact / "run.yaml"), f"data.train.path={path}"], (name,), True)


def timestamps(intact: Path, files: Path) -> Case:
    """A column of dates beyond Python's, which reward functions would get."""
    table = pq.read_table(intact / "train.parquet")
    column = pa.array([2**62] * len(table), pa.int64()).view(pa.timestamp("us"))
    pq.write_table(table.append_column("when", column), files / "train.parquet")
    path = files / "train.parquet"
    return Case([*SHOW, str(intact / "run.yaml"), f"data.train.path={path}"], (path.name,), False)


def resumed(
    intact: Path,
    files: Path,
    *,
    file: str,
    change: bytes | Callable[[Any], Any],
    place: str,
    is_wrong: bool = True,
) -> Case:
    """Continue a run of which a file of the checkpoint is changed."""
    shutil.copytree(intact / "run", files / "run")
    path = files / "run" / "checkpoints" / file
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        _json_file(path, change)
    given = ["train", str(intact / "replay.yaml"), f"run_dir={files / 'run'}", "resume=true"]
    return Case([*given, "log.console=false"], (path.name, place), is_wrong=is_wrong)


def metrics(intact: Path, files: Path) -> Case:
    """Metrics that are not UTF-8."""
    (files / "run").mkdir()
    (files / "run" / "metrics.jsonl").write_bytes(b'{"step": 1, "reward/mean": 1\xff}\n')
    target = files / "picture.png"
    return Case(
        ["plot", str(files / "run"), "--out", str(target)], ("metrics.jsonl",), True, target
    )


def chain(intact: Path, files: Path) -> Case:
    """Two thousand files that inherit from one another."""
    for number in range(2000):
        (files / f"{number}.yaml").write_text(yaml.safe_dump({"inherit": f"{number + 1}.yaml"}))
    shutil.copy(intact / "base.yaml", files / "2000.yaml")
    return Case(["config", str(files / "0.yaml")], ("yaml",), is_wrong=True)


def option(intact: Path, files: Path, *, given: str, place: str) -> Case:
    """An override."""
    return Case(["config", str(intact / "run.yaml"), given], (place,), is_wrong=True)


def file_size(intact: Path, files: Path) -> Case:
    """Files of a size that is no number."""
    target = files / "target"
    given = ["convert", str(intact / "model"), str(target), "--max-file-gb", "inf"]
    return Case(given, ("--max-file-gb",), True, target)


def _without(name: str) -> Callable[[Any], Any]:
    return lambda tree: {key: value for key, value in tree.items() if key != name}


STATE = "step_1/state.json"
FILES: dict[str, Any] = {
    "npy under npz": partial(content_of, name="tokens.npz", content=harm.OTHER_FORMATS["npy"]),
    "pickle under npz": partial(content_of, name="t.npz", content=harm.OTHER_FORMATS["pickle"]),
    "npz of objects": pickled,
    "npz with a flipped name": misnamed,
    "npy under parquet": partial(content_of, name="t.parquet", content=harm.OTHER_FORMATS["npy"]),
    "zip under jsonl": partial(prompts, name="p.jsonl", content=harm.OTHER_FORMATS["zip"]),
    "JSON nested deeply": partial(prompts, name="p.json", content=b"[" * harm.DEEP),
    "number of 5,000 digits": partial(
        prompts, name="p.json", content=b'[{"prompt": "1", "answer": %b}]' % harm.DIGITS.encode()
    ),
    "symbolic link to itself": partial(prompts, name="p.jsonl", content=None),
    "dates beyond Python's": timestamps,
    "binary latest": partial(
        resumed, file="latest", change=b"\xff\x00\xfe", place="latest", is_wrong=False
    ),
    "state without a field": partial(
        resumed, file=STATE, change=_without("layout"), place="layout"
    ),
    "state with an unknown field": partial(
        resumed, file=STATE, change=put_at("other", value=1), place="other"
    ),
    "metrics that are not UTF-8": metrics,
    "chain of 2,000 files": chain,
    "seed of 10^30": partial(option, given=f"seed={10**30}", place="seed"),
    "seed of 5,000 digits": partial(option, given=f"seed={harm.DIGITS}", place="seed"),
    "time limit of 1e300 s": partial(option, given="reward.timeout_s=1e300", place="timeout_s"),
    "time limit of infinity": partial(option, given="reward.timeout_s=.inf", place="timeout_s"),
    "NUL in a path": partial(option, given='model.path="a\\0b"', place="model.path"),
    "files of infinite size": file_size,
}


# --- evaluations ------------------------------------------------------------------------------


def samples(
    intact: Path,
    files: Path,
    *,
    change: Callable[[Any], Any],
    place: str,
    file: str = "sums.jsonl",
) -> Case:
    """Samples of which the second line, or the settings beside them, is changed."""
    for name in ("sums.jsonl", "sums.settings.json"):
        shutil.copy(intact / name, files / name)
    path, target = files / "sums.jsonl", files / "again"
    if file.endswith(".json"):
        _json_file(files / file, change)
    else:
        lines = path.read_text().splitlines()
        entry = json.loads(lines[1])
        lines[1] = json.dumps(change(entry) or entry)
        path.write_text("\n".join(lines) + "\n")
    return Case(["eval", "--from", str(path), "--out", str(target)], ("sums", place), True, target)


def given_twice(intact: Path, files: Path, *, copied: bool) -> Case:
    """One file of samples twice, or two sets of one name."""
    target, second = files / "again", intact / "sums.jsonl"
    if copied:
        second = files / "sums.jsonl"
        shutil.copy(intact / "sums.settings.json", files / "sums.settings.json")
        shutil.copy(intact / "sums.jsonl", second)
    given = ["eval", "--from", str(intact / "sums.jsonl"), "--from", str(second)]
    return Case([*given, "--out", str(target)], ("sums",), True, target)


def results(intact: Path, files: Path, *, change: Callable[[Any], Any]) -> Case:
    """Compare results that are changed."""
    shutil.copy(intact / "eval.json", files / "eval.json")
    _json_file(files / "eval.json", change)
    given = ["compare", str(files / "eval.json"), str(intact / "eval.json"), "--resamples", "100"]
    return Case(given, ("eval.json", "rewards"), is_wrong=True)


REWARDS = (0, "problems", 0, "rewards")
EVALUATIONS: dict[str, Any] = {
    "setting of another type": partial(
        samples,
        file="sums.settings.json",
        change=put_at("samples_per_prompt", value="2"),
        place="samples_per_prompt",
    ),
    "sample number out of range": partial(
        samples, change=put_at("index", value=10**9), place="index"
    ),
    "two answers for one prompt": partial(
        samples, change=put_at("answer", value="9"), place="answer"
    ),
    "reward that is a text": partial(samples, change=put_at("reward", value="1"), place="reward"),
    "one file twice": partial(given_twice, copied=False),
    "two sets of one name": partial(given_twice, copied=True),
    "rewards that are texts": partial(results, change=put_at(*REWARDS, value=["1", "0"])),
    "fewer rewards than samples": partial(results, change=put_at(*REWARDS, value=[1.0])),
}
