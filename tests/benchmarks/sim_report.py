"""The table, the assumptions and the figure of ``sim_rollout``."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.benchmarks.harness import machine
from tests.benchmarks.sim_cluster import Lengths
from tests.benchmarks.sim_rollout import FIRST, GROUPS, SAMPLES, WARM_UP, Outcome

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from tests.benchmarks.sim_cluster import Hardware
    from tests.benchmarks.sim_schedule import Record

COLUMNS = (
    ("steps/h", lambda o, base: f"{o.steps_per_h:.1f}"),
    ("× synchronous", lambda o, base: f"{o.steps_per_h / base.steps_per_h:.2f}"),
    ("engines busy", lambda o, base: f"{o.busy_share:.0%}"),
    ("of it prefill", lambda o, base: f"{o.prefill_share:.0%}"),
    ("tokens/s of an engine", lambda o, base: f"{o.engine_tokens_per_s:,.0f}"),
    ("trainer idle", lambda o, base: f"{o.trainer_idle_share:.0%}"),
    ("age: mean", lambda o, base: f"{o.age_mean:.2f}"),
    ("p90", lambda o, base: f"{o.age_p90:.1f}".removesuffix(".0")),
    ("max", lambda o, base: f"{o.age_max}"),
    ("stale tokens", lambda o, base: f"{o.stale_share:.0%}"),
    ("wasted", lambda o, base: f"{o.wasted_share:.0%}"),
    ("masked", lambda o, base: f"{o.masked_share:.0%}"),
    ("carried groups", lambda o, base: f"{o.carried_share:.0%}"),
    (f"length: first {FIRST}", lambda o, base: f"{o.first_length_ratio:.2f}"),
    ("later", lambda o, base: f"{o.length_ratio:.2f}"),
)
"""Heading and cell of each column; the baseline is the first outcome."""

TIMES = ("synchronous", "partial, oversample 1", "async 4")
"""Modes whose running sequences are drawn over time."""
LENGTHS = (
    "synchronous",
    "oversample ½, discard",
    "partial, oversample 1",
    "async 4",
    "async 2, oldest ≤ 2: drop",
)
"""Modes whose batches' mean lengths are drawn."""
WINDOW_S = 3600.0


@dataclass(frozen=True, slots=True)
class Result:
    """One mode."""

    outcome: Outcome
    """Mean over the seeds."""
    record: Record
    """Record of the first seed."""
    spread: float
    """Largest minus smallest rate of the seeds, over their mean."""


