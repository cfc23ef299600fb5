"""The first configuration for a model, a file of prompts and some GPUs."""

import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from bapo_megatron.config.check import check_data, check_model
from bapo_megatron.config.data import DataConfig, TrainSetConfig
from bapo_megatron.config.load import literal, parse_section
from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import PromptSet, load_train_sets
from bapo_megatron.data.rows import DataError, Row, RowFormat, read_rows, recognise
from bapo_megatron.policy.hf_config import HfConfig, read_hf_config_file
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.telemetry.console import say
from bapo_megatron.tools.planning.choice import choose_layout
from bapo_megatron.tools.planning.plan import Plan, PlanOptions

FILE_NAME = "run.yaml"
"""The configuration in DIR."""

_MAX_PROMPT_TOKENS = 4096
"""Longer prompts are left out; the limit is lower where all prompts are shorter."""
_MICRO_BATCH_TOKENS = 16384
_TOKENS_MULTIPLE = 64
"""Limits of tokens are rounded up to a multiple of it."""
_MAX_GROUPS_PER_STEP = 64
_UPDATES_PER_BATCH = 4
_LONG_ANSWER_CHARS = 100
"""A longer answer is hardly a number or a formula."""
_BOX_REQUEST = "\nPut your final answer in \\boxed{}."
_PLAIN = re.compile(r"[A-Za-z/_][\w./-]*")
"""Texts that need no quotes, unless YAML reads them as another type."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What was read from the model and the prompts."""

    hf: HfConfig
    stored_dtype: object
    """The type in config.json; None where there is none."""
    row_format: RowFormat
    data: DataConfig
    """With a suffix unless the first prompt asks for a box by itself."""
    prompts: PromptSet


def write_first_config(
    directory: Path,
    model: Path,
    train_set: TrainSetConfig,
    options: PlanOptions,
    *,
    gpus: int,
    response_tokens: int,
) -> str:
    """Write ``directory/run.yaml``, a commented configuration; return what to run next.

    Raises:
        ValueError: The file exists, the model or the data cannot be used, or nothing fits the GPUs.
    """
    target = directory / FILE_NAME
    if os.path.lexists(target):
        raise ValueError(f"{target}: exists and is not overwritten; remove it, or give another DIR")
    found = _look_at(ModelConfig(path=model), train_set)
    draft = _draft(directory, model, found, response_tokens)
    config, plan = choose_layout(draft, found.hf, options, gpus)
    text = _as_yaml(config, found, plan, gpus)
    settings = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    written = parse_section(RunConfig, settings, str(target))
    assert written == config, "the file says what was planned"
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_text(target, text)
    for line in found.prompts.report.warnings():
        say(line)
    next_commands = _next_commands(target, plan, gpus)
    return f"wrote {target}; look through it, and then\n\n{next_commands}"


def _look_at(model: ModelConfig, train_set: TrainSetConfig) -> _Found:
    """Read the model's config.json and tokenizer and every prompt.

    Raises:
        ValueError: Something is missing or unknown; one line with the remedy.
    """
    raw = check_model(model)
    hf = read_hf_config_file(model.path / "config.json")
    data = DataConfig(
        train=train_set,
        max_prompt_tokens=min(_MAX_PROMPT_TOKENS, hf.max_position_embeddings // 2),
    )
    check_data(RunConfig(name="init", run_dir=Path(), model=model, data=data))
    row, row_format = _first_row(train_set)
    tokenizer = load_tokenizer(model.path)
    text, _, _ = row_format.read(row, (), set(), ChatRenderer(tokenizer, data).text)
    names: dict[str, str] = {"row_format": row_format.name}
    if row_format.name == "columns":
        names = {n: getattr(row_format, n) for n in ("prompt_column", "answer_column")}
    suffix = "" if "\\boxed" in text else _BOX_REQUEST
    train_set = train_set.model_copy(update=names)
    data = data.model_copy(update={"train": train_set, "prompt_suffix": suffix})
    [prompts] = load_train_sets(data, ChatRenderer(tokenizer, data))
    return _Found(hf, raw.get("dtype") or raw.get("torch_dtype"), row_format, data, prompts)


def _first_row(train_set: TrainSetConfig) -> tuple[Row, RowFormat]:
    """The first row of a set, and the set's format by it."""
    row = next(read_rows(train_set), None)
    if row is None or row.fields is None:
        problem = "no row" if row is None else row.problem
        raise DataError(f"{train_set.path}: {problem}; give a file of prompts with answers")
    row_format = recognise(train_set, row.fields)
    if row_format is None:
        raise DataError(
            f"{row.place}: no known columns for question and answer among "
            f"{', '.join(row.fields) or '(none)'}; name them by --prompt-column and "
            "--answer-column, or rename them to prompt and answer (docs/data.md)"
        )
    return row, row_format


def _draft(directory: Path, model: Path, found: _Found, response_tokens: int) -> RunConfig:
    """Return the configuration without a layout; lengths and batch size follow from ``found``."""
    positions, report = found.hf.max_position_embeddings, found.prompts.report
    prompt = min(_rounded_up(report.longest_tokens, _TOKENS_MULTIPLE), report.max_prompt_tokens)
    response = min(response_tokens, positions - prompt)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(os.path.realpath(directory)).name) or "run"
    whole_updates = len(found.prompts.prompts) // _UPDATES_PER_BATCH * _UPDATES_PER_BATCH
    groups = max(_UPDATES_PER_BATCH, min(_MAX_GROUPS_PER_STEP, whole_updates))
    return RunConfig.model_validate(
        {
            "name": name,
            "run_dir": directory / "run",
            "model": {
                "path": model,
                "dtype": "float32" if found.stored_dtype == "float32" else "bfloat16",
            },
            "data": found.data.model_copy(update={"max_prompt_tokens": prompt}),
            "rollout": {
                "groups_per_step": groups,
                "samples_per_group": 8,
                "max_response_tokens": response,
            },
            "algorithm": {"objective": "bapo", "updates_per_batch": _UPDATES_PER_BATCH},
            "optimizer": {"lr": 1e-6},
            "train": {
                "steps": 100,
                "max_tokens_per_micro_batch": max(
                    _MICRO_BATCH_TOKENS, _rounded_up(prompt + response, _TOKENS_MULTIPLE)
                ),
            },
            "checkpoint": {"every_steps": 20},
        }
    )


