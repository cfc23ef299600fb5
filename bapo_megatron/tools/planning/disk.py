"""Disk that a run fills under its ``run_dir``. Bytes throughout."""

import math
from dataclasses import dataclass

from bapo_megatron.tools.planning.layout import model_parameters
from bapo_megatron.tools.planning.workload import Scenario, Workload

OPTIMIZER_BYTES = 12
"""Per parameter: float32 master weights and two moments."""
DUMP_TOKEN_BYTES = 7.8
"""Per response token of a dump with its texts (docs/benchmarks/data_path_cpu_202611.md)."""
BUFFER_TOKEN_BYTES = 5.6
"""Per response token of an unfinished sample, without texts (``tests.benchmarks.bench_buffer``)."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """One kind of files."""

    what: str
    each_bytes: float
    number: int
    """At the end of the run, and while another one is written."""

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.each_bytes * self.number


def disk_use(case: Scenario, work: Workload) -> list[DiskUse]:
    """Return what the run's files need, without logs and metrics."""
    config, checkpoint, rollout = case.config, case.config.checkpoint, case.config.rollout
    parameters, steps, every = model_parameters(case.hf), config.train.steps, checkpoint.every_steps
    saves = steps // every if every else 0
    saves += checkpoint.at_end and saves * every < steps
    if checkpoint.best:  # also where an evaluation is the best one
        saves = steps
    # The newest and the one that is written, the best, and those that stay.
    num_checkpoints = min(saves, checkpoint.keep_last + 1) + bool(checkpoint.best)
    if checkpoint.keep_every and every:
        num_checkpoints += steps // math.lcm(every, checkpoint.keep_every)
    num_batches = rollout.num_rounds - 1 + rollout.steps_ahead
    waiting = rollout.oversample_groups + num_batches * rollout.groups_per_step
    waiting = waiting * rollout.partial + config.replay.batches * rollout.groups_per_step
    buffer_tokens = waiting * rollout.samples_per_group * case.assumptions.response_tokens
    dumps = min(steps, rollout.keep_dumps or steps) if rollout.dump else 0
    return [
        DiskUse("checkpoint", (case.element_bytes + OPTIMIZER_BYTES) * parameters, num_checkpoints),
        DiskUse("its unfinished samples", BUFFER_TOKEN_BYTES * buffer_tokens, num_checkpoints),
        DiskUse("dump", DUMP_TOKEN_BYTES * work.response_tokens_per_step, dumps),
        DiskUse("export", case.element_bytes * parameters, int(checkpoint.at_end)),
    ]
