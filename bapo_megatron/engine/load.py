"""Loads the kind of engine that ``rollout.engine`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from bapo_megatron.config.load import ConfigError
from bapo_megatron.engine import BUILT_IN
from bapo_megatron.runtime.names import LoadError, load_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend


class EngineKind(Protocol):
    """A kind of engine, as the commands see it; its class takes no arguments.

    Importing it must be cheap, because every process of a run does.
    """

    packages: ClassVar[Mapping[str, str]]
    """Distributions that its engines need, each with the tested version."""
    model_types: ClassVar[tuple[str, ...] | None]
    """Those of config.json that it samples; None: every one that trains."""

    def check(self, config: RunConfig, *, is_here: bool = True) -> None:
        """Raise a ``ConfigError`` for unsupported settings, before anything is started.

        Without ``is_here``, ignore this machine's GPUs.
        """

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        """Prepare the engines of a run on ``cuda`` or ``cpu``; nothing is started.

        With ``awaits_weights`` a weight sync comes first: they need not read ``model.path``.
        """

    def serve(
        self, config: RunConfig, show: Callable[[str], None], *, key: str = "rollout.servers"
    ) -> None:
        """Run servers for trainers elsewhere until this process is ended.

        ``show`` gets the lines that a trainer needs, once the servers are ready. ``key`` is where
        the trainer lists the servers: those of ``rollout.servers`` wait for a weight sync, others
        load ``model.path``.

        Raises:
            ConfigError: This kind has no servers, or a setting is wrong.
            RolloutError: A server died before it was ever ready, or a port is in use.
        """


def load_kind(name: str) -> EngineKind:
    """Return the kind that ``rollout.engine`` names; ``local`` is ``engine.local.kind:LocalKind``.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        own = f"bapo_megatron.engine.{name}.kind:{name.capitalize()}Kind"
        return cast("EngineKind", load_named(own if name in BUILT_IN else name)())
    except LoadError as error:
        raise ConfigError(f"rollout.engine: {error}") from error
