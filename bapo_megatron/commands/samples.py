"""``bapo-megatron samples``: a step's responses to read; a run's good ones as demonstrations."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from rich.console import Console

from bapo_megatron.commands.options import JsonOption
from bapo_megatron.config.settings import read_settings
from bapo_megatron.data.columns import DumpError
from bapo_megatron.data.dump import read_batch, texts_path
from bapo_megatron.runtime.files import atomic_write_bytes
from bapo_megatron.telemetry.console import print_entry, say, uncut_console
from bapo_megatron.tools.report.rollouts import ORDERS, DumpedStep, Order, dump_files, read_step
from bapo_megatron.types import FinishReason, Sample


def show(
    run: Annotated[
        Path, typer.Argument(metavar="RUN|DUMP.parquet", help="Directory of a run, or one dump.")
    ],
    step: Annotated[int | None, typer.Option(help="Default: the newest that is kept.")] = None,
    sort: Annotated[
        Order | None, typer.Option(help="Sort, largest first; default: batch order.")
    ] = None,
    group: Annotated[int | None, typer.Option(help="Only this group.")] = None,
    exit_reason: Annotated[
        FinishReason | None, typer.Option("--exit", help="Only this finish reason.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Responses to print.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Print a step's responses: turns, reward components, advantages, ages."""
    path = _find_dump(run, step)
    folder = path.absolute().parent
    config = folder.parent / "config.yaml"
    is_of_run = folder.name == "rollouts" and os.path.lexists(config)
    dump = read_step(path, read_settings(config) if is_of_run else {})
    if sort == "advantage" and not dump.estimator:
        raise typer.BadParameter(
            "--sort advantage: the estimator is not known, or is your own function; leave it out"
        )
    samples = [
        sample
        for sample in dump.batch.samples
        if group in (None, sample.group_id) and exit_reason in (None, sample.finish_reason)
    ]
    if sort is not None:
        order = ORDERS[sort]
        samples.sort(key=lambda sample: -order(dump, sample))
    report = inspect_step(path, dump, samples, limit)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_step(uncut_console(), report)


def save(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")],
    out: Annotated[Path, typer.Option("--out", help="A .parquet file to write.")],
    min_reward: Annotated[float, typer.Option(help="Smallest reward, shaping included.")],
    per_prompt: Annotated[
        int | None, typer.Option(min=1, help="Episodes of a prompt at most, the newest.")
    ] = None,
) -> None:
    """Write a run's complete responses of high reward as demonstrations, as exact tokens.

    Equal responses to a prompt are written once; a run's dumps are all that is read.
    """
    if out.suffix != ".parquet":
        raise typer.BadParameter(f"--out: must end in .parquet, got {out}; change it")
    kept: dict[tuple[str, str], set[bytes]] = {}
    rows, num_read = list[dict[str, Any]](), 0
    for step, path in reversed(dump_files(run).items()):
        for sample in read_batch(path).samples:
            num_read += 1
            prompt_id, parts = sample.prompt.prompt_id, sample.sequences
            others = kept.setdefault((sample.prompt.source, prompt_id), set())
            text = b"".join(part.response_token_ids.tobytes() for part in parts)
            is_good = sample.finish_reason is FinishReason.STOP and sample.reward >= min_reward
            if is_good and text not in others and len(others) != per_prompt:
                others.add(text)
                facts = {"prompt_id": prompt_id, "step": step, "reward": sample.reward}
                rows += [facts | _tokens(part) for part in parts]
    if not rows:
        raise ValueError(
            f"{run / 'rollouts'}: none of {num_read} responses ended by itself with a reward of at "
            f"least {min_reward}; lower --min-reward, or see rollout.dump and rollout.keep_dumps"
        )
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    atomic_write_bytes(out, stream.getvalue())
    counts = [len(texts) for texts in kept.values() if texts]
    say(f"{out}: {sum(counts)} of {num_read} responses, to {len(counts)} prompts")


def _tokens(sequence: Sample) -> dict[str, np.ndarray]:
    """A sequence's tokens as ``data.demonstrations`` reads them."""
    prompt = sequence.prompt.token_ids
    return {
        "token_ids": np.concatenate([prompt, sequence.response_token_ids]),
        "is_trained": np.concatenate([np.zeros(len(prompt), bool), sequence.loss_mask]),
    }


