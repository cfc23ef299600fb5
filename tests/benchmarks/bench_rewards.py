"""What grading costs: ten thousand answers, one in a hundred of them hostile, or all formulas.

Answers are those of the hand-labelled pairs behind a long reasoning; hostile ones that try to hang
or exhaust the grader; and formulas that differ from their references, the ordinary wrong answers
where the answer is no number. They are graded by the pool that trains, while a task in the same
event loop, which stands for generation, notes how late it is woken.

    python -m tests.benchmarks.bench_rewards --out docs/benchmarks/rewards_cpu_202611
"""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.reward.math_text import as_number
from bapo_megatron.reward.pool import RewardPool
from tests.benchmarks.harness import columns, finish, machine, page, report_arguments
from tests.reward.answer_corpus import pairs
from tests.reward.hostile import HOSTILE

_PAIRS = Path(__file__).parents[1] / "reward" / "answer_pairs.jsonl"
_TICK_S = 0.002
_REASONING = "First, we note that the sum of the two is known, so $a + b = 12$ and $b = 5$. "


@dataclass(frozen=True, slots=True)
class Load:
    """What is graded, and under which limits."""

    answers: int
    hostile_share: float
    formula_share: float
    workers: int
    timeout_s: float
    memory_limit_mb: int
    reasoning_characters: int


COLUMNS = {
    "": "{case}",
    "answers/s": "{answers_per_s:,.0f}",
    "p50": "{p50_ms:.1f} ms",
    "p99": "{p99_ms:.0f} ms",
    "longest": "{max_ms:,.0f} ms",
    "killed": "{killed} of {hostile} hostile",
    "graded wrong": "{wrong}",
    "heartbeat late, p99": "{heartbeat_p99_ms:.1f} ms",
    "at most": "{heartbeat_max_ms:.0f} ms",
}


@dataclass(frozen=True, slots=True)
class _Item:
    response: str
    answer: str
    reward: float | None
    """What it should earn; none for pairs that are known limits, and for formulas."""
    hostile: str = ""


