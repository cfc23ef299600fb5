"""Loads the objective that ``algorithm.objective`` names, and checks a user's before use."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bapo_megatron.algorithm.check_objective import (
    CPU,
    ColumnKinds,
    ObjectiveError,
    check_objective,
    trial_tokens,
)
from bapo_megatron.algorithm.loss import with_sums
from bapo_megatron.algorithm.objective import FunctionObjective, Objective
from bapo_megatron.algorithm.objectives import NAMED
from bapo_megatron.algorithm.objectives.histograms import HighEntropy
from bapo_megatron.algorithm.user_code import UserCode
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.schema import AlgorithmConfig

_METHODS = (
    *("loss", "statistics", "decide", "foresee", "select", "weights", "bounds", "report"),
    *("report_decision", "refuses", "explain_refusal"),
)


@dataclass(frozen=True, slots=True)
class LoadedObjective:
    """An objective, and the sizes of what it returns; equal on all ranks."""

    objective: Objective
    report_names: tuple[str, ...]
    """Keys of ``report``."""
    statistic_size: int
    """K with ``needs: update`` or ``micro_batch``, else 0."""
    decision_size: int
    """D with ``needs: update`` or ``micro_batch``, else 0."""

    @property
    def collects(self) -> bool:
        """Whether it must see the whole update before the first gradient."""
        return self.objective.needs in ("response", "update")


def load_objective(
    config: AlgorithmConfig, device: torch.device = CPU, columns: ColumnKinds | None = None
) -> LoadedObjective:
    """Make the objective; check a user's.

    Args:
        config: The algorithm section.
        device: Device of the tokens.
        columns: What the tokens' columns are (``data.token_columns.scored``).

    Raises:
        UserCodeError: The user's code cannot be imported, raises, or returns what cannot be used.
        ConfigError: ``entropy_share`` does not work with the objective.
    """
    if named := NAMED.get(config.objective):
        options = named.options and config.options(named.options)
        objective = named.make(options, config)
    else:
        code = UserCode("algorithm.objective", config.objective)
        objective = _from_user(code, config.objective_options)
        try:
            with code.guard():
                check_objective(objective, device, columns)
        except ObjectiveError as error:
            code.refuse(str(error))
        if config.centering.is_used and not objective.centers:
            code.refuse("does not center (Objective.centers); set algorithm.centering.top_k: 0")
    if config.entropy_share < 1:
        if objective.needs not in ("token", "update") or objective.speculate == "always":
            raise ConfigError(
                "algorithm.entropy_share: must be 1 with an objective that sums over responses or "
                f"micro-batches, or with speculate: always, got {config.entropy_share:g}; leave it "
                "out, or choose another objective (docs/objectives.md)"
            )
        objective = HighEntropy(objective, config.entropy_share)
    tokens = with_sums(objective, trial_tokens(device, columns))
    by_update = tokens.decision is not None
    return LoadedObjective(
        objective,
        report_names=tuple(objective.report(tokens)),
        statistic_size=objective.statistics(tokens).numel() if by_update else 0,
        decision_size=0 if tokens.decision is None else tokens.decision.numel(),
    )


def _from_user(code: UserCode, options: Mapping[str, Any]) -> Objective:
    """Make an objective of the named class or function; its errors name file and line."""
    definition = code.object
    if inspect.isclass(definition):
        with code.guard():
            # Gives the defaults also to a class that does not derive from Objective.
            objective: Objective = type(definition.__name__, (definition, Objective), {})(**options)
    elif callable(definition):
        objective = FunctionObjective(functools.partial(definition, **options))
    else:
        code.refuse(f"is a {type(definition).__name__}; name a function or a class")
    for method in _METHODS:
        # Works even if the user's class is a frozen dataclass.
        object.__setattr__(objective, method, code.guarded(getattr(objective, method)))
    object.__setattr__(objective, "guarded", code.guard)
    return objective
