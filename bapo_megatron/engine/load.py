"""From ``rollout.engine`` to the engine's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.rollout import ENGINES
from bapo_megatron.runtime.names import LoadError, load_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bapo_megatron.config.schema import RunConfig
    from bapo_megatron.engine.base import Backend


class EngineKind(Protocol):
    """A kind of engine, as the commands see it; its class takes no arguments.

    Importing it must be cheap: every process of a run does.
    """

    packages: ClassVar[Mapping[str, str]]
    """Distributions that its engines need, each with the version they were measured with."""

    def check(self, config: RunConfig, *, is_here: bool = True) -> None:
        """Refuse by a ``ConfigError`` what this kind cannot do, before anything is started.

        Unless ``is_here``, this machine's GPUs do not matter.
        """

    def open(self, config: RunConfig, device: str, *, awaits_weights: bool) -> Backend:
        """Prepare the engines of a run on ``cuda`` or ``cpu``; nothing is started.

        ``awaits_weights``: they get some before they are used, and need not read ``model.path``.
        """

    def serve(self, config: RunConfig, show: Callable[[str], None]) -> None:
        """Start servers for trainers elsewhere, and keep them until this process is ended.

        ``show`` takes what a trainer needs to use the servers, once they are ready.

        Raises:
            ConfigError: It has no servers, or the section cannot be used.
            RolloutError: A server died before it was ever ready, or a port is in use.
        """


def load_kind(name: str) -> EngineKind:
    """Return the kind that ``rollout.engine`` names; ``local`` is ``engine.local.kind:LocalKind``.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        path = (
            f"bapo_megatron.engine.{name}.kind:{name.capitalize()}Kind" if name in ENGINES else name
        )
        return cast("EngineKind", load_named(path)())
    except LoadError as error:
        raise ConfigError(f"rollout.engine: {error}") from error
