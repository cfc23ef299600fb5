"""A week of the 32B run, simulated: before and after what was done about its first failures.

python -m tests.benchmarks.sim_week --out docs/benchmarks/week_simulation_202611

The rollout of a step is that of ``sim_schedule`` with engines of four H100; training is
``Hardware.training_s``; the rest of a step, starts and failures are the constants of ``Case``.
Nothing here was measured on GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bapo_megatron.config.rollout import RolloutConfig
from tests.benchmarks import harness
from tests.benchmarks.sim_admission import ByTokens, Fixed
from tests.benchmarks.sim_cluster import Hardware, Lengths
from tests.benchmarks.sim_schedule import Mode, Simulation

H100_FLOPS, H100_BYTES, H100_BYTES_PER_S = 989e12, 80e9, 3.35e12
ENGINE_GPUS = 4
PARAMETERS = 32.76e9
LENGTHS = Lengths(median=26_000.0, sigma=0.9)
"""Mean 31,400, 15 % cut off at 65,536: near the mean that ``plan`` takes, half of the longest."""
WEEK_S, DAY_S, LIMIT_S = 7 * 86_400.0, 86_400.0, 86_400.0
EVAL_STEPS = 20
EVAL_RESPONSES = 2 * 30 * 16
WARM_UP, STEPS = 6, 12
BOUNDS_PASS = 1 / 3
"""The pass for the bounds over forward and backward."""


@dataclass(frozen=True, slots=True)
class Case:
    """What differs; times of the run on 128 + 128 GPUs, in seconds."""

    name: str
    admits_by_tokens: bool
    requests_per_engine: int
    """Without admission by tokens: all groups of the buffer, spread over the engines."""
    computed_share: float
    """Share of the tokens in both passes of training."""
    transport_s: float
    """From the last group to the batch on every rank."""
    planning_s: float
    """Division of a step's samples."""
    planning_power: int
    """By which it grows with the batch and the ranks."""
    eval_is_beside: bool
    """Evaluation runs beside the next rollout."""
    start_s: float
    """From the job's first process to its first step."""
    survives_rollout_node: bool
    saves_before_limit: bool
    checkpoint_steps: int


