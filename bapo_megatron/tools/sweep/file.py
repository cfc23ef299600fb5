"""A sweep's YAML file, and the runs that it describes, checked."""

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from bapo_megatron.config.load import ConfigError, load_config, parse_section, read_mapping
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import HomePath, Section
from bapo_megatron.config.settings import differing, flat_settings
from bapo_megatron.runtime.gpus import count_gpus
from bapo_megatron.runtime.processes import environment_set
from bapo_megatron.trainer.check import check_training

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,+-]*")
"""Name of a variant, which is also that of a directory."""
_NOT_IN_RUN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_SWEEP_KEYS = ("name", "run_dir", "seed", "resume")
"""Keys that the sweep sets itself."""
_NO_RESULT = {"resume", "log", "checkpoint"}
"""Sections that change no result, so that a run may be continued with others."""


class SweepConfig(Section):
    """The keys of a sweep's file."""

    config: HomePath
    """Configuration of every run: a path relative to this file."""
    dir: HomePath
    """Directory for everything that the sweep writes; runs are in ``<dir>/<variant>/seed<n>``."""
    overrides: tuple[str, ...] = ()
    """``KEY=VALUE`` for every run."""
    variants: dict[str, tuple[str, ...]] = Field(min_length=1)
    """``KEY=VALUE`` overrides of each variant, by its name; all are compared with the first."""
    seeds: tuple[int, ...] = Field(min_length=1)
    """Each variant is trained once with each seed."""
    jobs: int = Field(1, ge=1)
    """Number of concurrent runs; they share the machine's GPUs evenly."""
    ranks: int | None = Field(None, ge=1)
    """Ranks of a run; null: as few as its ``parallel`` section allows."""

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be distinct, got {list(self.seeds)}; correct the list")
        for name in self.variants:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    "variants must have names of letters, digits and ._=,+- (each is a directory), "
                    f"got '{name}'; rename it"
                )
        for override in (*self.overrides, *itertools.chain(*self.variants.values())):
            if override.partition("=")[0] in _SWEEP_KEYS:
                raise ValueError(
                    f"overrides must leave {', '.join(_SWEEP_KEYS)} to the sweep, got "
                    f"'{override}'; remove it"
                )
        return self


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One variant with one seed."""

    variant: str
    seed: int
    config: RunConfig
    ranks: int
    arguments: tuple[str, ...]
    """Arguments of ``train``: the configuration's file and the overrides."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.variant}/seed{self.seed}"

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        return self.config.run_dir

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.run_dir / "logs" / "sweep.log"

    @property
    def is_finished(self) -> bool:
        """Whether its last step is done."""
        return (self.run_dir / "summary.json").exists()

    @property
    def num_gpus(self) -> int:
        """GPUs of its ranks and of its own servers, on a machine with GPUs."""
        rollout = self.config.rollout
        has_own = rollout.has_own_gpus and rollout.starts_servers
        return self.ranks + has_own * rollout.server.count * rollout.server.tensor

    def command(self) -> list[str]:
        """Return the command line, which begins the run or continues it."""
        launcher = ["-m", "bapo_megatron.torchrun", "--nproc-per-node", str(self.ranks)]
        return [
            sys.executable,
            *(launcher if self.ranks > 1 else ()),
            *("-m", "bapo_megatron", "train", *self.arguments, "--resume"),
        ]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that can be run."""

    file: Path
    config: SweepConfig
    runs: tuple[PlannedRun, ...]
    """All variants of the first seed come first, so that pairs are complete early."""
    gpu_shares: tuple[str, ...]
    """``CUDA_VISIBLE_DEVICES`` of each concurrent run; empty without a GPU."""

    @property
    def variants(self) -> dict[str, list[PlannedRun]]:
        """The runs of each variant, in the file's order."""
        return {
            name: [run for run in self.runs if run.variant == name] for name in self.config.variants
        }


