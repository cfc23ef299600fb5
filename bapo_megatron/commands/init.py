"""``bapo-megatron init``: the first configuration for a model, a file of prompts and some GPUs."""

from pathlib import Path
from typing import Annotated

import typer

from bapo_megatron.commands.options import IgnoreFieldOption
from bapo_megatron.config.data import TrainSetConfig, is_pattern
from bapo_megatron.config.megatron import ModelConfig
from bapo_megatron.tools.init import write_first_config
from bapo_megatron.tools.planning.plan import PlanOptions
from bapo_megatron.tools.planning.scenario import MAX_GPUS


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Gets run.yaml and the run.")],
    model: Annotated[Path, typer.Option(help="Directory of a Hugging Face model.")],
    data: Annotated[Path, typer.Option(help="Prompts with answers: jsonl, json or parquet.")],
    gpus: Annotated[
        int,
        typer.Option(min=0, max=MAX_GPUS, help="GPUs for training and sampling; 0: CPU only."),
    ],
    gpu: Annotated[str, typer.Option(help="A100, H100, H200 or B200.")] = "H100",
    node_gpus: Annotated[int, typer.Option(min=1, max=MAX_GPUS, help="GPUs per node.")] = 8,
    response_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum, within the model's positions; default: 8192, on a CPU 256.",
        ),
    ] = None,
    prompt_column: Annotated[str, typer.Option(help="Default: by the file's columns.")] = "",
    answer_column: Annotated[str, typer.Option(help="Default: by the file's columns.")] = "",
    ignore_field: IgnoreFieldOption = None,
) -> None:
    """Write DIR/run.yaml, a commented first configuration, and print the next commands."""
    train_set = TrainSetConfig(
        path=data,
        prompt_column=prompt_column or None,
        answer_column=answer_column or None,
        name="train" if is_pattern(data) else "",
    )
    policy = ModelConfig(path=model, ignored_config_fields=tuple(ignore_field or ()))
    options = PlanOptions(gpu=gpu, node_gpus=node_gpus)
    typer.echo(
        write_first_config(
            directory,
            policy,
            train_set,
            options,
            gpus=gpus,
            response_tokens=response_tokens or (8192 if gpus else 256),
        )
    )
