"""``bapo-megatron init``: the first configuration for a model, a file of prompts and some GPUs."""

import json
import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from omegaconf import OmegaConf

from bapo_megatron.commands.options import (
    GpuMemoryOption,
    GpuOption,
    HostMemoryOption,
    IgnoreFieldOption,
    LocalLayersOption,
    NodeGpusOption,
)
from bapo_megatron.config.check import check_data, check_model_dir
from bapo_megatron.config.data import DataConfig, TrainSetConfig, is_pattern
from bapo_megatron.config.load import literal, parse_section
from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.config.reward import RewardConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import with_values
from bapo_megatron.config.settings import flat_settings
from bapo_megatron.data.chat import ChatRenderer, load_tokenizer
from bapo_megatron.data.prompts import PromptSet, load_train_sets
from bapo_megatron.data.rows import DataError, Row, RowFormat, read_rows, recognise
from bapo_megatron.engine.load import load_kind
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.runtime.calls import shown_value
from bapo_megatron.runtime.files import atomic_write_text
from bapo_megatron.runtime.gpus import MAX_GPUS
from bapo_megatron.telemetry.console import say
from bapo_megatron.tools.planning.memory import model_parameters
from bapo_megatron.tools.planning.plan import (
    MIN_RESPONSE_TOKENS,
    MODES,
    Plan,
    PlanOptions,
    choose_layout,
)

_MAX_PROMPT_TOKENS = 4096
"""Longer prompts are dropped; the limit is lower where all prompts are shorter."""
_MICRO_BATCH_TOKENS = 16384
_TOKENS_MULTIPLE = 64
"""Limits of tokens are rounded up to a multiple of it."""
_MAX_GROUPS_PER_STEP = 64
_CPU_GROUPS_PER_STEP = 8
_CPU_MICRO_BATCH_TOKENS = 2048
_UPDATES_PER_BATCH = 4
_LONG_ANSWER_CHARS = 100
"""A longer answer is hardly a number or a formula."""
_BOX_REQUEST = "\nPut your final answer in \\boxed{}."
_PLAIN = re.compile(r"[A-Za-z/_][\w./-]*")
"""Texts that need no quotes, unless YAML reads them as another type."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What was read from the model and the prompts."""

    hf: HfConfig
    stored_dtype: object
    """The type in config.json; None where there is none."""
    row_format: RowFormat
    data: DataConfig
    """With a suffix unless the first prompt asks for a box by itself."""
    prompts: PromptSet
    warnings: list[str]


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Gets run.yaml and the run.")],
    model: Annotated[Path, typer.Option(help="Directory of a Hugging Face model.")],
    data: Annotated[Path, typer.Option(help="Prompts with answers: jsonl, json or parquet.")],
    gpus: Annotated[
        int,
        typer.Option(min=0, max=MAX_GPUS, help="GPUs for training and sampling; 0: CPU only."),
    ],
    gpu: GpuOption = "H100",
    gpu_memory: GpuMemoryOption = None,
    host_memory: HostMemoryOption = None,
    node_gpus: NodeGpusOption = 8,
    local_layers: LocalLayersOption = False,
    lora: Annotated[
        bool | None,
        typer.Option("--lora/--full", help="Adapters, or all weights; default: all if they fit."),
    ] = None,
    response_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum, within the model's positions; default: 8192, halved if the GPUs lack "
            f"memory, but at least {MIN_RESPONSE_TOKENS}; on a CPU: 256.",
        ),
    ] = None,
    prompt_column: Annotated[str, typer.Option(help="Default: by the file's columns.")] = "",
    answer_column: Annotated[str, typer.Option(help="Default: by the file's columns.")] = "",
    ignore_field: IgnoreFieldOption = None,
) -> None:
    """Write DIR/run.yaml, a commented first configuration, and print the next commands.

    Without GPUs, one rank trains on the CPU and samples by itself.
    """
    target = directory / "run.yaml"
    if os.path.lexists(target):
        raise ValueError(f"{target}: exists and is not overwritten; remove it, or give another DIR")
    train_set = TrainSetConfig(
        path=data,
        prompt_column=prompt_column or None,
        answer_column=answer_column or None,
        name="train" if is_pattern(data) else "",
    )
    policy = ModelConfig(path=model, ignored_config_fields=tuple(ignore_field or ()))
    options = PlanOptions(
        gpu=gpu,
        gpu_memory_gb=gpu_memory,
        host_memory_gb=host_memory,
        node_gpus=node_gpus,
        layers="local" if local_layers else "transformer-engine",
    )
    inputs = _read_inputs(policy, train_set)
    draft = _draft(directory, policy, inputs, response_tokens or (8192 if gpus else 256))
    if gpus:
        modes = tuple(MODES) if lora is None else ("lora" if lora else "full",)
        shortest = response_tokens or MIN_RESPONSE_TOKENS
        config, plan = choose_layout(
            draft, inputs.hf, options, gpus, modes=modes, min_response_tokens=shortest
        )
    else:
        config, plan = _on_cpu(draft), None
    text = _as_yaml(config, inputs, plan)
    settings = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    reread = parse_section(RunConfig, settings, str(target))
    assert reread == config, "the file says what was planned"
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_text(target, text)
    for line in (*inputs.warnings, *inputs.prompts.report.warnings()):
        say(line)
    if not any(model.glob("*.safetensors")):
        say(f"{model} has no *.safetensors yet, which config and train need; download them")
    values, before = flat_settings(config), flat_settings(draft)
    chosen = [
        f"  {key}={_scalar(values[key])}: {reason}\n"
        for key, reason in _reasons(config, inputs, plan).items()
        if key.startswith(_SAVINGS) and values[key] != before[key]
    ]
    needs = f"{_hardware(plan)}:\n{_peaks(plan)}\n" if plan is not None else ""
    savings = f"settings that save memory:\n{''.join(chosen)}" if chosen else ""
    next_commands = _next_commands(target, plan, options)
    typer.echo(f"wrote {target}; {needs}{savings}look through it, and then\n\n{next_commands}")


