"""Known cases of bad input, by name; each has been a traceback or a silent error."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.fuzz import mutations as harm
from tests.fuzz.forks import Case
from tests.fuzz.kinds import (
    COMPARE,
    CONVERT,
    DUMP,
    GRADE_AGAIN,
    METADATA,
    REPLAY,
    REPORT,
    RESUME,
    SHOW,
    SHOW_DUMP,
)


@dataclass(frozen=True)
class Known:
    """A command on copies of intact files that are changed."""

    command: str | list[str]
    places: tuple[str, ...]
    change: Callable[[Path], Any] = lambda files: None
    """Gets the directory of the case's files."""
    copies: str = ""
    """Names of the files and directories, divided by spaces."""
    target: str = ""
    is_wrong: bool = True

    def make(self, intact: Path, files: Path) -> Case:
        harm.copied(intact, files, *self.copies.split())
        self.change(files)
        return Case(self.command, self.places, self.is_wrong, self.target)


# --- changes of files -------------------------------------------------------------------------


def put_at(*place: Any, value: Any) -> Callable[[Any], Any]:
    return lambda tree: harm.put(tree, place, value)


def written(name: str, content: bytes) -> Callable[[Path], None]:
    """Another content of a file."""

    def change(files: Path) -> None:
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(content)

    return change


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else in place of a file."""

    def change(files: Path) -> None:
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).unlink(missing_ok=True)
        make(files / name)

    return change


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


piped = partial(replaced, make=os.mkfifo)
"""A named pipe in place of a file; nobody writes into it."""
looped = partial(replaced, make=link_to_itself)


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Another value in a JSON file."""
    return lambda files: harm.edit_json(files / name, change)


# --- rollout dumps ----------------------------------------------------------------------------


def cell(column: str, value: Any, element: int | None = None) -> Known:
    """Another value in the first row of a dump, or in its list."""

    def change(files: Path) -> None:
        table = pq.read_table(files / "dumps" / DUMP)
        values, kind = table[column].to_pylist(), table.schema.field(column).type
        values[0] = value if element is None else harm.put(values[0], (element,), value)
        table = harm.with_column(table, column, pa.array(values, kind))
        pq.write_table(table, files / "dumps" / DUMP)

    return Known(REPLAY, (DUMP, "sample 0 of group 0", column), change, "dumps")


def metadata(change: Callable[[bytes], bytes | None]) -> Known:
    """Other metadata; None for none at all."""

    def write(files: Path) -> None:
        table = pq.read_table(files / "dumps" / DUMP)
        content = change(table.schema.metadata[METADATA])
        stored = None if content is None else {METADATA: content}
        pq.write_table(table.replace_schema_metadata(stored), files / "dumps" / DUMP)

    return Known(REPLAY, (DUMP, METADATA.decode()), write, "dumps")


def flipped(name: str, find: Callable[[bytes], int], bits: int) -> Callable[[Path], None]:
    """A file with flipped bits in one byte."""

    def change(files: Path) -> None:
        content = bytearray((files / name).read_bytes())
        content[find(content)] ^= bits
        (files / name).write_bytes(content)

    return change


def flipped_dump(find: Callable[[bytes], int], bits: int) -> Known:
    return Known(SHOW_DUMP, (DUMP,), flipped(f"dumps/{DUMP}", find, bits), "dumps")


DUMPS = {
    "token outside the vocabulary": cell("response_token_ids", 10**6, element=0),
    "null token": cell("response_token_ids", None, element=0),
    "version above the batch's": cell("versions", 1000, element=0),
    "NaN reward": cell("reward", float("nan")),
    "component that is a text": cell("reward_components", '{"a": "1"}'),
    "component that is a list": cell("reward_components", "[1]"),
    "no metadata": metadata(lambda _: None),
    "broken metadata": metadata(lambda content: content[:17]),
    "flipped byte in metadata": metadata(lambda content: content.replace(b":", b"\xba")),
    "metadata nested deeply": metadata(lambda _: b"[" * harm.DEEP),
    "flipped length of the footer": flipped_dump(lambda _: -6, 1),
    "column name that is not UTF-8": flipped_dump(lambda c: c.index(b"prompt_id") + 1, 0x9B),
}


# --- models and templates ---------------------------------------------------------------------


def model_config(place: str, change: Callable[[Any], Any]) -> Known:
    """Convert a model with another config.json."""
    edit = edited("model/config.json", change)
    return Known(CONVERT, ("config.json", place), edit, "model", "target")


def integer_weights(files: Path) -> None:
    path = files / "model/model.safetensors"
    norm = {"model.norm.weight": torch.ones(64, dtype=torch.int64)}
    save_file({**load_file(path), **norm}, path)


