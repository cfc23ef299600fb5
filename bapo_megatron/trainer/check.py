"""Checks what training needs before anything starts.

torch is imported only for a user's code and for ``algorithm.entropy_share``.
"""

import importlib.util

from bapo_megatron.config.check import check_config
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.rollout import RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.engine.load import load_kind
from bapo_megatron.policy.hf_config import read_hf_config_file
from bapo_megatron.runtime.gpus import count_gpus
from bapo_megatron.runtime.processes import launched_number


def check_training(
    config: RunConfig, world_size: int, *, owns_files: bool = True, trains_here: bool = True
) -> None:
    """Check packages, configuration, engine, objective and advantage; see ``check_config``.

    With ``trains_here`` also that the engine runs here, and that ranks and servers share no GPU.

    Raises:
        ConfigError: A rule is broken, or the engine cannot do what is asked.
        UserCodeError: The objective or the advantage cannot be used.
    """
    _check_packages(config.log.wandb_project if owns_files else "")
    check_config(config, world_size, owns_files=owns_files)
    if owns_files and config.replay.dumps is None:
        load_kind(config.rollout.engine).check(config, is_here=trains_here)
        if trains_here:
            _check_gpus(config.rollout)
    model = config.model
    read_hf_config_file(model.path / "config.json", model.ignored_config_fields)
    algorithm = config.algorithm
    # ``LossStage`` loads the objective again, for its device and kernels.
    if ":" in algorithm.objective or algorithm.entropy_share < 1:
        from bapo_megatron.algorithm.load_objective import load_objective

        load_objective(algorithm)
    if ":" in algorithm.advantage:
        from bapo_megatron.algorithm.advantage import Advantages

        Advantages(algorithm.advantage, algorithm.baseline_shift)


def _check_packages(wandb_project: str) -> None:
    # Megatron takes any package called apex for NVIDIA's.
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        raise ConfigError(
            "apex: must be NVIDIA's with its CUDA extensions, got no module 'amp_C'; pip uninstall "
            "apex, or build NVIDIA's (docs/launch.md)"
        )
    if wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb_project: is '{wandb_project}' but wandb is not installed; "
            "pip install wandb, or leave the project empty"
        )


def _check_gpus(rollout: RolloutConfig) -> None:
    first_gpu, num_ranks = rollout.server.first_gpu, launched_number("LOCAL_WORLD_SIZE", 1)
    has_servers = rollout.engine == "sglang" and rollout.starts_servers and not rollout.colocated
    if has_servers and count_gpus() and first_gpu < num_ranks:
        raise ConfigError(
            f"rollout.server.first_gpu: must be at least {num_ranks}, the number of ranks on this "
            f"node, got {first_gpu}; start fewer ranks (NPROC), or share all GPUs "
            "(rollout.colocated=true rollout.weight_sync.method=tensor)"
        )