def table(outcomes: dict[str, Outcome]) -> str:
    """All modes as markdown."""
    base = next(iter(outcomes.values()))
    lines = ["| " + " | ".join(["", *(heading for heading, _ in COLUMNS)]) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for name, outcome in outcomes.items():
        cells = [name, *(cell(outcome, base) for _, cell in COLUMNS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(
    results: dict[str, Result],
    hardware: Hardware,
    steps: int,
    seeds: int,
    population_mean: float,
) -> str:
    """The document: how to repeat it, what was assumed, the table, how to read it."""
    import torch

    where = machine(torch.device("cpu"))
    outcomes = {name: result.outcome for name, result in results.items()}
    spread = max(result.spread for result in results.values())
    return "\n".join(
        [
            "# Partial and asynchronous rollout at 64k, simulated",
            "",
            _fill(
                f"{where['date']}, commit {where['commit']}, Python {where['python']}. A "
                "simulation of discrete events on one CPU; nothing here was measured on GPUs."
            ),
            "",
            f"    {where['command']}",
            "",
            _fill(
                f"Means over {seeds} seeds and {steps} steps after {WARM_UP} of warm-up; the "
                f"seeds' rates differ by at most {spread:.1%}. {GROUPS} groups of {SAMPLES} per "
                "step."
            ),
            "",
            table(outcomes),
            "",
            "![the same as a figure](rollout_simulation_202611.png)",
            "",
            _fill(
                "Ages are in steps: weight syncs since a token was sampled, when its batch is "
                "formed. A step of E updates trains its last part with E − 1 updates more. "
                "*Wasted*: tokens of groups that were given up, over tokens generated. *Carried*: "
                "groups that missed a batch while they were under way. *Length*: mean response of "
                "the batches over that of the distribution; 1 is unbiased."
            ),
            "",
            "## What is assumed",
            "",
            *assumptions(hardware, Lengths(), population_mean),
            "",
            "## What it says",
            "",
            *findings(outcomes),
            "",
        ]
    )


def assumptions(hardware: Hardware, lengths: Lengths, population_mean: float) -> list[str]:
    """What the figures rest on."""
    rng = np.random.default_rng(1)
    cut = np.mean([x == lengths.longest for _ in range(20_000) for x in lengths.draw(rng, SAMPLES)])
    alone_ms, full_ms = (
        1e3 * (hardware.step_s + n * (hardware.sequence_s + hardware.token_s * population_mean))
        for n in (1, hardware.max_running)
    )
    return [
        _item(
            "**Rules** are those of `bapo_megatron.rollout`: while a batch is waited for, the "
            "buffer holds groups_per_step · (1 + async_steps) + oversample_groups groups, and one "
            "batch less while the trainer works; a batch is the oldest finished groups; requests "
            "in flight are aborted for a weight sync and read again, or keep their keys and values "
            "(*in place*); a group's requests go to one engine while it has room (*spread*: to the "
            "least busy one). *Oversample ½* and *1* are shares of a batch; async 1 with "
            "oversampling of 1 is the same schedule as async 2. *Drained* is what a system without "
            "partial rollout has to do, and no option here: the engines finish what they have "
            "before a sync."
        ),
        _item(
            f"**Lengths** are log-normal with median {lengths.median:,.0f} and σ = "
            f"{lengths.sigma}, cut off at {lengths.longest:,}: mean {population_mean:,.0f}, "
            f"{cut:.1%} truncated. Half of the variance belongs to the prompt. The shape is what "
            "reports of reasoning models have in common (Kimi k1.5, arXiv 2501.12599; AReaL, "
            "2505.24298; APRIL, 2509.18521; RollPacker, 2509.21009); the parameters are ours, "
            "chosen for a mean near 12,000 with a few percent truncated, and are fitted to no "
            "data. Lengths do not depend on the weights."
        ),
        _item(
            f"**Engines**: {hardware.engines}, one H100 each, a 7B model in bfloat16 with "
            "grouped-query attention. A decoding step reads the weights and all keys and values at "
            f"{hardware.memory_share:.0%} of 3.35 TB/s, computes at {hardware.mfu_share:.0%} of "
            f"989 TFLOP/s, and has 1 ms of overhead: {alone_ms:.1f} ms for one sequence of mean "
            f"length, {full_ms:.1f} ms for {hardware.max_running}, the largest batch. Prefill "
            "computes at the same share and stops decoding; no prefix is cached. Keys and values "
            f"of {hardware.kv_tokens / 1e6:.2f} million tokens fit; a full engine gives back its "
            "newest request."
        ),
        _item(
            f"**Trainer**: {hardware.trainer_gpus} H100 at {hardware.mfu_share:.0%} MFU, balanced "
            "perfectly, one forward and backward pass; a weight sync takes "
            f"{hardware.sync_s:.0f} s, in which nothing runs."
        ),
        _item(
            "Not simulated: failures, graders, dynamic sampling, replay, and what staleness costs "
            "in learning."
        ),
    ]


def findings(outcomes: dict[str, Outcome]) -> list[str]:
    """What the table of the default sizes says, with its figures."""
    base = outcomes["synchronous"]

    def gain(name: str) -> str:
        return f"{outcomes[name].steps_per_h / base.steps_per_h:.1f}×"

    partial, one = outcomes["partial, oversample 1"], outcomes["async 1, oversample 1"]
    four, discard = outcomes["async 4"], outcomes["oversample ½, discard"]
    dropped, masked = outcomes["async 2, oldest ≤ 2: drop"], outcomes["async 2, token ≤ 2: mask"]
    return [
        _item(
            "The synchronous step waits for its longest response: engines are busy "
            f"{base.busy_share:.0%} of the time, and mostly with a few sequences. Discarding what "
            f"is late is {gain('oversample ½, discard')} as fast and trains on responses that are "
            f"{1 - discard.length_ratio:.0%} too short, for ever."
        ),
        _item(
            f"Partial rollout keeps the distribution (later batches: {partial.length_ratio:.2f}) "
            f"and makes {gain('partial, oversample 1')} as many steps, at a mean age of "
            f"{partial.age_mean:.1f} steps. Only the first batches are short "
            f"({partial.first_length_ratio:.2f}), since what is quick finishes first; after that "
            "come longer ones. The further generation is ahead, the longer this takes to settle: "
            "see the figure for async 4."
        ),
        _item(
            "Generation that goes on while the trainer works makes it "
            f"{gain('async 1, oversample 1')} (async 1 with oversampling) to {gain('async 4')} "
            f"(async 4), at mean ages of {one.age_mean:.1f} and {four.age_mean:.1f} and at most "
            f"{four.age_max} steps. Without oversampling async 1 is {gain('async 1')}, no more "
            "than partial rollout with as many groups: few are left to work on while the "
            "trainer does."
        ),
        _item(
            f"Overlap without partial rollout gains little ({gain('async 1, drained')} to "
            f"{gain('async 4, drained')}): every sync waits for the longest response."
        ),
        _item(
            f"A limit of 2 steps that drops groups wastes {dropped.wasted_share:.0%} of the tokens "
            f"and biases the lengths ({dropped.length_ratio:.2f}), since long responses take "
            "longer than that; masking single tokens keeps the lengths and takes "
            f"{masked.masked_share:.0%} of the tokens out of the loss. The limit on the mean is no "
            "milder here: a group's short responses grow old as a whole while its long ones are "
            "under way."
        ),
        _item(
            "Sending a group's requests to one engine makes the synchronous step slower, since a "
            "hard prompt's long responses share one engine's memory bandwidth: spread over the "
            f"engines it is {gain('synchronous, groups spread')}. With more work in flight it "
            f"makes no difference (async 2: {gain('async 2')} and "
            f"{gain('async 2, groups spread')})."
        ),
    ]


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent="  " if indent else "")


def _item(text: str) -> str:
    return _fill(text, "- ")


def draw(
    results: dict[str, Result], hardware: Hardware, population_mean: float, path: Path
) -> None:
    """Draw speed, ages, running sequences over time, and the lengths of the first batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    _draw_rates(figure.add_subplot(grid[0, 0]), results)
    _draw_ages(figure.add_subplot(grid[0, 1]), results)
    _draw_running(figure.add_subplot(grid[1, 0]), results, hardware)
    _draw_lengths(figure.add_subplot(grid[1, 1]), results, population_mean)
    figure.savefig(path, dpi=110)


def _draw_rates(axes: Any, results: dict[str, Result]) -> None:
    rates = [result.outcome.steps_per_h for result in results.values()]
    bars = axes.barh(list(results), rates, color="tab:blue", height=0.65)
    axes.bar_label(bars, labels=[f"{rate / rates[0]:.1f}×" for rate in rates], padding=3)
    axes.set(title="Speed", xlabel="steps per hour", xlim=(0, 1.12 * max(rates)))
    axes.invert_yaxis()


def _draw_ages(axes: Any, results: dict[str, Result]) -> None:
    found = [result.outcome for result in results.values()]
    rows = range(len(found))
    axes.hlines(rows, 0, [outcome.age_max for outcome in found], color="0.8")
    for label, marker, values in (
        ("mean", "o", [outcome.age_mean for outcome in found]),
        ("90th percentile", "s", [outcome.age_p90 for outcome in found]),
        ("maximum", "|", [outcome.age_max for outcome in found]),
    ):
        axes.plot(values, rows, marker, label=label, markersize=7)
    axes.set(title="Age of the trained tokens", xlabel="steps", yticks=rows)
    axes.set_yticklabels([])
    axes.grid(axis="x", color="0.9")
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.legend(loc="lower right")


def _draw_running(axes: Any, results: dict[str, Result], hardware: Hardware) -> None:
    for name in TIMES:
        record = results[name].record
        begin_s = record.batches[WARM_UP].formed_s
        times_s, counts = np.array(record.running).T
        edges_s = np.linspace(begin_s, min(begin_s + WINDOW_S, times_s[-1]), 361)
        # The mean over each bin of what is constant between two events.
        covered = np.interp(
            edges_s, times_s, np.concatenate([[0], (np.diff(times_s) * counts[:-1]).cumsum()])
        )
        means = np.diff(covered) / np.diff(edges_s) / hardware.engines
        axes.plot((edges_s[:-1] - begin_s) / 60, means, label=name)
    axes.set(
        title="Sequences that an engine decodes",
        xlabel="minutes from the forming of a batch",
        ylabel=f"mean over engines (at most {hardware.max_running})",
        ylim=(0, 1.25 * hardware.max_running),
    )
    axes.legend(fontsize="small", loc="upper right", ncols=len(TIMES))


def _draw_lengths(axes: Any, results: dict[str, Result], population_mean: float) -> None:
    for name, marker in zip(LENGTHS, itertools.cycle("osv^D"), strict=False):
        batches = results[name].record.batches[:WARM_UP]
        ratios = [np.mean(batch.lengths) / population_mean for batch in batches]
        axes.plot(range(1, len(ratios) + 1), ratios, marker=marker, markersize=4, label=name)
    axes.axhline(1, color="0.7", linewidth=1)
    axes.set(
        title="Mean response of a batch over that of the distribution",
        xlabel="step",
        ylabel="ratio",
    )
    axes.legend(fontsize="small")