def make_items(load: Load) -> list[_Item]:
    generator = random.Random(0)
    labelled = [json.loads(line) for line in _PAIRS.read_text().splitlines()]
    reasoning = _REASONING * (load.reasoning_characters // len(_REASONING))
    num_hostile = round(load.answers * load.hostile_share)
    num_formulas = round(load.answers * load.formula_share)
    names = list(HOSTILE)
    items = [
        _Item(HOSTILE[names[number % len(names)]], "42", 0.0, names[number % len(names)])
        for number in range(num_hostile)
    ]
    items += [
        _Item(rf"{reasoning}\boxed{{{answer}}}", reference, None)
        for answer, reference in itertools.islice(_formula_pairs(), num_formulas)
    ]
    for _ in range(load.answers - num_hostile - num_formulas):
        pair = generator.choice(labelled)
        reward = None if "known_limit" in pair else float(pair["equal"])
        items.append(_Item(reasoning + pair["response"], pair["answer"], reward))
    generator.shuffle(items)
    return items


def _formula_pairs() -> Iterator[tuple[str, str]]:
    """Different references of which the second is no number; a few of them are equal."""
    for seed in itertools.count():
        for _, answer, reference in pairs(1000, seed=seed):
            if as_number(reference) is None:
                yield answer, reference


async def _keep_beating(gaps_s: list[float]) -> None:
    """Note how much later than asked for the loop wakes this task."""
    before_s = time.perf_counter()
    while True:
        await asyncio.sleep(_TICK_S)
        now_s = time.perf_counter()
        gaps_s.append(now_s - before_s - _TICK_S)
        before_s = now_s


async def _measure_idle(seconds: float) -> tuple[float, float]:
    gaps_s: list[float] = []
    beating = asyncio.create_task(_keep_beating(gaps_s))
    await asyncio.sleep(seconds)
    beating.cancel()
    return 1e3 * float(np.quantile(gaps_s, 0.99)), 1e3 * max(gaps_s)


async def _measure(case: str, load: Load) -> dict[str, Any]:
    items = iter(make_items(load))
    durations_s: list[float] = []
    gaps_s: list[float] = []
    killed: Counter[str] = Counter()
    wrong = 0
    async with RewardPool(
        load.workers, load.timeout_s, memory_limit_mb=load.memory_limit_mb
    ) as pool:
        await asyncio.gather(*(pool.score(r"\boxed{1+1}", "2") for _ in range(load.workers)))

        async def grade() -> None:
            nonlocal wrong
            for item in items:
                start_s = time.perf_counter()
                score = await pool.score(item.response, item.answer)
                durations_s.append(time.perf_counter() - start_s)
                if score.timed_out:
                    killed[item.hostile or item.answer] += 1
                wrong += item.reward is not None and score.reward != item.reward

        beating = asyncio.create_task(_keep_beating(gaps_s))
        start_s = time.perf_counter()
        await asyncio.gather(*(grade() for _ in range(load.workers)))
        wall_s = time.perf_counter() - start_s
        beating.cancel()
    return {
        "case": case,
        "hostile": round(load.answers * load.hostile_share),
        "answers_per_s": load.answers / wall_s,
        "p50_ms": 1e3 * float(np.quantile(durations_s, 0.5)),
        "p99_ms": 1e3 * float(np.quantile(durations_s, 0.99)),
        "max_ms": 1e3 * max(durations_s),
        "killed": killed.total(),
        "killed_names": dict(killed),
        "wrong": wrong,
        "heartbeat_p99_ms": 1e3 * float(np.quantile(gaps_s, 0.99)),
        "heartbeat_max_ms": 1e3 * max(gaps_s),
    }


def measure(case: str, load: Load) -> dict[str, Any]:
    """Grade a load in an event loop of its own."""
    return asyncio.run(_measure(case, load))


def _report(
    load: Load, rows: list[dict[str, Any]], idle_ms: tuple[float, float], where: dict[str, Any]
) -> str:
    names = sorted({name for row in rows for name in row["killed_names"]})
    killed = f"Killed: {', '.join(names)}. Every other hostile answer is refused before."
    return page(
        "Rewards",
        where,
        f"{load.answers:,} answers, graded by {load.workers} worker processes with a limit of "
        f"{load.timeout_s:g} s and {load.memory_limit_mb:,} MB each; a response has some "
        f"{load.reasoning_characters:,} characters of reasoning before one of the "
        "hand-labelled answers of tests/reward/answer_pairs.jsonl. Hostile ones are those of "
        "tests/reward/hostile.py: towers of powers, megabytes of braces, bait for regular "
        "expressions, integrals without an end. Different formulas are pairs of different "
        "references of tests/reward/answer_corpus.py, nine in ten of one form and none a number. "
        "The time of an answer is that from the call to "
        "the score, and of one that is killed the limit; the start of the next worker falls to "
        "the answer after it. The heartbeat is a task in the event loop that asks for the scores; "
        "its delay is what grading could add to generation.",
        columns(rows, COLUMNS),
        f"Without any grading it is late by {idle_ms[0]:.1f} ms (p99), at most {idle_ms[1]:.0f} "
        f"ms, on this machine: {where['cpus']} cores, of which the workers take "
        f"{load.workers}, with a load of {where['load']:.1f} when the measurement began.",
        killed if names else "",
    )


def main() -> None:
    parser = report_arguments(__doc__ or "")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    options = parser.parse_args()
    limits = (options.workers, options.timeout_s, 2048, 8000)
    load = Load(options.answers, 0.01, 0.0, *limits)
    loads = {
        "no hostile answer": replace(load, hostile_share=0.0),
        "1 % hostile": load,
        "different formulas": replace(load, hostile_share=0.0, formula_share=1.0),
    }
    where: dict[str, Any] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    idle_ms = asyncio.run(_measure_idle(20.0))
    rows = [measure(case, load) for case, load in loads.items()]
    where |= machine()
    values = {
        "machine": where,
        "load": asdict(load),
        "idle_heartbeat_ms": idle_ms,
        "rows": rows,
    }
    finish(options.out, _report(load, rows, idle_ms, where), values)


if __name__ == "__main__":
    main()
