"""Admission by tokens against the best fixed number of requests per engine, simulated.

python -m tests.benchmarks.sim_admission --page docs/benchmarks/rollout_simulation_202611.md

The engines, the trainer and the schedule are those of ``sim_rollout``, with batches that memory
alone limits; ``rollout.admission`` chooses, as in a run, from what it has seen so far.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.engine.base import Capabilities
from bapo_megatron.engine.pooled import PooledEngine
from bapo_megatron.rollout.admission import Admission, Claim
from bapo_megatron.runtime.versions import commit_of
from tests.benchmarks import harness
from tests.benchmarks.sim_cluster import Hardware, Lengths
from tests.benchmarks.sim_schedule import Mode, Simulation

if TYPE_CHECKING:
    from bapo_megatron.engine.base import Engine
    from tests.benchmarks import sim_cluster

SYNCHRONOUS = "synchronous"
TITLE = "## Admission by tokens"
LENGTHS = {
    "log-normal, mean 12,600": Lengths(),
    "long tail, mean 9,900": Lengths(median=3000.0, sigma=1.8),
    "nearly equal, mean 20,400": Lengths(median=20_000.0, sigma=0.2),
}
LIMITS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass
class Fixed:
    """As many requests per engine."""

    limit: int

    def pick(self, engines: list[sim_cluster.Engine], sequence: sim_cluster.Sequence) -> int | None:
        number = min(range(len(engines)), key=lambda n: len(engines[n]))
        may_go = len(engines[number]) < self.limit and engines[number].has_room(sequence)
        return number if may_go else None


@dataclass
class ByTokens:
    """What ``EnginePool`` does, whose clock is that of the simulation."""

    hardware: Hardware
    lengths: Lengths
    admission: Admission = field(default_factory=lambda: Admission(None))
    _places: list[PooledEngine] = field(default_factory=list)
    _claims: list[dict[sim_cluster.Sequence, Claim]] = field(default_factory=list)
    _seen: dict[int, float] = field(default_factory=dict)
    """Tokens of each engine when it was looked at."""

    def pick(self, engines: list[sim_cluster.Engine], sequence: sim_cluster.Sequence) -> int | None:
        if not self._places:
            tokens = int(self.hardware.kv_tokens)
            cache = Capabilities(1, frozenset(), cache_tokens=tokens)
            self._places = [PooledEngine(cast("Engine", None), properties=cache) for _ in engines]
            self._claims = [{} for _ in engines]
        for number, engine in enumerate(engines):
            self._follow(number, engine)
        claim = Claim(
            sequence.group_id, self.lengths.prompt_tokens, int(sequence.done), self.lengths.longest
        )
        place = self.admission.choose(self._places, claim, is_due=False)
        if place is None:
            return None
        number = self._places.index(place)
        if not engines[number].has_room(sequence):  # the server's own rule
            self.admission.release(place, claim, has_ended=False)
            return None
        self._claims[number][sequence] = claim
        return number

    def _follow(self, number: int, engine: sim_cluster.Engine) -> None:
        """Tell the admission what has come, and what has left the engine."""
        place, claims = self._places[number], self._claims[number]
        seen = self._seen.get(number, 0.0)
        if len(engine) == len(claims) and engine.tokens - seen < self.hardware.kv_tokens / 256:
            return
        self._seen[number], running = engine.tokens, engine.running()
        for sequence, claim in list(claims.items()):
            done = int(running.get(sequence, sequence.done))
            self.admission.advance(place, claim, done - claim.position)
            if sequence not in running:
                del claims[sequence]
                is_cut = sequence.length >= self.lengths.longest
                has_ended = sequence.is_finished and not is_cut
                self.admission.release(place, claim, has_ended=has_ended)


class Result(NamedTuple):
    wall_s: float
    retractions: int


def simulate(
    kind: str, lengths: Lengths, limit: int | None, seed: int, steps: int, *, engines: int = 8
) -> Result:
    """Run some steps; without ``limit`` by tokens."""
    settings: dict[str, Any] = {"groups_per_step": 16 * engines, "samples_per_group": 16}
    if kind != SYNCHRONOUS:
        settings |= {"async_steps": 1, "oversample_groups": 8 * engines}
    config = RolloutConfig.model_validate(settings | {"max_response_tokens": lengths.longest})
    hardware = Hardware(engines=engines, max_running=4096, trainer_gpus=engines)
    rule = ByTokens(hardware, lengths) if limit is None else Fixed(limit)
    record = Simulation(Mode(kind, config), hardware, lengths, seed, rule).run(steps)
    return Result(record.snapshots[-1].now_s, record.retracted)


def report(results: dict[tuple[str, str], list[dict[int | None, Result]]], steps: int) -> str:
    """The section of the page; ``results`` by schedule and distribution, for each seed by limit."""
    seeds = len(next(iter(results.values())))
    walls_s = {name: [0.0, 0.0] for _, name in results}
    head = ["schedule", "lengths", "best limit", "by tokens", "single seeds", "half the limit"]
    head += ["a quarter", "an eighth", "retractions by tokens", "at the best limit"]
    rows = []
    for (kind, name), by_seed in results.items():
        totals = {limit: sum(seed[limit].wall_s for seed in by_seed) for limit in (None, *LIMITS)}
        best = min(LIMITS, key=totals.__getitem__)
        single = [seed[None].wall_s / seed[best].wall_s for seed in by_seed]
        retractions = [
            sum(seed[limit].retractions for seed in by_seed) // seeds for limit in (None, best)
        ]
        rows.append(
            [
                kind,
                name,
                best,
                f"**{totals[None] / totals[best]:.3f}**",
                f"{min(single):.3f} – {max(single):.3f}",
                *(f"{totals[best // part] / totals[best]:.3f}" for part in (2, 4, 8)),
                *(f"{number:,}" for number in retractions),
            ]
        )
        for number, limit in enumerate((None, best)):
            walls_s[name][number] += totals[limit]
    both = (f"{name}: {by_tokens / best:.3f}" for name, (by_tokens, best) in walls_s.items())
    blocks = [
        TITLE,
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit_of(harness.REPOSITORY) or 'unknown'}.",
        f"    python -m {harness._module()} {' '.join(sys.argv[1:])}",
        "Eight engines as above, with batches that only memory limits; a step has 2,048 responses. "
        "`rollout/admission.py` decides as in a run, from what it has seen, and is told neither "
        "lengths nor limits. It is compared with every fixed number of requests per engine out of "
        f"{', '.join(map(str, LIMITS))}. The best limit of a row is the one with which {steps} "
        f"steps, from the first one on, take least in all {seeds} seeds; other times are over that "
        "one.",
        "\n".join(harness.table(head, rows)),
        f"Both schedules together: {'; '.join(both)}.",
    ]
    return "\n\n".join(blocks) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="replace the section in this page")
    options = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        jobs = {
            (kind, name, seed, limit): pool.submit(
                simulate, kind, LENGTHS[name], limit, seed, options.steps
            )
            for kind in (SYNCHRONOUS, "async 1")
            for name in LENGTHS
            for seed in range(options.seeds)
            for limit in (None, *LIMITS)
        }
        results: dict[tuple[str, str], list[dict[int | None, Result]]] = {}
        for (kind, name, seed, limit), future in jobs.items():
            by_seed = results.setdefault((kind, name), [{} for _ in range(options.seeds)])
            by_seed[seed][limit] = future.result()
    text = report(results, options.steps)
    sys.stdout.write(text)
    if options.page is not None:
        before, _, _ = options.page.read_text().partition(TITLE)
        options.page.write_text(before.rstrip() + "\n\n" + text)


if __name__ == "__main__":
    main()
