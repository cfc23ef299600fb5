"""A sample of a run's rollouts, small enough for a page, with what the dumps know of every token.

Steps are taken evenly over the run, and in each of them whole groups, evenly over the order of
their mean rewards, so that bad, mixed and solved ones are all there.

Shape legend: P = groups, G = responses per group, R = tokens of a response, Q = those of them that
the policy sampled.
"""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from bapo_megatron.data.staleness import token_versions
from bapo_megatron.telemetry.metrics import is_right
from bapo_megatron.tools.report.figures import rounded
from bapo_megatron.tools.report.runs import Run
from bapo_megatron.tools.report.samples import Step, dump_files, read_step
from bapo_megatron.tools.report.tokens import Pieces, TokenDumps
from bapo_megatron.types import Group, RolloutBatch, Sample

MAX_STEPS = 16
MAX_GROUPS = 8
"""Groups of a step."""
_TOKEN_BYTES = 24
"""A token as JSON, at most: its piece, log-prob and ratio."""
_SAMPLE_BYTES = 500
"""What a response needs beside its tokens, about."""
_MIN_BYTES = 4000
"""Room for a response even where nothing is left."""
_LEVELS = {"trained": 0, "masked": 1, "written": 2}


def sample_rollouts(run: Run, tokenizer: Any, max_bytes: float) -> dict[str, Any]:
    """Return rollouts of a run as the page reads them, of about ``max_bytes`` as JSON.

    ``groups`` holds what the samples of a group share, ``samples`` names theirs by number, and
    ``pieces`` are the pairs (token id, text) that the tokens name by number.

    Raises:
        DumpError: A dump is damaged, or of another version's format.
        ValueError: The configuration of staleness is another version's.
        OSError: A file cannot be read.
    """
    paths = dump_files(run.path)
    chosen = [list(paths)[index] for index in spread(len(paths), MAX_STEPS)]
    pieces = Pieces(tokenizer)
    groups: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    used, had_dumps, num_read, num_stored = 0.0, False, 0, 0
    for number, chosen_step in enumerate(chosen):
        try:
            step = read_step(paths[chosen_step], run.settings)
        except FileNotFoundError:
            continue  # the run goes on and has removed it (rollout.keep_dumps)
        num_read += 1
        tokens = TokenDumps(run, chosen_step)
        had_dumps |= tokens.exist
        num_stored += len(step.batch.samples)
        room = (max_bytes - used - pieces.num_bytes) / (len(chosen) - number)
        for group, members in _chosen(step.batch, room):
            groups.append(_group_record(step, group))
            limit = max(_MIN_BYTES, room / 2 if len(members) > 1 else room)
            for sample in members:
                record = _sample_record(step, tokens, sample, pieces, limit)
                samples.append({"group": len(groups) - 1, **record})
                used += len(json.dumps(samples[-1]))
    return {
        "run": run.name,
        "groups": groups,
        "samples": samples,
        "pieces": pieces.table,
        "has_texts": pieces.has_texts,
        "note": _note(list(paths), num_read, num_stored, samples),
        "ratios": _ratio_note(had_dumps, samples),
    }