def _find_dump(run: Path, step: int | None) -> Path:
    """The dump of a run's step, or the dump that ``run`` is."""
    if run.suffix == ".parquet":
        if step is not None:
            raise typer.BadParameter(f"{run} is one dump, which takes no --step; leave it out")
        return run
    dumps = dump_files(run)
    if not dumps or step not in (None, *dumps):
        wanted = "a step" if step is None else f"step {step}"
        raise ValueError(
            f"{run / 'rollouts'}: no dump of {wanted}; see rollout.dump and rollout.keep_dumps"
        )
    return dumps[max(dumps) if step is None else step]


def inspect_step(
    path: Path, step: DumpedStep, chosen: Sequence[Sample], max_samples: int
) -> dict[str, Any]:
    """Return a step and the first ``max_samples`` of its ``chosen`` samples as JSON values."""
    batch = step.batch
    return {
        "path": str(path),
        "step": batch.step,
        "version": batch.version,
        "num_groups": len(batch.groups),
        "num_samples": len(batch.samples),
        "num_chosen": len(chosen),
        "has_texts": bool(step.texts),
        "estimator": step.estimator or None,
        "samples": [_shown_sample(path, step, sample) for sample in chosen[:max_samples]],
    }


def _shown_sample(path: Path, step: DumpedStep, sample: Sample) -> dict[str, Any]:
    """A response; prompt, answer and the parts' texts are None where the dump has no texts."""
    text = step.text(sample)
    parts: list[dict[str, Any]] = [
        {
            **({"sequence": sequence.number} if sequence.number else {}),
            "author": ("policy", "environment")[number % 2],
            "num_tokens": len(part),
            "text": None,
        }
        for sequence in sample.sequences
        for number, part in enumerate(sequence.segments())
    ]
    if text is not None:
        turns = text.turns or (text.response_text,)
        if len(turns) != len(parts):
            raise DumpError(
                f"{texts_path(path)}: {sample.place} has {len(turns)} texts of {len(parts)} parts; "
                "give the dump that they belong to"
            )
        for part, turn in zip(parts, turns, strict=True):
            part["text"] = turn
    # A reward that extracts no answer does not say that there is none.
    extracts = text is None or bool(text.extracted) or not sample.answer_found
    num_trained = np.count_nonzero(step.trains(sample)) if step.has_gradient(sample) else 0
    return {
        "group_id": sample.group_id,
        "index": sample.index,
        "prompt_id": sample.prompt.prompt_id,
        "source": sample.prompt.source,
        "finish_reason": sample.finish_reason.value,
        "reward": sample.reward,
        "reward_components": sample.reward_components,
        "advantage": step.advantage(sample),
        "answer_found": sample.answer_found if extracts else None,
        "extracted": None if text is None else text.extracted,
        "reason": None if text is None else text.reason,
        "answer": None if text is None else text.answer,
        "age": step.age(sample),
        "versions": [(span.version, span.num_tokens) for span in sample.episode_versions],
        "sampled_tokens": sample.episode_sampled,
        "trained_tokens": int(num_trained),
        "written_tokens": sample.episode_tokens - sample.episode_sampled,
        "prompt": None if text is None else text.prompt_text,
        "parts": parts,
    }


def print_step(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report of ``inspect_step``."""
    print_entry(console, report["path"], _facts(report))
    for sample in report["samples"]:
        place = f"group {sample['group_id']} · sample {sample['index']} · {sample['prompt_id']}"
        parts = _facts(sample)
        if sample["prompt"] is not None:
            parts += [("heading", "prompt"), ("prompt", sample["prompt"])]
        for sequence, members in groupby(sample["parts"], lambda part: part.get("sequence", 0)):
            prefix = f"sequence {1 + sequence} · " if sequence else ""
            for number, part in enumerate(members):
                turn = f"turn {1 + number // 2} · {part['author']}"
                parts.append(("heading", f"{prefix}{turn} · {part['num_tokens']:,} tokens"))
                if part["text"] is not None:
                    parts.append((part["author"], part["text"]))
        print_entry(console, place, parts)


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the fields of a step or a response, without texts."""
    return [
        ("fact", f"{name}: {_shown(value)}")
        for name, value in record.items()
        if name not in ("path", "samples", "prompt", "parts")
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "?"
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, ensure_ascii=False)
