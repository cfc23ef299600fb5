"""Predicted bounds against staleness: how often they are right, and what they save.

make demo && python -m tests.benchmarks.bench_speculation runs/demo-tiny-seed0 --out OUT
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from bapo_megatron.algorithm import prediction
from bapo_megatron.algorithm.objectives.bapo import Bapo, BapoConfig
from bapo_megatron.config.load import load_config
from bapo_megatron.ops.contributions import BOUNDS_FIELDS, EXIT_NAMES
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.tools.planning.plan import PlanOptions, make_plan
from bapo_megatron.trainer.speculation import Speculation
from tests.benchmarks.demo_runs import train
from tests.benchmarks.harness import REPOSITORY, finish, machine, page, report_arguments, table
from tests.fakes.given_tokens import one_rank
from tests.tools.planning.cases import MODELS
from tests.trainer.runs import assert_same_training

UPDATES_PER_BATCH = 4
LAGS = (0, 4, 16, 64)
"""In updates."""
RATES = ("1e-4", "1e-3")
"""The demo's learning rate, and one that moves the policy ten times as fast."""
MODES = ("never", "always", "auto")
LOSS_SHARE = 3.0
"""Loss pass over forward-only pass, for regrets."""

History = list[tuple[Tensor, Tensor]]
"""Statistics [K] of each update, with ℓ = μ and with its log-probs."""
Predict = Callable[[Bapo, History, Tensor], Tensor]
"""The total that is predicted from the updates before and the own statistics with ℓ = μ."""


def _recent(bapo: Bapo, history: History, known_K: Tensor) -> Tensor:
    return bapo.search.rescale(sum(total_K for _, total_K in history), known_K)  # type: ignore[arg-type]


PREDICTORS: dict[str, Predict] = {
    "bounds of the last update": lambda _, history, __: history[-1][1],
    "own weights, r = 1": lambda _, __, known_K: known_K,
    "own weights, ratios of the last update": lambda b, h, k: _recent(b, h[-1:], k),
    "own weights, ratios of the last 4": lambda b, h, k: _recent(b, h[-4:], k),
}
SHIPPED = "own weights, recent ratios (algorithm.prediction)"
NAMES = (*PREDICTORS, SHIPPED)


def record(data_dir: Path, root: Path, rate: str, lag: int, steps: int) -> Path:
    """Train with dumps of rollouts and tokens, unless that was done; returns the run."""
    run_dir = root / f"lr{rate}_lag{lag // UPDATES_PER_BATCH}"
    if not (run_dir / "summary.json").is_file():
        settings = ["rollout.engine=local", "rollout.oversample_groups=0", "rollout.async_steps=0"]
        if lag:
            settings.append(f"rollout.fixed_lag={lag // UPDATES_PER_BATCH}")
        train(run_dir, data_dir, steps, [*_common(rate), *settings, "train.dump_tokens=1"])
    return run_dir


def _common(rate: str) -> list[str]:
    updates = f"algorithm.updates_per_batch={UPDATES_PER_BATCH}"
    return [f"optimizer.lr={rate}", updates, "eval.sets=[]", "log.tensorboard=false"]


def read_updates(run_dir: Path, bapo: Bapo) -> History:
    updates = []
    for path in sorted((run_dir / "tokens").glob("*.parquet")):
        table = pq.read_table(path)
        columns = {n: torch.from_numpy(table[n].to_numpy().copy()) for n in table.column_names}
        logprob_T, behaviour_T = columns["logprob"], columns["behaviour_logprob"]
        known_K, total_K = (
            bapo.search.contributions(policy_T, behaviour_T, columns["advantage"], columns["mask"])
            for policy_T in (behaviour_T, logprob_T)
        )
        updates.append((known_K, total_K))
    return updates