def empty_tokenizer(files: Path) -> None:
    for path in (files / "model").glob("tokenizer*"):
        path.write_text("{}")


def no_tokenizer(files: Path) -> None:
    for path in (files / "model").glob("tokenizer*"):
        path.unlink()


INDEX = "model.safetensors.index.json"
OWN_MODEL = " model.path={files}/model"
RUN_ON_DUMPS = REPLAY.replace("{files}/dumps", "{intact}/dumps") + OWN_MODEL
TEMPLATES = (
    *("{{", "{% for %}", "{{ messages | nothing }}", "{{ 1 // 0 }}", "{{ messages[5].content }}"),
    *("{{ raise_exception('no') }}", "{{ undefined.field.field }}", "{{ messages.pop(9) }}"),
    *("{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{{ 1 < 'a' }}"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ""),
    *("{{ range(10 ** 10) | join }}", "{{ messages | sum }}", "{{ '%d' | format('x') }}"),
    *("{{ messages | tojson(indent=[]) }}", "{{ strftime_now(1) }}", "{{ 'a' + 1 }}"),
    *("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% for x in 1 %}{% endfor %}"),
    *("{% set x.y = 1 %}", "{{ ''.__class__.__mro__ }}"),
    *("{{ namespace(1) }}", "{{ lipsum.__globals__ }}", "{{ [1] | first(1, 2) }}"),
)
TEMPLATE = SHOW + " data.chat_template={files}/template.jinja"
MODELS = {
    "weight_map that is a list": Known(
        "convert sharded target",
        (INDEX, "weight_map"),
        edited(f"sharded/{INDEX}", put_at("weight_map", value=[])),
        "sharded",
        "target",
    ),
    "a billion layers": model_config("layers", put_at("num_hidden_layers", value=10**9)),
    "a vocabulary of 10^12": model_config("vocab_size", put_at("vocab_size", value=10**12)),
    "rope of two meanings": model_config("rope_theta", put_at("rope_theta", value=5.0)),
    "rope scaling that is a list": model_config("rope_scaling", put_at("rope_scaling", value=[])),
    **{
        f"integer weights in {command.split()[0]}": Known(
            command, ("model.norm.weight",), integer_weights, "model"
        )
        for command in (CONVERT, RUN_ON_DUMPS)
    },
    **{
        change.__name__: Known(SHOW + OWN_MODEL, ("model",), change, "model")
        for change in (empty_tokenizer, no_tokenizer)
    },
    **{
        f"{name} by {make.__name__}": Known(
            CONVERT, (name,), replaced(f"model/{name}", make), "model", "target"
        )
        for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
        for make in (os.mkdir, os.mkfifo, link_to_itself)
    },
    **{
        f"template: {text[:24]}": Known(
            TEMPLATE, ("template",), written("template.jinja", text.encode())
        )
        for text in TEMPLATES
    },
}


# --- files and options ------------------------------------------------------------------------


def tokens(name: str, content: bytes) -> Known:
    """Tokens for ``bounds`` in a file of another format."""
    return Known(f"bounds {name}", (name,), written(name, content))


def prompts(name: str, change: Callable[[Path], Any]) -> Known:
    return Known(f"{SHOW} data.train.path={{files}}/{name}", (name,), change)


def resumed(name: str, change: Callable[[Path], Any], place: str, is_wrong: bool = True) -> Known:
    """Continue a run of which a file of the checkpoint is changed."""
    return Known(RESUME, (Path(name).name, place), change, "run", is_wrong=is_wrong)


def chain(files: Path) -> None:
    """Two thousand files that inherit from one another."""
    for number in range(2000):
        (files / f"{number}.yaml").write_text(f"inherit: {number + 1}.yaml\n")
    (files / "base.yaml").rename(files / "2000.yaml")


def without_layout(tree: Any) -> None:
    del tree["layout"]


