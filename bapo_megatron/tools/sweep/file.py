"""A sweep's YAML file, and the runs that it asks for, all of them checked."""

import itertools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from bapo_megatron.config.load import ConfigError, load_config, parse_section, read_mapping
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.section import Section
from bapo_megatron.config.settings import differing, flat_settings
from bapo_megatron.runtime.gpus import count_gpus
from bapo_megatron.runtime.processes import environment_set
from bapo_megatron.trainer.check import check_training

MAX_RUNS = 10_000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,+-]*")
"""Name of a variant, which is also that of a directory."""
_NOT_IN_RUN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_OWN_KEYS = ("name", "run_dir", "seed", "resume")
"""Keys that the sweep sets itself."""
_NO_RESULT = {"resume", "log", "checkpoint"}
"""Sections that change no result, so that a run may be continued with others."""


class SweepConfig(Section):
    """The keys of a sweep's file."""

    config: Path
    """Configuration of every run: a path relative to this file."""
    dir: Path
    """Directory for everything that the sweep writes; runs are in ``<dir>/<variant>/seed<n>``."""
    overrides: tuple[str, ...] = ()
    """``KEY=VALUE`` for every run."""
    variants: dict[str, tuple[str, ...]] = Field({})
    """By name the ``KEY=VALUE`` of each variant; the others are compared with the first."""
    grid: dict[str, tuple[bool | int | float | str, ...]] = Field({})
    """Instead of ``variants``: by key its values; each combination of them is a variant."""
    seeds: tuple[int, ...]
    """Each variant is trained once by each seed."""
    jobs: int = Field(1, ge=1)
    """Runs at a time; the GPUs of the machine are divided among them."""
    ranks: int | None = Field(None, ge=1)
    """Ranks of a run; null: as few as its ``parallel`` section allows."""

    @field_validator("dir", mode="before")
    @classmethod
    def _dir_is_named(cls, given: Any) -> Any:
        # An empty path would be the current directory.
        if given == "":
            raise ValueError("must be a directory, got ''; name one")
        return given

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if bool(self.variants) == bool(self.grid):
            has = "both" if self.grid else "neither"
            raise ValueError(f"variants or else grid must be there, got {has}; give one of them")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"seeds must be different numbers, at least one, got {list(self.seeds)}; correct "
                "the list"
            )
        for key, values in self.grid.items():
            if not values:
                raise ValueError(
                    f"grid must have a value for each key, got none for {key}; add one"
                )
        self._refuse_too_many()
        for name in self.by_name():
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{'grid' if self.grid else 'variants'} must give names of letters, digits and "
                    f"._=,+- (each is a directory), got '{name}'; "
                    + ("list variants with names instead" if self.grid else "rename it")
                )
        if len(self.by_name()) < self._num_variants:
            raise ValueError("grid must not have a value twice; remove one")
        for override in (*self.overrides, *itertools.chain(*self.by_name().values())):
            if override.partition("=")[0] in _OWN_KEYS:
                raise ValueError(
                    f"overrides must leave {', '.join(_OWN_KEYS)} to the sweep, got '{override}'; "
                    "remove it"
                )
        return self

    @property
    def _num_variants(self) -> int:
        return len(self.variants) or math.prod(map(len, self.grid.values()))

    def _refuse_too_many(self) -> None:
        if self._num_variants * len(self.seeds) > MAX_RUNS:
            raise ValueError(
                f"{'grid' if self.grid else 'variants'} and seeds must give at most {MAX_RUNS:,} "
                f"runs, got {self._num_variants:,} × {len(self.seeds):,}; leave some out"
            )

    def by_name(self) -> dict[str, tuple[str, ...]]:
        """Return the overrides of each variant."""
        if self.variants:
            return self.variants
        last = {key: key.rpartition(".")[2] for key in self.grid}
        count = Counter(last.values())
        names = {key: name if count[name] == 1 else key for key, name in last.items()}
        return {
            ",".join(f"{names[key]}={value}" for key, value in settings): tuple(
                f"{key}={json.dumps(value)}" for key, value in settings
            )
            for settings in (
                tuple(zip(self.grid, values, strict=True))
                for values in itertools.product(*self.grid.values())
            )
        }


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One variant by one seed."""

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
        """The GPUs that it needs where there are some: its ranks' and its own servers'."""
        rollout = self.config.rollout
        has_own = rollout.engine == "sglang" and rollout.starts_servers and not rollout.colocated
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
    """``CUDA_VISIBLE_DEVICES`` of each run at a time; none without a GPU."""

    @property
    def variants(self) -> dict[str, list[PlannedRun]]:
        """The runs of each variant, in the file's order."""
        return {
            name: [run for run in self.runs if run.variant == name]
            for name in self.config.by_name()
        }

    def config_of(self, variant: str) -> RunConfig:
        """Return the configuration of a variant, by its first seed."""
        return next(run.config for run in self.runs if run.variant == variant)