BEFORE = Case(
    "before",
    admits_by_tokens=False,
    requests_per_engine=96,
    computed_share=1.0,
    transport_s=45.0,
    planning_s=15.2,
    planning_power=2,
    eval_is_beside=False,
    start_s=786 + 1850 + 60,
    survives_rollout_node=False,
    saves_before_limit=False,
    checkpoint_steps=20,
)
AFTER = Case(
    "after",
    admits_by_tokens=True,
    requests_per_engine=0,
    computed_share=0.5,
    transport_s=14.5,
    planning_s=0.3,
    planning_power=1,
    eval_is_beside=True,
    start_s=230 + 60,
    survives_rollout_node=True,
    saves_before_limit=True,
    checkpoint_steps=20,
)
OFTEN = replace(AFTER, name="after, saving every 5 steps", checkpoint_steps=5)
SAME_STEP = {OFTEN.name: AFTER.name}
"""Cases whose steps are those of another one."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Half of the GPUs train; the batch grows with them."""

    gpus: int
    """GPUs of each half."""

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return self.gpus

    @property
    def nodes(self) -> int:
        """Nodes of each half."""
        return self.gpus // 8

    @property
    def hardware(self) -> Hardware:
        """Engines of four GPUs that work as one; the trainer in units of four as well."""
        return Hardware(
            engines=self.gpus // ENGINE_GPUS,
            max_running=4096,
            trainer_gpus=self.gpus // ENGINE_GPUS,
            parameters=PARAMETERS,
            layers=64,
            attention_width=5120,
            kv_bytes_per_token=262_144,
            peak_flops=ENGINE_GPUS * H100_FLOPS,
            memory_bytes_per_s=ENGINE_GPUS * H100_BYTES_PER_S,
            memory_bytes=0.8 * ENGINE_GPUS * H100_BYTES,
            overhead_s=4e-3,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """Mean seconds of a step by what they are for."""

    rollout: float
    training: float
    transport: float
    planning: float
    evaluation: float
    push: float
    retractions: float
    """Per step; no time of its own."""

    @property
    def total(self) -> float:
        """One after the other."""
        return (
            self.rollout
            + self.training
            + self.transport
            + self.planning
            + self.evaluation
            + self.push
        )


def simulate_step(case: Case, cluster: Cluster, seed: int) -> Step:
    """Mean step of one seed, after the first ones."""
    hardware = cluster.hardware
    config = RolloutConfig(
        groups_per_step=cluster.groups,
        oversample_groups=cluster.groups // 2,
        samples_per_group=16,
        max_response_tokens=LENGTHS.longest,
    )
    rule = ByTokens(hardware, LENGTHS) if case.admits_by_tokens else Fixed(case.requests_per_engine)
    simulation = Simulation(Mode(case.name, config), hardware, LENGTHS, seed, rule)
    record = simulation.run(WARM_UP + STEPS)
    batches = record.batches[WARM_UP:]
    alone_s = _evaluation_s(hardware, seed)
    tokens = statistics.fmean(sum(batch.lengths) for batch in batches)
    rollout_s = statistics.fmean(batch.waited_s for batch in batches)
    mean_length = tokens / (cluster.groups * 16)
    beside_s = EVAL_RESPONSES * mean_length / tokens * rollout_s
    training_s = statistics.fmean(batch.training_s for batch in batches)
    return Step(
        rollout=rollout_s,
        training=case.computed_share * training_s * (1 + BOUNDS_PASS),
        transport=case.transport_s * cluster.groups / 128,
        planning=case.planning_s * (cluster.groups / 128) ** case.planning_power,
        evaluation=(beside_s if case.eval_is_beside else alone_s) / EVAL_STEPS,
        push=hardware.sync_s,
        retractions=record.retracted / (WARM_UP + STEPS),
    )


def _evaluation_s(hardware: Hardware, seed: int) -> float:
    """Time of an evaluation on engines that do nothing else."""
    config = RolloutConfig(
        groups_per_step=EVAL_RESPONSES // 16,
        samples_per_group=16,
        max_response_tokens=LENGTHS.longest,
    )
    record = Simulation(
        Mode("evaluation", config, keeps_groups_together=False), hardware, LENGTHS, seed
    ).run(1)
    return record.batches[0].waited_s


def lost_hours(case: Case, cluster: Cluster, step_s: float, rng: np.random.Generator) -> float:
    """Hours of a week that led to no step that was kept; one node fails each day on average."""
    now_s = lost_s = case.start_s
    saved_s = now_s
    """When the work that a checkpoint has was done."""
    limit_s, failure_s = LIMIT_S, rng.exponential(DAY_S)
    while now_s < WEEK_S:
        save_s = saved_s + case.checkpoint_steps * step_s
        if save_s < min(limit_s, failure_s):
            now_s = saved_s = save_s
            continue
        now_s = min(limit_s, failure_s)
        if now_s == failure_s:
            failure_s = now_s + rng.exponential(DAY_S)
            if case.survives_rollout_node and rng.random() < 0.5:
                # Its requests go on elsewhere; until it is back the others sample alone.
                slow_s = case.start_s / cluster.nodes
                lost_s, saved_s = lost_s + slow_s, saved_s + slow_s
                continue
            lost_s += now_s - saved_s + case.start_s
        else:
            lost_s += case.start_s + (0.0 if case.saves_before_limit else now_s - saved_s)
        limit_s = now_s + LIMIT_S
        now_s = saved_s = now_s + case.start_s
    return lost_s / 3600


def mean_step_s(steps: dict[tuple[int, str], list[Step]], gpus: int, case: str) -> float:
    """Mean over the seeds."""
    return statistics.fmean(step.total for step in steps[gpus, SAME_STEP.get(case, case)])


def report(
    steps: dict[tuple[int, str], list[Step]], lost: dict[tuple[int, str], list[float]]
) -> str:
    """The page."""
    seeds = len(next(iter(steps.values())))
    weeks = len(next(iter(lost.values())))
    lines = [
        "# A week of the 32B run, simulated",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {harness.commit_of(harness.REPOSITORY)}. A "
        "simulation of discrete events on one CPU; nothing here was measured on GPUs.",
        "",
        f"    python -m tests.benchmarks.sim_week {' '.join(sys.argv[1:])}",
        "",
        f"Seconds of a step, means of {STEPS} steps after {WARM_UP} and of {seeds} seeds (total: "
        "least and greatest of them).",
        "",
        "| trainer + rollout H100 | | rollout | training | transport | planning | evaluation | "
        "push | total | retractions per step |",
        "|---" * 10 + "|",
    ]
    for (gpus, name), found in steps.items():
        mean = {
            part: statistics.fmean(getattr(step, part) for step in found)
            for part in (
                *("rollout", "training", "transport", "planning", "evaluation", "push"),
                *("total", "retractions"),
            )
        }
        totals = [step.total for step in found]
        lines.append(
            f"| {gpus} + {gpus} | {name} | {mean['rollout']:,.0f} | {mean['training']:,.0f} | "
            f"{mean['transport']:.0f} | {mean['planning']:.1f} | {mean['evaluation']:.0f} | "
            f"{mean['push']:.0f} | **{mean['total']:,.0f}** ({min(totals):,.0f} – "
            f"{max(totals):,.0f}) | {mean['retractions']:,.0f} |"
        )
    lines += [
        "",
        f"Hours of a week of 168 that are lost, over {weeks:,} weeks.",
        "",
        "| trainer + rollout H100 | | mean | 90 % of the weeks | steps kept per week |",
        "|---" * 5 + "|",
    ]
    for (gpus, name), hours in lost.items():
        step_s = mean_step_s(steps, gpus, name)
        low, high = np.quantile(hours, [0.05, 0.95])
        mean_lost = statistics.fmean(hours)
        kept = (168 - mean_lost) * 3600 / step_s
        lines.append(
            f"| {gpus} + {gpus} | {name} | {mean_lost:.1f} | {low:.1f} – {high:.1f} | {kept:,.0f} |"
        )
    return "\n".join([*lines, "", ASSUMPTIONS])


ASSUMPTIONS = """\
## What is assumed

- **Run**: configs/bp-math-32b-64k.yaml, synchronous with partial rollouts: groups of 16, half a
  batch more in the buffer, two updates, an evaluation every 20 steps, and a checkpoint, where
  nothing else is said. On 512 + 512 GPUs the batch has 512 groups instead of 128.
- **Lengths** are log-normal with median 26,000 and σ = 0.9, cut off at 65,536: mean 31,400, 15
  % cut off; half of the variance belongs to the prompt. Nobody knows the true ones.
- **Engines** have four H100 as one GPU with four times the memory, bandwidth and operations,
  and 4 ms of overhead in a decoding step; otherwise as in
  [rollout_simulation_202611.md](rollout_simulation_202611.md). *Before* each takes 96 requests,
  all of the buffer; *after* `rollout/admission.py` decides.
- **Training** at 40 % MFU, with a pass for the bounds of a third of forward and backward.
  *After* half of the tokens have A ≠ 0 and only they are computed. That share is a guess: where
  all groups are mixed nothing is gained.
- **Transport**: 45 s before, by 7.6 bytes per token that were encoded twice; after, 0.32 of it,
  the ratio in [data_path_cpu_202611.md](data_path_cpu_202611.md). **Planning**: 7.6 s per
  update before, and measured 0.13 s after; it grew with the square of the batch. **Push**: 5 s.
  **Evaluation**: 960 responses, alone before; after, its tokens take their share of the engines
  beside the rollout.
- **A start** reads at 2 GB/s: before, 1.57 TB of weights (786 s) and 3.7 TB of checkpoint
  (1,850 s); after, each part of the checkpoint once (459 GB, 230 s), and the servers read no
  weights. 60 s more for processes. No time in the queue, and nobody has to resume by hand.
- **Failures**: one node a day (exponential), trainer or rollout with equal probability. Before,
  each ends the job and costs the steps since the last checkpoint; after, that of a rollout node
  costs its share of the engines for as long as a start. Jobs are limited to 24 hours: before,
  the limit is a failure; after, everything is saved just before it, unfinished responses too.
- Not simulated: saves (in the background), NCCL failures in a push, disks that fill up, bugs.
"""


def main() -> None:
    """Simulate both sizes before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--weeks", type=int, default=2000)
    parser.add_argument("--gpus", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    options = parser.parse_args()
    clusters = {gpus: Cluster(gpus) for gpus in options.gpus}
    with ProcessPoolExecutor() as pool:
        futures = {
            (gpus, case.name): [
                pool.submit(simulate_step, case, cluster, seed) for seed in range(options.seeds)
            ]
            for gpus, cluster in clusters.items()
            for case in (BEFORE, AFTER)
        }
        steps = {key: [future.result() for future in each] for key, each in futures.items()}
    lost = {}
    for gpus, cluster in clusters.items():
        for case in (BEFORE, AFTER, OFTEN):
            step_s = mean_step_s(steps, gpus, case.name)
            rng = np.random.default_rng(0)
            lost[gpus, case.name] = [
                lost_hours(case, cluster, step_s, rng) for _ in range(options.weeks)
            ]
    options.out.with_suffix(".md").write_text(report(steps, lost))


if __name__ == "__main__":
    main()