def _as_yaml(config: RunConfig, found: _Found, plan: Plan, gpus: int) -> str:
    """The file: every key with the reason for its value."""
    rollout, report = config.rollout, found.prompts.report
    response, dtype, stored = rollout.max_response_tokens, config.model.dtype, found.stored_dtype
    told = f"its config.json says {shown_value(stored)}" if stored else "its config.json names none"
    needed_gb = max(plan.worst_stage.total_bytes, plan.sampling_bytes) / 1e9
    hardware = plan.assumptions
    lines = [
        f"# By `bapo-megatron init` for {gpus} {hardware.gpu}. {_division(plan, gpus)}",
        "# Paths are relative to the directory in which commands are run. All keys with their",
        "# meaning: bapo-megatron config",
        ("name: " + _scalar(config.name), ""),
        ("run_dir: " + _scalar(config.run_dir), "everything that the run writes; one run each"),
        "model:",
        ("  path: " + _scalar(config.model.path), f"{plan.model_parameters:,} parameters"),
        (f"  dtype: {dtype}", "as its config.json says" if stored == dtype else told),
        *_layout_lines(config, f"{needed_gb:.0f} of {hardware.gpu_memory_bytes / 1e9:.0f} GB"),
        "data:",
        "  train:",
        ("    path: " + _scalar(report.place), f"{len(found.prompts.prompts):,} prompts"),
        *_set_lines(found),
        (
            f"  max_prompt_tokens: {config.data.max_prompt_tokens}",
            f"the longest has {report.longest_tokens:,}; longer ones are left out",
        ),
        *_suffix_lines(config.data.prompt_suffix),
        "rollout:",
        (f"  groups_per_step: {rollout.groups_per_step}", "prompts of a step"),
        (
            f"  samples_per_group: {rollout.samples_per_group}",
            "responses to each, which are compared with each other",
        ),
        (
            f"  max_response_tokens: {response}",
            f"longer ones are cut; the model has {found.hf.max_position_embeddings:,} positions",
        ),
        *_rollout_lines(config),
        *_reward_lines(found),
        "algorithm:",
        ("  objective: bapo", "clip is GRPO; docs/objectives.md has the others"),
        (
            f"  updates_per_batch: {config.algorithm.updates_per_batch}",
            "more of them learn more from a batch, with older samples",
        ),
        "optimizer:",
        (f"  lr: {config.optimizer.lr:.1e}", "cautious; the paper has 2e-6 for 7B"),
        "train:",
        (f"  steps: {config.train.steps}", ""),
        (
            f"  max_tokens_per_micro_batch: {config.train.max_tokens_per_micro_batch}",
            "of one rank; a prompt with its response must fit",
        ),
        "checkpoint:",
        (f"  every_steps: {config.checkpoint.every_steps}", "what a crash costs at most"),
        "# For held-out accuracy add another file, of the same format as the training data:",
        f"# eval: {{sets: [{{path: FILE}}], every_steps: 10, max_response_tokens: {response}}}",
    ]
    pairs = [line if isinstance(line, tuple) else (line, "") for line in lines]
    return "".join(f"{key:<35} # {why}\n" if why else f"{key}\n" for key, why in pairs)


def _division(plan: Plan, gpus: int) -> str:
    place, layout = plan.assumptions.placement, plan.layout
    if place == "colocated":
        return "All of them sample and train in turns."
    if place == "same node":
        return f"{layout.gpus} of them train, the others sample."
    node_gpus = plan.assumptions.node_gpus
    return f"{layout.gpus // node_gpus} of {gpus // node_gpus} nodes train, the others sample."