def load_sweep(path: Path, *, is_here: bool = True) -> Sweep:
    """Read a sweep's file and check every run as ``train`` would.

    ``is_here``: the runs share this machine's GPUs; otherwise nothing is asked of them.

    Raises:
        ConfigError: The file, or the configuration of a run, breaks a rule; or a directory holds a
            run with other settings.
    """
    config = parse_section(SweepConfig, read_mapping(path), str(path))
    runs = [
        _plan(path, config, name, overrides, seed)
        for seed in config.seeds
        for name, overrides in config.by_name().items()
    ]
    shares = _gpu_shares(path, config.jobs, max(run.num_gpus for run in runs)) if is_here else ()
    if config.jobs > 1:
        _check_shared(path, runs, is_here=is_here)
    for run in runs:
        try:
            _check(run, shares, is_here=is_here)
        except ValueError as error:
            raise ConfigError(f"{path}: {run.label}: {error}") from error
    return Sweep(path, config, tuple(runs), shares)


def _plan(
    path: Path, config: SweepConfig, variant: str, overrides: Sequence[str], seed: int
) -> PlannedRun:
    base, run_dir = path.parent / config.config, config.dir / variant / f"seed{seed}"
    name = _NOT_IN_RUN_NAMES.sub("-", f"{config.dir.name}-{variant}-seed{seed}")
    own = (f"name={name}", f"run_dir={json.dumps(str(run_dir))}", f"seed={seed}")
    arguments = (*config.overrides, *overrides, *own)
    try:
        loaded = load_config(base, arguments)
    except ConfigError as error:
        raise ConfigError(f"{path}: {variant}/seed{seed}: {error}") from error
    layout = loaded.parallel
    ranks = config.ranks or layout.tensor * layout.pipeline * layout.context
    return PlannedRun(variant, seed, loaded, ranks, (str(base), *arguments))


def _check(run: PlannedRun, gpu_shares: Sequence[str], *, is_here: bool) -> None:
    """Check what training needs, that there is a score to compare, and what is there already."""
    config, steps = run.config, run.config.train.steps
    every = config.eval.every_steps
    if config.replay.dumps is not None or not config.eval.sets:
        raise ConfigError(
            "eval.sets: needs a set that is evaluated, which replay does not do: runs are compared "
            "by it; add a set, and leave out replay"
        )
    if not config.eval.at_end and not (every and steps % every == 0):
        raise ConfigError(
            "eval.at_end: must be true, got false: runs are compared after their last step; leave "
            "it out"
        )
    with ExitStack() as stack:
        stack.enter_context(environment_set("LOCAL_WORLD_SIZE", str(run.ranks)))
        if gpu_shares:
            stack.enter_context(environment_set("CUDA_VISIBLE_DEVICES", gpu_shares[0]))
        check_training(config, run.ranks, trains_here=is_here)
    _check_run_dir(run)


def _check_shared(path: Path, runs: Sequence[PlannedRun], *, is_here: bool) -> None:
    """Refuse what no two runs at a time can use: ports of this machine, and servers anywhere."""
    users: dict[tuple[str, Any], str] = {}
    for run in runs:
        log, rollout = run.config.log, run.config.rollout
        used: list[tuple[str, Any]] = [("rollout.servers", address) for address in rollout.servers]
        used.append(("rollout.servers_file", rollout.servers_file))
        if is_here:
            used.append(("log.prometheus_port", log.prometheus_port))
        if is_here and rollout.engine == "sglang" and rollout.starts_servers:
            used.append(("rollout.server.port", rollout.server.port))
        for key, value in used:
            user = users.setdefault((key, value), run.label)
            if value and user != run.label:
                raise ConfigError(
                    f"{path}: {run.label}: {key}: must differ from that of {user} where jobs is "
                    f"above 1, got {value}: runs at a time cannot share it; set jobs: 1, or leave "
                    f"{key} out"
                )


def _check_run_dir(run: PlannedRun) -> None:
    """Refuse a run of other settings in its place: neither may it be continued, nor counted."""
    file = run.run_dir / "config.yaml"
    if not os.path.lexists(file):
        return
    try:
        found = load_config(file)
    except ConfigError as error:
        raise ConfigError(f"{error}; or remove {run.run_dir}") from error
    keys = differing(flat_settings(run.config), flat_settings(found))
    if changed := [key for key in keys if key.partition(".")[0] not in _NO_RESULT]:
        raise ConfigError(
            f"{run.run_dir}: holds a run with another {changed[0]}; name another dir, or remove "
            "this run"
        )


def _gpu_shares(path: Path, jobs: int, needed: int) -> tuple[str, ...]:
    """Divide the GPUs of this machine evenly; what is left over stays idle."""
    num_gpus = count_gpus()
    if not num_gpus:
        return ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",")[:num_gpus] if given else [str(n) for n in range(num_gpus)]
    size = num_gpus // jobs
    if needed > num_gpus:
        raise ConfigError(
            f"{path}: a run needs {needed} GPUs for its ranks and servers, and this machine has "
            f"{num_gpus}; write a Slurm script with --slurm, or lower 'ranks'"
        )
    if needed > size:
        raise ConfigError(
            f"{path}: 'jobs' must be at most {num_gpus // needed}, got {jobs}: a run needs "
            f"{needed} of this machine's {num_gpus} GPUs; lower it"
        )
    return tuple(",".join(devices[n * size : (n + 1) * size]) for n in range(jobs))