def load_sweep(path: Path, *, is_here: bool = True) -> Sweep:
    """Read a sweep's file and check every run as ``train`` would.

    ``is_here``: the runs share this machine's GPUs; otherwise no GPUs are checked.

    Raises:
        ConfigError: The file, or the configuration of a run, breaks a rule; or a directory holds a
            run with other settings.
    """
    config = parse_section(SweepConfig, read_mapping(path), str(path))
    runs = []
    for seed in config.seeds:
        for name, overrides in config.variants.items():
            with _errors_at(f"{path}: {name}/seed{seed}"):
                runs.append(_plan(path.parent / config.config, config, name, overrides, seed))
    num_gpus = max(run.num_gpus for run in runs)
    shares = _gpu_shares(path, config.jobs, num_gpus) if is_here else ()
    users: dict[object, str] = {}
    for run in runs:
        with _errors_at(f"{path}: {run.label}"):
            if config.jobs > 1:
                _check_servers(run, users)
            _check(run, shares, is_here=is_here)
    return Sweep(path, config, tuple(runs), shares)


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _plan(
    base: Path, config: SweepConfig, variant: str, overrides: Sequence[str], seed: int
) -> PlannedRun:
    run_dir = config.dir / variant / f"seed{seed}"
    name = _NOT_IN_RUN_NAMES.sub("-", f"{config.dir.name}-{variant}-seed{seed}")
    identity = (f"name={name}", f"run_dir={json.dumps(str(run_dir))}", f"seed={seed}")
    arguments = (*config.overrides, *overrides, *identity)
    run_config = load_config(base, arguments)
    layout = run_config.parallel
    ranks = config.ranks or layout.tensor * layout.pipeline * layout.context
    return PlannedRun(variant, seed, run_config, ranks, (str(base), *arguments))


def _check(run: PlannedRun, gpu_shares: Sequence[str], *, is_here: bool) -> None:
    """Check what training needs, that there is a score to compare, and the run directory."""
    config, steps = run.config, run.config.train.steps
    every = config.eval.every_steps
    if not config.has_engines or not config.eval.sets:
        raise ConfigError(
            "eval.sets: must have a set, which runs without engines do not evaluate: runs are "
            "compared by their scores; add a set, and leave out replay and nll"
        )
    if not config.eval.at_end and not (every and steps % every == 0):
        raise ConfigError(
            "eval.at_end: must be true, got false: runs are compared by the scores of their last "
            "step; leave it out"
        )
    with ExitStack() as stack:
        stack.enter_context(environment_set("LOCAL_WORLD_SIZE", str(run.ranks)))
        if gpu_shares:
            stack.enter_context(environment_set("CUDA_VISIBLE_DEVICES", gpu_shares[0]))
        check_training(config, run.ranks, trains_here=is_here)
    _check_run_dir(run)


def _check_servers(run: PlannedRun, users: dict[object, str]) -> None:
    """Refuse servers that an earlier one of ``users`` has: each run has weights of its own."""
    rollout = run.config.rollout
    for server in filter(None, (*rollout.servers, rollout.servers_file)):
        user = users.setdefault(server, run.label)
        if user != run.label:
            raise ConfigError(
                f"rollout.servers: must differ from those of {user}, a concurrent run, got "
                f"{server}; set jobs: 1, or leave rollout.servers out"
            )


def _check_run_dir(run: PlannedRun) -> None:
    """Refuse a run directory with other settings, which may be neither continued nor counted."""
    file = run.run_dir / "config.yaml"
    if not os.path.lexists(file):
        return
    try:
        existing = load_config(file)
    except ConfigError as error:
        raise ConfigError(f"{error}; or remove {run.run_dir}") from error
    keys = differing(flat_settings(run.config), flat_settings(existing))
    if changed := [key for key in keys if key.partition(".")[0] not in _NO_RESULT]:
        raise ConfigError(
            f"{run.run_dir}: holds a run with another {changed[0]}; name another dir, or remove it"
        )


def _gpu_shares(path: Path, jobs: int, needed: int) -> tuple[str, ...]:
    """Divide the GPUs of this machine evenly; what is left over stays idle."""
    num_gpus = count_gpus()
    if not num_gpus:
        return ()
    if jobs * needed > num_gpus:
        raise ConfigError(
            f"{path}: 'jobs' × the GPUs of a run's ranks and servers must be at most the "
            f"{num_gpus} of this machine, got {jobs} × {needed}; lower jobs or ranks, or write a "
            "Slurm script with --slurm"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",")[:num_gpus] if visible else list(map(str, range(num_gpus)))
    size = num_gpus // jobs
    return tuple(",".join(devices[n * size : (n + 1) * size]) for n in range(jobs))