def _layout_lines(config: RunConfig, needs: str) -> list[tuple[str, str]]:
    parallel, why = config.parallel, f"`plan`: {needs} on the fullest GPU"
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context")
    lines = [(f"  {s}: {getattr(parallel, s)}", "") for s in sizes if getattr(parallel, s) > 1]
    if parallel.sequence:
        lines.append(("  sequence: true", "divides what lies between the products, too"))
    found = [("parallel:", why), *lines] if lines else [("parallel: {}", f"{why}; whole on each")]
    if config.megatron.recompute != "none":
        found += [("megatron:", ""), ("  recompute: full", "saves memory, costs a quarter more")]
    return found


def _set_lines(found: _Found) -> list[tuple[str, str]]:
    row_format, [train_set] = found.row_format, found.data.train_sets
    columns = f"columns {row_format.prompt_column} and {row_format.answer_column}"
    name = [("    name: " + train_set.name, "of all these files")] if train_set.name else []
    if row_format.name != "columns":
        return [*name, (f"    row_format: {row_format.name}", columns)]
    return [
        *name,
        ("    prompt_column: " + _scalar(row_format.prompt_column), ""),
        ("    answer_column: " + _scalar(row_format.answer_column), ""),
    ]


def _suffix_lines(suffix: str) -> list[tuple[str, str]]:
    if not suffix:
        return [("  # The prompts ask for a \\boxed answer by themselves: no prompt_suffix.", "")]
    return [("  prompt_suffix: " + _scalar(suffix), "math looks for a box first")]


def _rollout_lines(config: RunConfig) -> list[tuple[str, str]]:
    rollout, server = config.rollout, config.rollout.server
    lines = []
    if rollout.colocated:
        lines += [
            ("  colocated: true", "servers release their memory while the trainer works"),
            ("  weight_sync: {method: tensor}", "NCCL has no group of two processes on one GPU"),
        ]
    else:
        lines += [(f"  async_steps: {rollout.async_steps}", "sample the next step meanwhile")]
    lines += [("  server:", ""), (f"    count: {server.count}", "per node")]
    if server.tensor > 1:
        lines += [(f"    tensor: {server.tensor}", "GPUs of each server, for the longest sequence")]
    if server.first_gpu:
        lines += [(f"    first_gpu: {server.first_gpu}", "those before it train")]
    if rollout.colocated:
        lines += [(f"    mem_fraction: {server.mem_fraction:g}", "beside what the trainer keeps")]
    return lines


def _reward_lines(found: _Found) -> list[tuple[str, str]]:
    prompts = found.prompts.prompts
    long = sum(len(prompt.answer) > _LONG_ANSWER_CHARS for prompt in prompts)
    why = "1 if the answer is right, else 0; or package.module:function"
    lines = [
        ("reward:", ""),
        ("  functions:", why),
        ("    - {name: math, function: math}", ""),
    ]
    if 2 * long > len(prompts):
        note = "  # Most answers are long texts, which math cannot grade: name a function of yours."
        lines.insert(1, (note, ""))
    return lines


def _next_commands(target: Path, plan: Plan, gpus: int) -> str:
    run, node_gpus = "python -m bapo_megatron", plan.assumptions.node_gpus
    file, ranks = shlex.quote(str(target)), plan.layout.gpus
    hardware = f"--gpus {ranks} --gpu {plan.assumptions.gpu}"
    if node_gpus != PlanOptions().node_gpus:
        hardware += f" --node-gpus {node_gpus}"
    if gpus > node_gpus:
        hardware += f" --rollout-gpus {gpus - ranks}"
    commands = (f"data show {file}", f"config {file}", f"plan {file} {hardware}")
    lines = [f"{run} {each}" for each in commands]
    if gpus <= node_gpus:
        start = f"{run}.torchrun --nproc-per-node {ranks} -m bapo_megatron" if ranks > 1 else run
        lines.append(f"{start} train {file} --resume")
    else:
        nodes, server_nodes = ranks // node_gpus, (gpus - ranks) // node_gpus
        lines += [
            f"# on every node that samples (in all {server_nodes}; docs/launch.md):",
            f"HOST=ADDRESS examples/rollout_servers.sh {file} rollout.server.port=30000",
            f"# on every node that trains (NODE_RANK 0 to {nodes - 1}), as the servers print:",
            f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=ADDRESS examples/multi_node.sh {file} "
            "'rollout.servers=[…]'",
        ]
    return "\n".join(lines)


def _scalar(value: str | Path) -> str:
    text = str(value)
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    quoted: str = yaml.safe_dump(
        literal(text), default_style='"', allow_unicode=True, width=math.inf
    )
    return quoted.rstrip("\n")


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