def score(updates: History, bapo: Bapo, steps: int) -> dict[str, Any]:
    """Misses of every predictor in the last ``steps`` updates, and the exits of the searches."""
    first = len(updates) - steps
    missed: dict[str, list[bool]] = {name: [] for name in NAMES}
    recent_K, exits = None, dict.fromkeys(EXIT_NAMES[:3], 0)
    for number, (known_K, total_K) in enumerate(updates):
        decision = bapo.decide(total_K)
        for name, predict in PREDICTORS.items():
            history = updates[:number]
            predicted_K = predict(bapo, history, known_K) if history else known_K
            missed[name].append(not decision[:2].equal(bapo.decide(predicted_K)[:2]))
        shipped = prediction.predict(bapo, known_K, recent_K)
        missed[SHIPPED].append(not decision[:2].equal(shipped[:2]))
        recent_K = prediction.remember(recent_K, total_K)
        name = EXIT_NAMES[int(decision[BOUNDS_FIELDS.index("exit")])]
        if number >= first and name in exits:
            exits[name] += 1
    return {
        "updates": steps,
        "exits": exits,
        "hit_share": {n: 1 - statistics.mean(of_one[first:]) for n, of_one in missed.items()},
        "regret": {n: regret(of_one, first) for n, of_one in missed.items()},
    }


def regret(missed: list[bool], first: int) -> float:
    """What ``auto`` costs beyond right predictions, in loss passes per update from ``first`` on."""
    costs = []
    with one_rank() as groups:
        auto = Speculation("auto", Bapo(BapoConfig(), None), groups)
        for was_missed in missed:
            costs.append(float(was_missed) if auto.relies else 1 / LOSS_SHARE)
            auto._missed.append(was_missed)
            if auto.is_trial:
                auto.end_trial(1.0, LOSS_SHARE, differs=False)
    return statistics.mean(costs[first:])


