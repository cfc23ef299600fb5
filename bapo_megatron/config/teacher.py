"""A served teacher's configuration in the keys that engines read: those of a policy."""

import contextlib
import re
from collections.abc import Iterator

from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.rollout import ServerConfig, WeightSyncConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.scorers import TEACHER_KEY
from bapo_megatron.config.section import with_values
from bapo_megatron.errors import RolloutError, ServerError


def as_policy(config: RunConfig) -> RunConfig:
    """Return the configuration of a run whose policy is the teacher, on the teacher's engines."""
    teacher = config.algorithm.distillation.teacher
    rollout = {
        "engine": teacher.engine,
        "servers": teacher.servers,
        "servers_file": None,
        "min_servers": None,
        "colocated": False,
        "server": ServerConfig(),
        "local": {"sampling_bits": None},
        "weight_sync": WeightSyncConfig(),
    }
    model = {"path": teacher.path}
    return with_values(config.without_router_replay(), model=model, rollout=rollout)


@contextlib.contextmanager
def naming_teacher() -> Iterator[None]:
    """Replace the policy's keys by the teacher's in errors about ``as_policy``'s configuration."""
    try:
        yield
    except ServerError:
        raise
    except (ConfigError, RolloutError) as error:
        raise type(error)(teacher_text(error)) from error


def teacher_text(error: BaseException | str) -> str:
    """Return the text of an error with the teacher's keys in place of the policy's."""
    keys = r"\b(?:model\.(path)|rollout\.(servers|engine)|rollout\.health\.(patience_s))\b"
    return re.sub(keys, rf"{TEACHER_KEY}.\1\2\3", str(error))
