"""What training needs, checked before anything is started; imports neither torch nor Megatron."""

from bapo_megatron.config.check import check_config
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.load import load_kind


def check_training(config: RunConfig, world_size: int, *, owns_files: bool = True) -> None:
    """Check configuration, engine, objective and advantage; arguments as of ``check_config``.

    Raises:
        ConfigError: A rule is broken, or the engine cannot do what is asked.
        UserCodeError: The objective or the advantage cannot be used.
    """
    from bapo_megatron.algorithm.advantage import Advantages  # imports torch
    from bapo_megatron.algorithm.load_objective import load_objective

    check_config(config, world_size, owns_files=owns_files)
    if owns_files and config.replay.dumps is None:
        load_kind(config.rollout.engine).check(config)
    # ``LossStage`` loads the objective again, for its device and kernels.
    load_objective(config.algorithm)
    Advantages(config.algorithm.advantage)