def time_modes(
    data_dir: Path, run_dir: Path, rate: str, steps: int, rounds: int
) -> dict[str, float]:
    """Median seconds of an update of each mode in replays of a run, which take turns.

    The replays of a round must be the same training, bit for bit.
    """
    order, seconds = random.Random(0), {mode: list[float]() for mode in MODES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            for mode in order.sample(MODES, len(MODES)):
                replayed = Path(scratch) / mode
                settings = [f"replay={run_dir}/rollouts", f"algorithm.bapo.speculate={mode}"]
                rows = train(replayed, data_dir, steps, [*_common(rate), *settings])
                seconds[mode] += [row["time/training_s"] / row["train/updates"] for row in rows[1:]]
            for mode in MODES[1:]:
                assert_same_training(Path(scratch) / mode, Path(scratch) / MODES[0])
    return {mode: statistics.median(times) for mode, times in seconds.items()}


def simulate_32b(miss_share: float | None) -> float:
    """Seconds of training in a step of the paper's 32B run; None: in the plain order."""
    overrides = ["algorithm.bapo.speculate=never"] if miss_share is None else []
    config = load_config(REPOSITORY / "configs/bp-math-32b-64k.yaml", overrides)
    hf = read_hf_config_file(MODELS / "deepseek-r1-distill-qwen-32b.json")
    plan = make_plan(config, hf, PlanOptions(gpus=128, miss_share=miss_share or 0.0))
    return sum(phase.seconds for phase in plan.phases[1:4])


def draw(report: dict[str, Any], out: Path) -> None:
    """Hit rates of the predictors, and times if any, against the lag; a column per rate."""
    from matplotlib.figure import Figure

    num_rows = 1 + bool(report["rounds"])
    figure = Figure(figsize=(11, 0.6 + 3.6 * num_rows), layout="constrained")
    rows = figure.subplots(num_rows, len(RATES), sharey="row", sharex=True, squeeze=False)
    for number, rate in enumerate(RATES):
        cells = [report["cells"][rate][str(lag)] for lag in LAGS]
        panel = rows[0][number]
        for name in NAMES:
            hits = [cell["hit_share"][name] for cell in cells]
            style = {"linewidth": 2.5, "color": "black"} if name == SHIPPED else {"linewidth": 1.2}
            panel.plot(range(len(LAGS)), hits, marker="o", label=name, **style)
        panel.axhline(1 - 1 / LOSS_SHARE, color="gray", linestyle=":", label="break-even")
        panel.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
        panel.set_title(f"learning rate {rate}")
        for mode in MODES if report["rounds"] else ():
            ratios = [cell["seconds"][mode] / cell["seconds"]["never"] for cell in cells]
            rows[1][number].plot(range(len(LAGS)), ratios, marker="o", label=mode)
        rows[-1][number].set_xlabel("lag (updates)")
    labels = ("share of right predictions", "time of an update, plain order = 1")
    for panels, label in zip(rows, labels, strict=False):
        panels[0].set(ylabel=label, ylim=(0, 1.05))
        panels[0].legend(fontsize=8, loc="lower left")
        for panel in panels:
            panel.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def markdown(report: dict[str, Any], picture: str) -> str:
    timed = (
        f"Times are medians over {report['rounds']} replays of each run in each mode, in "
        "turns. Within a round the three modes gave the same final weights and, but for "
        "times, the same metrics in every step, bit for bit."
    )
    return page(
        "Predicted bounds against staleness",
        report["machine"],
        f"The demo's task on one rank, {UPDATES_PER_BATCH} updates per step, sampled by the local "
        f"engine at a fixed lag; the last {report['updates']} updates of {report['steps']} steps, "
        "so that all have the lag. *Regret*: time per update beyond that of predictions that are "
        "always right, in loss passes, with the rule of `auto` and a forward-only pass of a third "
        "of a loss pass; the plain order has 0.333.",
        f"![Share of right predictions]({picture})",
        *(block for rate in RATES for block in _section(report["cells"][rate], rate)),
        "The last rows: training as `plan configs/bp-math-32b-64k.yaml --gpus 128` has it, but "
        f"with the misses of the line above; in the plain order {report['plain_32b_s']:.0f} s.",
        timed if report["rounds"] else "",
    )


def _section(by_lag: dict[str, dict[str, Any]], rate: str) -> tuple[str, list[str]]:
    cells = [by_lag[str(lag)] for lag in LAGS]
    rows = [
        ["exits start, met, exhausted"]
        + [", ".join(map(str, cell["exits"].values())) for cell in cells]
    ]
    rows += [
        [f"{name}: hits (regret)"]
        + [f"{cell['hit_share'][name]:.1%} ({cell['regret'][name]:.3f})" for cell in cells]
        for name in NAMES
    ]
    times = [cell["seconds"] for cell in cells if "seconds" in cell]
    if times:
        rows += [
            [f"`{mode}`: ms per update"]
            + [f"{t[mode] * 1e3:.1f} ({t[mode] / t['never']:.2f})" for t in times]
            for mode in MODES
        ]
    rows.append(["32B, s of training per step", *(f"{c['simulated_s']:.0f}" for c in cells)])
    head = ["", *(f"lag {lag}" for lag in LAGS)]
    return f"## Learning rate {rate}", table(head, rows)


def main() -> None:
    parser = report_arguments(__doc__ or "", needs_out=True)
    parser.add_argument("data_dir", type=Path, help="what make-tiny wrote")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--updates", type=int, default=92, help="the last ones, that count")
    parser.add_argument("--rounds", type=int, default=3, help="of replays for times; 0: none")
    parser.add_argument("--runs", type=Path, help="where the runs are kept, to be used again")
    options = parser.parse_args()
    where, bapo = machine(), Bapo(BapoConfig(), None)
    data_dir = options.data_dir.resolve()
    cells: dict[str, dict[str, Any]] = {rate: {} for rate in RATES}
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.runs or Path(scratch)).resolve()
        for rate in RATES:
            for lag in LAGS:
                run_dir = record(data_dir, root, rate, lag, options.steps)
                cell = score(read_updates(run_dir, bapo), bapo, options.updates)
                cell["simulated_s"] = simulate_32b(1 - cell["hit_share"][SHIPPED])
                if options.rounds:
                    cell["seconds"] = time_modes(
                        data_dir, run_dir, rate, options.steps, options.rounds
                    )
                cells[rate][str(lag)] = cell
    report = {
        "machine": where,
        "steps": options.steps,
        "updates": options.updates,
        "rounds": options.rounds,
        "plain_32b_s": simulate_32b(None),
        "cells": cells,
    }
    picture = options.out.with_suffix(".png")
    draw(report, picture)
    finish(options.out, markdown(report, picture.name), report)


if __name__ == "__main__":
    main()