STATE = "run/checkpoints/step_1/state.json"
INIT = "--model {intact}/model --data {intact}/train.jsonl"
FILES = {
    "npy under parquet": tokens("t.parquet", harm.OTHER_FORMATS["npy"]),
    "zip under jsonl": prompts("p.jsonl", written("p.jsonl", harm.OTHER_FORMATS["zip"])),
    "JSON nested deeply": prompts("p.json", written("p.json", b"[" * harm.DEEP)),
    "number of 5,000 digits": prompts("p.json", written("p.json", harm.DIGITS.encode())),
    "symbolic link to itself": prompts("p.jsonl", looped("p.jsonl")),
    "dates beyond Python's": Known(
        SHOW + " data.train.path={files}/train.parquet",
        ("train.parquet",),
        lambda files: harm.dates(files / "train.parquet", 2**62, pa.timestamp("us")),
        "train.parquet",
        is_wrong=False,
    ),
    "binary latest": resumed(
        "latest", written("run/checkpoints/latest", b"\xff\x00\xfe"), "latest", is_wrong=False
    ),
    "state without a field": resumed(STATE, edited(STATE, without_layout), "layout"),
    "state with an unknown field": resumed(STATE, edited(STATE, put_at("other", value=1)), "other"),
    "metrics that are not UTF-8": Known(
        REPORT,
        ("metrics.jsonl",),
        written("run/metrics.jsonl", b'{"step": 1, "reward/mean": 1\xff}\n'),
        target="page.html",
    ),
    "chain of 2,000 files": Known("config 0.yaml", ("yaml",), chain, "base.yaml"),
    **{
        f"option {text[:40]}": Known(["config", "{intact}/run.yaml", text], (place,))
        for text, place in (
            (f"seed={10**30}", "seed"),
            ("reward.timeout_s=1e300", "timeout_s"),
            ("reward.timeout_s=.inf", "timeout_s"),
            ("reward.workers=100000000", "reward.workers"),
            ("reward.memory_limit_mb=9007199254740992", "memory_limit"),
            ('reward.format={reward: 1, pattern: "a{99999999999}"}', "pattern"),
            (f'reward.format={{reward: 1, pattern: "{"(" * 3000 + ")" * 3000}"}}', "pattern"),
            ('model.path="a\\0b"', "model.path"),
        )
    },
    "files of infinite size": Known(
        CONVERT + " --max-file-gb inf", ("--max-file-gb",), copies="model", target="target"
    ),
    "sweep of 399³ runs": Known("sweep {intact}/grid.yaml", ("grid",)),
    **{
        f"link to itself: {command.split()[0]}": Known(command, ("x",), looped("x"))
        for command in (
            f"init x {INIT} --gpus 1",
            "convert {intact}/model x",
            "eval --from {intact}/sums.jsonl --out x",
        )
    },
    **{
        ascii(command): Known(command, (place,))
        for command, place in (
            ("plan {intact}/run.yaml --gpus 1000000000000000000", "--gpus"),
            ("plan {intact}/run.yaml parallel.context=1000000000000", "parallel"),
            ("plan {intact}/run.yaml --gpu-memory inf", "--gpu-memory"),
            (f"init x {INIT} --gpus 1000000000000", "--gpus"),
            (f"init x {INIT} --gpus 1 --node-gpus {10**30}", "--node-gpus"),
            (f"init n\udcff\udcfew {INIT} --gpus 1", r"n\xff\xfew"),
            ("eval --from r\udcff.jsonl --out o", r"r\xff.jsonl"),
        )
    },
    "servers_file that is a named pipe": Known(
        "generate {intact}/run.yaml --steps 1 rollout.engine=sglang "
        "rollout.servers_file={files}/servers",
        ("servers", "named pipe"),
        piped("servers"),
    ),
    "bounds of a named pipe": Known(
        "bounds t.parquet", ("t.parquet", "named pipe"), piped("t.parquet")
    ),
}


# --- evaluations ------------------------------------------------------------------------------

SAMPLES = "sums.jsonl sums.settings.json"
SETTINGS = "sums.settings.json"


def sample(field: str, value: Any) -> Known:
    """Samples of which the second has another value."""

    def change(files: Path) -> None:
        harm.edit_line(files / "sums.jsonl", 1, put_at(field, value=value))

    return Known(GRADE_AGAIN, ("sums", field), change, SAMPLES, "again")


def setting(field: str, value: Any, place: str) -> Known:
    change = edited(SETTINGS, put_at(field, value=value))
    return Known(GRADE_AGAIN, ("sums", place), change, SAMPLES, "again")


def results(rewards: list[Any]) -> Known:
    """Compare results of which the first problem has other rewards."""
    change = edited("eval.json", put_at(0, "problems", 0, "rewards", value=rewards))
    return Known(COMPARE, ("eval.json", "rewards"), change, "eval.json")


def graded(fields: str, place: str) -> Known:
    line = f'{{"response": "1", {fields}}}'.encode()
    return Known("grade responses.jsonl", (place,), written("responses.jsonl", line))