def spread(num_items: int, max_items: int) -> list[int]:
    """Return at most ``max_items`` indices, evenly from the first to the last item."""
    if num_items <= max_items:
        return list(range(num_items))
    if max_items == 1:
        return [num_items // 2]
    return [round(i * (num_items - 1) / (max_items - 1)) for i in range(max_items)]


def _chosen(batch: RolloutBatch, room: float) -> list[tuple[Group, Sequence[Sample]]]:
    """Whole groups if one fits into ``room`` bytes; else as many responses of one as fit."""
    num_tokens = sum(len(sample.response_token_ids) for sample in batch.samples)
    sample_bytes = _SAMPLE_BYTES + _TOKEN_BYTES * num_tokens / len(batch.samples)
    size = len(batch.groups[0].samples)
    ordered = sorted(batch.groups, key=lambda group: (_mean(group), group.group_id))
    num_groups = min(MAX_GROUPS, math.floor(room / (size * sample_bytes)))
    if num_groups >= 1:
        picked = [ordered[index] for index in spread(len(ordered), num_groups)]
        return [(group, group.samples) for group in picked]
    group = ordered[len(ordered) // 2]
    by_reward = sorted(group.samples, key=lambda sample: sample.reward)
    kept = spread(size, max(1, math.floor(room / sample_bytes)))
    return [(group, [by_reward[index] for index in kept])]


def _mean(group: Group) -> float:
    return math.fsum(sample.reward for sample in group.samples) / len(group.samples)


def _group_record(step: Step, group: Group) -> dict[str, Any]:
    first = group.samples[0]
    text = step.text(first)
    return {
        "step": step.batch.step,
        "id": group.group_id,
        "prompt_id": first.prompt.prompt_id,
        "source": first.prompt.source,
        "prompt": None if text is None else text.prompt_text,
        "answer": None if text is None else text.answer,
        "mean": rounded(_mean(group)),
        "version": step.batch.version,
    }


def _sample_record(
    step: Step, tokens: TokenDumps, sample: Sample, pieces: Pieces, max_bytes: float
) -> dict[str, Any]:
    """What the page shows of a response; arrays are [R] or runs of equal values ``[value, n]``."""
    text = step.text(sample)
    total = len(sample.response_token_ids)
    kept_R = _kept(total, math.floor((max_bytes - _SAMPLE_BYTES) / _TOKEN_BYTES))
    sampled_R = sample.loss_mask
    levels_R = np.full(total, _LEVELS["written"])
    levels_R[sampled_R] = np.where(step.trains(sample), _LEVELS["trained"], _LEVELS["masked"])
    version_R = np.full(total, -1)
    version_R[sampled_R] = token_versions(sample.versions)
    ratio_Q = tokens.ratios(sample)
    advantage = step.advantage(sample)
    record = {
        "index": sample.index,
        "reward": rounded(sample.reward),
        "right": is_right(sample),
        "components": {name: rounded(v) for name, v in sample.reward_components.items()},
        "found": sample.answer_found,
        "advantage": None if advantage is None else rounded(advantage),
        "exit": sample.finish_reason.value,
        "tokens": total,
        "age": step.age(sample),
        "extracted": "" if text is None else text.extracted,
        "reason": "" if text is None else text.reason,
        "pieces": pieces.encode(sample.response_token_ids[kept_R]),
        "logprobs": _on_response(sample.behaviour_logprobs, sampled_R, kept_R, 3),
        "ratios": None if ratio_Q is None else _on_response(ratio_Q, sampled_R, kept_R, 4),
        "versions": _runs(version_R[kept_R].tolist()),
        "levels": _runs(levels_R[kept_R].tolist()),
    }
    if len(kept_R) < total:
        record["cut_at"] = len(kept_R) // 2
    if text is not None and not pieces.has_texts:
        record["text"] = "\n\n".join(text.turns or (text.response_text,))
    return record


def _kept(total: int, max_tokens: int) -> np.ndarray:
    """Positions of a response that are shown: all, or its two ends."""
    if total <= max_tokens:
        return np.arange(total)
    head = max(1, max_tokens // 2)
    return np.concatenate([np.arange(head), np.arange(total - head, total)])


def _on_response(
    values_Q: np.ndarray, sampled_R: np.ndarray, kept_R: np.ndarray, digits: int
) -> list[float | None]:
    """Values of the kept tokens; None for what an environment wrote, and what is not finite."""
    value_R = np.full(len(sampled_R), np.nan)
    value_R[sampled_R] = values_Q
    return [
        rounded(value, digits) if math.isfinite(value) else None
        for value in value_R[kept_R].tolist()
    ]


def _runs(values: Iterable[int]) -> list[tuple[int, int]]:
    return [(value, len(list(members))) for value, members in groupby(values)]


def _note(kept: Sequence[int], num_steps: int, num_stored: int, samples: Sequence[Any]) -> str:
    if not kept:
        return "This run kept no rollouts (rollout.dump)."
    missing = ""
    if len(kept) < kept[-1]:
        missing = (
            f" Of steps 1 to {kept[-1]:,}, {len(kept):,} have dumps, from step {kept[0]:,} on."
        )
    if num_steps == len(kept) and len(samples) == num_stored:
        return f"All {num_stored:,} responses of {num_steps:,} steps.{missing}"
    cut = sum("cut_at" in sample for sample in samples)
    text = (
        f"A sample: {len(samples):,} responses of {num_steps:,} of {len(kept):,} steps, taken "
        f"evenly over the run; those steps hold {num_stored:,}. In each step, groups are taken "
        f"evenly over the order of their mean rewards, at most {MAX_GROUPS}.{missing}"
    )
    return text + (f" {cut:,} long responses show their two ends only." if cut else "")


def _ratio_note(had_dumps: bool, samples: Sequence[Any]) -> str:
    if not had_dumps:
        return "No ratios: train.dump_tokens, which keeps them, was off or kept other steps."
    found = sum(sample["ratios"] is not None for sample in samples)
    return (
        f"Ratios of {found:,} of {len(samples):,} responses, from train.dump_tokens. The others "
        "were in no update of a kept step."
    )