def _read_inputs(model: ModelConfig, train_set: TrainSetConfig) -> _Inputs:
    """Read the model's config.json and tokenizer and every prompt."""
    raw = check_model_dir(model.path, needs_weights=False)
    hf = read_hf_config_file(model.path / "config.json", model.ignored_config_fields)
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
    data = with_values(data, train=names, prompt_suffix=suffix)
    renderer = ChatRenderer(tokenizer, data)
    [prompts] = load_train_sets(data, renderer, RewardConfig())
    stored_dtype = raw.get("dtype") or raw.get("torch_dtype")
    return _Inputs(hf, stored_dtype, row_format, data, prompts, renderer.warnings())


def _first_row(train_set: TrainSetConfig) -> tuple[Row, RowFormat]:
    """The first row of a set, and the format recognised from it."""
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


def _draft(directory: Path, model: ModelConfig, inputs: _Inputs, response_tokens: int) -> RunConfig:
    """Return the configuration without a layout; lengths and batch size follow from ``inputs``."""
    positions, report = inputs.hf.max_position_embeddings, inputs.prompts.report
    prompt = min(_rounded_up(report.longest_tokens, _TOKENS_MULTIPLE), report.max_prompt_tokens)
    response = min(response_tokens, positions - prompt)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(os.path.realpath(directory)).name) or "run"
    whole_updates = len(inputs.prompts.prompts) // _UPDATES_PER_BATCH * _UPDATES_PER_BATCH
    groups = max(_UPDATES_PER_BATCH, min(_MAX_GROUPS_PER_STEP, whole_updates))
    return RunConfig.model_validate(
        {
            "name": name,
            "run_dir": directory / "run",
            "model": {
                "path": model.path,
                "dtype": "float32" if inputs.stored_dtype == "float32" else "bfloat16",
                "ignored_config_fields": model.ignored_config_fields,
            },
            "data": inputs.data.model_copy(update={"max_prompt_tokens": prompt}),
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


def _on_cpu(draft: RunConfig) -> RunConfig:
    """The configuration for one rank without a GPU: float32, small batches, no server."""
    longest = draft.data.max_prompt_tokens + draft.rollout.max_response_tokens
    tokens = max(_CPU_MICRO_BATCH_TOKENS, _rounded_up(longest, _TOKENS_MULTIPLE))
    config = with_values(
        draft,
        model={"dtype": "float32"},
        rollout={
            "engine": "local",
            "groups_per_step": min(draft.rollout.groups_per_step, _CPU_GROUPS_PER_STEP),
        },
        train={"max_tokens_per_micro_batch": tokens},
    )
    load_kind("local").check(config)
    return config


def _hardware(plan: Plan) -> str:
    """Which GPUs train, and which sample."""
    hardware, num_training = f"for {plan.gpus} {plan.assumptions.gpu.name}", plan.trainer_gpus
    if num_training < plan.gpus:
        return f"{hardware}: {num_training} train, {plan.gpus - num_training} sample"
    both = "trains and samples" if plan.gpus == 1 else "train and sample"
    return f"{hardware}, which {both} in turns"


def _peaks(plan: Plan) -> str:
    """The peaks of both phases on the fullest GPU, in GB, and what a node's host memory holds."""
    phases = {"training": plan.worst_stage.total_bytes, "sampling": plan.sampling_bytes}
    peaks = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in phases.items() if size)
    text = f"Peak memory by `plan`: {peaks} of {plan.assumptions.gpu_memory_bytes / 1e9:.0f} GB"
    host_gb = plan.host_bytes_per_node / 1e9
    return f"{text}; host memory {host_gb:,.0f} GB per node" if host_gb else text


def _as_yaml(config: RunConfig, inputs: _Inputs, plan: Plan | None) -> str:
    """The file: the keys of ``_reasons`` that are always shown or differ from their default."""
    changed = flat_settings(config.model_dump(mode="json", exclude_defaults=True))
    values = flat_settings(config)
    values["reward.functions"] = [{"name": "math", "function": "math"}]
    lines = ["# By `bapo-megatron init` for a CPU: one process trains and samples in turns."]
    if plan is not None:
        lines = [f"# By `bapo-megatron init` {_hardware(plan)}.", f"# {_peaks(plan)}."]
    lines += [
        "# Paths are relative to the directory in which commands are run. All keys with their",
        "# meaning: bapo-megatron config",
    ]
    above: list[str] = []
    for key, why in _reasons(config, inputs, plan).items():
        if key not in changed and (key not in _ALWAYS or (plan is None and "server" in key)):
            continue
        *parents, name = key.split(".")
        for depth, section in enumerate(parents):
            if parents[: depth + 1] != above[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        above = parents
        line = f"{'  ' * len(parents)}{name}: {_scalar(values[key])}"
        lines.append(f"{line:<35} # {why}" if why else line)
    lines += [
        "# For held-out accuracy add another file, of the same format as the training data:",
        "# eval: {sets: [{path: FILE}], every_steps: 10}",
    ]
    return "".join(f"{line}\n" for line in lines)


_ALWAYS = {
    *("model.dtype", "data.max_prompt_tokens", "rollout.groups_per_step"),
    *("rollout.samples_per_group", "rollout.max_response_tokens", "rollout.server.count"),
    *("reward.functions", "algorithm.objective", "algorithm.updates_per_batch", "optimizer.lr"),
    *("train.steps", "train.max_tokens_per_micro_batch"),
}
"""Keys that are written even with their default."""


_SAVINGS = ("megatron.", "ops.", "model.lora.", "rollout.max_response", "rollout.server.mem")
"""Beginnings of keys that save memory."""


def _reasons(config: RunConfig, inputs: _Inputs, plan: Plan | None) -> dict[str, str]:
    """The keys of the file in their order, each with the reason for its value."""
    report, row_format, prompts = inputs.prompts.report, inputs.row_format, inputs.prompts.prompts
    dtype_reason = "its config.json names none"
    if inputs.stored_dtype:
        dtype_reason = f"its config.json says {shown_value(inputs.stored_dtype)}"
    if config.rollout.engine == "local":
        dtype_reason = "faster on a CPU than bfloat16"
    host_gb, cache = 0.0, ""
    if plan is not None:
        host_gb = plan.host_bytes_per_node / 1e9
        cache = f"weights and {plan.rollout.kv_cache_tokens:,} tokens; the trainer keeps the rest"
    columns = f"columns {row_format.prompt_column} and {row_format.answer_column}"
    num_long = sum(len(prompt.answer) > _LONG_ANSWER_CHARS for prompt in prompts)
    grading = "1 if the answer is right, else 0; or package.module:function"
    if 2 * num_long > len(prompts):
        grading = "most answers are long texts, which math cannot grade: name a function of yours"
    return {
        "name": "",
        "run_dir": "everything that the run writes; one run each",
        "model.path": f"{model_parameters(inputs.hf):,} parameters",
        "model.dtype": dtype_reason,
        "model.ignored_config_fields": "by --ignore-field",
        "model.lora.rank": "trains adapters (LoRA), not all weights",
        "parallel.tensor": "",
        "parallel.sequence": "splits activations between the GEMMs, too",
        "parallel.pipeline": "",
        "parallel.virtual_pipeline": "",
        "parallel.context": "",
        "parallel.expert": "",
        "parallel.expert_tensor": "",
        "megatron.recompute": "saves memory, costs up to a third more time",
        "megatron.optimizer_offload_share": f"its state takes {host_gb:,.0f} GB of host memory per "
        "node; LoRA (model.lora.rank) would take none",
        "ops.logits_chunk_tokens": "never has all logits at once; costs a little time",
        "data.train.path": f"{len(prompts):,} prompts",
        "data.train.name": "of all these files",
        "data.train.row_format": columns,
        "data.train.prompt_column": "",
        "data.train.answer_column": "",
        "data.max_prompt_tokens": f"the longest has {report.longest_tokens:,}; longer: dropped",
        "data.prompt_suffix": "math looks for a box first",
        "rollout.groups_per_step": "prompts per step",
        "rollout.samples_per_group": "responses per prompt, compared with each other",
        "rollout.max_response_tokens": f"of {inputs.hf.max_position_embeddings:,} positions",
        "rollout.engine": "samples in the trainer's process, without a server",
        "rollout.colocated": "servers release their memory while the trainer works",
        "rollout.weight_sync.method": "NCCL refuses two ranks on one GPU by default",
        "rollout.async_steps": "sample the next step meanwhile",
        "rollout.server.count": "per node",
        "rollout.server.tensor": "GPUs of each server, for the longest sequence",
        "rollout.server.first_gpu": "those before it train",
        "rollout.server.mem_fraction": cache,
        "reward.functions": grading,
        "algorithm.objective": "clip is GRPO; docs/objectives.md has the others",
        "algorithm.updates_per_batch": "more of them learn more from a batch, with staler samples",
        "optimizer.lr": "cautious; the paper has 2e-6 for 7B, adapters take ten times that",
        "train.steps": "",
        "train.max_tokens_per_micro_batch": "per rank; a prompt with its response must fit",
        "checkpoint.every_steps": "the most that a crash loses",
    }


def _next_commands(target: Path, plan: Plan | None, options: PlanOptions) -> str:
    run, file = "python -m bapo_megatron", shlex.quote(str(target))
    if plan is None:
        commands = ("data show {}", "config {}", "train {} --resume")
        return "\n".join(f"{run} {command.format(file)}" for command in commands)
    node_gpus, ranks, gpus = plan.assumptions.node_gpus, plan.trainer_gpus, plan.gpus
    values = {
        "gpus": gpus,
        "gpu": plan.assumptions.gpu.name,
        "trainer-gpus": ranks if ranks < gpus else None,
        "node-gpus": node_gpus if node_gpus != PlanOptions().node_gpus else None,
        "gpu-memory": options.gpu_memory_gb,
        "host-memory": options.host_memory_gb,
    }
    flags = [f"--{flag} {value}" for flag, value in values.items() if value is not None]
    flags += ["--local-layers"] if options.layers == "local" else []
    lines = [f"{run} {command} {file}" for command in ("data show", "config", "plan")]
    lines[-1] += f" {' '.join(flags)}"
    if gpus <= node_gpus:
        start = f"{run}.torchrun --nproc-per-node {ranks} -m bapo_megatron" if ranks > 1 else run
        if plan.layout.tensor * plan.layout.context > 1:  # Megatron requires it before Blackwell
            start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {start}"
        lines.append(f"{start} train {file} --resume")
    else:
        nodes, server_nodes = ranks // node_gpus, (gpus - ranks) // node_gpus
        lines += [
            f"# with Slurm: set account, partition, {nodes} and {server_nodes} nodes in",
            f"sbatch examples/slurm.sbatch {file}",
            f"# without Slurm, on each of {server_nodes} nodes that sample (docs/launch.md):",
            f"HOST=ADDRESS examples/rollout_servers.sh {file} rollout.server.port=30000",
            f"# on each of {nodes} nodes that train (NODE_RANK 0 to {nodes - 1}), as the servers "
            "print:",
            f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=ADDRESS examples/multi_node.sh {file} "
            "'rollout.servers=[…]'",
        ]
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    """A value in YAML, on one line."""
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return json.dumps(literal(value), ensure_ascii=False)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").strip()


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