TWICE = "eval --from {intact}/sums.jsonl --from "
EVALUATIONS = {
    "setting of another type": setting("samples_per_prompt", "2", "samples_per_prompt"),
    "workers in the settings of samples": setting("reward", {"workers": 10**9}, "'workers'"),
    "sample number out of range": sample("index", 10**9),
    "two answers for one prompt": sample("answer", "9"),
    "reward that is a text": sample("reward", "1"),
    "one file twice": Known(TWICE + "{intact}/sums.jsonl --out again", ("sums",), target="again"),
    "two sets of one name": Known(
        TWICE + "sums.jsonl --out again", ("sums",), copies=SAMPLES, target="again"
    ),
    "rewards that are texts": results(["1", "0"]),
    "fewer rewards than samples": results([1.0]),
    "settings of samples that are a named pipe": Known(
        GRADE_AGAIN, (SETTINGS, "named pipe"), piped(SETTINGS), "sums.jsonl"
    ),
    "finish reason that is a list": graded('"answer": "1", "finish_reason": []', "finish_reason"),
    "answer in 900 lists": graded(f'"answer": {"[" * 900}"1"{"]" * 900}', "'answer'"),
    "answer that ends in ####": graded('"answer": "x #### "', "'answer'"),
}


# --- run directories --------------------------------------------------------------------------

READERS = {
    "report": "report made --out page.html",
    "samples show": "samples show made",
    "compare": "compare {intact}/eval.json made",
}
FIRST_DUMP = "rollouts/step_000001.parquet"


def run(
    change: Callable[[Path], Any],
    reader: str = "report",
    places: tuple[str, ...] = (),
    is_wrong: bool = True,
) -> Known:
    """Read a run directory that is changed."""
    command = READERS[reader]
    target = command.partition("--out ")[2]
    return Known(command, places, lambda files: change(files / "made"), "made", target, is_wrong)


def configured(*place: str, value: Any) -> Callable[[Path], None]:
    """Another value in config.yaml, which then is of no version of the project."""

    def change(directory: Path) -> None:
        path = directory / "config.yaml"
        tree = harm.put(yaml.safe_load(path.read_text()), place, value)
        path.write_text(yaml.safe_dump({**tree, "former": 1}))

    return change


def measured(*rows: str) -> Callable[[Path], None]:
    return written("metrics.jsonl", "".join(f"{{{row}}}\n" for row in rows).encode())


def without_sets(directory: Path) -> None:
    for name in ("start", "step_6"):
        written(f"eval/{name}.json", b"[]")(directory)


DEEP_YAML = written("config.yaml", b"[" * 20_000)
ALIASED = written("config.yaml", b"a: &a\n  b: *a\n")
RUNS = {
    **{
        f"config.yaml {what}, in {reader}": run(change, reader, ("config.yaml",))
        for what, change in (("nested deeply", DEEP_YAML), ("of recursive aliases", ALIASED))
        for reader in ("report", "samples show")
    },
    **{
        f"{key} of {str(value)[:9]}, in {reader}": run(
            configured("algorithm", key, value=value), reader, is_wrong=False
        )
        for key, values in (
            ("advantage", (5, "nothing", ["a"])),
            ("baseline_shift", (None, "x", float("nan"), 10**400)),
            ("updates_per_batch", (None, [1], "x", 10**12)),
        )
        for value in values
        for reader in ("report", "samples show")
    },
    "interval with one end": run(
        measured('"step": 1, "eval/a/avg_at_k": 0.5, "eval/a/avg_at_k_low": 0.1'), is_wrong=False
    ),
    "address that cannot be parsed": run(
        configured("data", "train", "path", value="http://[::1"), is_wrong=False
    ),
    "rewards of 1e308": run(
        measured('"step": 1, "reward/mean": 1e308', '"step": 2, "reward/mean": -1e308'),
        places=("metrics.jsonl:1", "reward/mean"),
    ),
    **{
        f"{name} that is a named pipe, in {reader}": run(piped(name), reader, (name, "named pipe"))
        for name, reader in (
            ("config.yaml", "report"),
            ("config.yaml", "samples show"),
            ("metrics.jsonl", "report"),
            ("starts.jsonl", "report"),
            ("eval/start.json", "report"),
            (FIRST_DUMP, "samples show"),
            ("rollouts/texts/step_000001.parquet", "report"),
            ("tokens/step_000001_update_000.parquet", "report"),
        )
    },
    **{
        f"results without a set, in {reader}": run(without_sets, reader, ("eval/st", "must have"))
        for reader in ("report", "compare")
    },
    "tokenizer that is a named pipe": Known(
        "report made --tokenizer own",
        ("tokenizer.json", "named pipe"),
        piped("own/tokenizer.json"),
        "made",
    ),
    "starts.jsonl that is a symbolic link to itself": run(
        looped("starts.jsonl"), places=("starts.jsonl",)
    ),
    "run of a sweep whose configuration is a named pipe": Known(
        "sweep sweep.yaml",
        ("a/seed1/config.yaml", "named pipe"),
        piped("sweep/a/seed1/config.yaml"),
        "sweep.yaml",
    ),
}

KNOWN = {**DUMPS, **MODELS, **FILES, **EVALUATIONS, **RUNS}
