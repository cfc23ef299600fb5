"""Checks what training needs before anything starts.

torch is imported only for a user's code and for ``algorithm.entropy_share``.
"""

import importlib.util

from bapo_megatron.config.check import POSITIONS, check_config, check_model_dir
from bapo_megatron.config.load import ConfigError
from bapo_megatron.config.rollout import WITH_SERVERS, RolloutConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.config.scorers import TEACHER_KEY
from bapo_megatron.config.teacher import as_policy, naming_teacher
from bapo_megatron.data.vocabulary import check_same_vocabulary
from bapo_megatron.engine.load import load_kind
from bapo_megatron.policy.adapters import check_adapter, check_targets
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import (
    check_division,
    check_frozen_model,
    check_routers,
    read_hf_config_file,
)
from bapo_megatron.runtime.gpus import count_gpus
from bapo_megatron.runtime.processes import launched_number

_RESERVED_POSITIONS = 7
"""Positions that a server reserves beyond its input (SGLang: 7)."""


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
    if owns_files and config.has_engines:
        load_kind(config.rollout.engine).check(config, is_here=trains_here)
        if trains_here:
            _check_gpus(config.rollout)
    model = config.model
    policy = read_hf_config_file(model.path / "config.json", model.ignored_config_fields)
    check_division(policy, config.parallel)
    check_routers(policy, config.algorithm)
    if model.lora.rank:
        check_targets(policy, model.lora, config.parallel.tensor)
        if model.lora.path is not None:
            check_adapter(model.lora.path, model.lora, policy)
    if config.has_engines:
        _check_frozen_models(config, policy, owns_files=owns_files)
        if owns_files and config.algorithm.distillation.has_engine:
            _check_served_teacher(config)
    algorithm = config.algorithm
    # ``LossStage`` loads the objective again, for its device.
    if ":" in algorithm.objective or algorithm.entropy_share < 1:
        from bapo_megatron.algorithm.load_objective import load_objective
        from bapo_megatron.data.token_columns import scored

        load_objective(algorithm, columns=scored(algorithm))
    if ":" in algorithm.advantage:
        from bapo_megatron.algorithm.advantage import Advantages

        Advantages(algorithm.advantage, algorithm.baseline_shift)


def _check_frozen_models(config: RunConfig, policy: HfConfig, *, owns_files: bool) -> None:
    """Check the frozen models in the trainer; their tokenizers with ``owns_files`` only."""
    for key, model in config.algorithm.frozen_models.items():
        if model.path is None:
            continue
        check_model_dir(model.path, f"{key}.path")
        hf = read_hf_config_file(model.path / "config.json", config.model.ignored_config_fields)
        check_frozen_model(config, key, hf, policy)
        _check_positions(config, f"{key}.path", hf.max_position_embeddings)
        if owns_files:
            check_same_vocabulary(config.model.path, model.path, f"{key}.path")


def _check_served_teacher(config: RunConfig) -> None:
    """Check a teacher behind engines; servers have its weights."""
    distillation, key = config.algorithm.distillation, f"{TEACHER_KEY}.path"
    teacher = distillation.teacher
    assert teacher.path is not None, "DistillationConfig requires it"
    is_remote = teacher.engine in WITH_SERVERS
    if is_remote and not teacher.servers:
        raise ConfigError(
            f"{TEACHER_KEY}.servers: must be given with engine: {teacher.engine}, got none; start "
            "them with serve --teacher (docs/rollout.md), or change engine"
        )
    hf_config = check_model_dir(teacher.path, key, needs_weights=not is_remote)
    check_same_vocabulary(config.model.path, teacher.path, key)
    with naming_teacher():
        load_kind(teacher.engine).check(as_policy(config))
    if shared := set(teacher.servers) & set(config.rollout.servers):
        raise ConfigError(
            f"{TEACHER_KEY}.servers: must not be in rollout.servers, whose weights change, got "
            f"{min(shared)} in both; start other servers with serve --teacher"
        )
    vocab_size = hf_config.get("vocab_size")
    is_too_many = isinstance(vocab_size, int) and distillation.top_k > vocab_size
    if distillation.loss == "top_k" and is_too_many:
        raise ConfigError(
            f"algorithm.distillation.top_k: must be at most the teacher's vocab_size {vocab_size}, "
            f"got {distillation.top_k}; lower it"
        )
    _check_positions(config, key, hf_config.get(POSITIONS), _RESERVED_POSITIONS if is_remote else 0)


def _check_positions(config: RunConfig, key: str, limit: object, reserve: int = 0) -> None:
    num_positions = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if isinstance(limit, int) and num_positions + reserve > limit:
        engine = f", and {reserve} more that the engine reserves" if reserve else ""
        raise ConfigError(
            f"{key}: its {limit} positions must hold data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {num_positions}{engine}; lower one of them, or choose "
            "another model"
        )


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
    has_servers = rollout.has_own_gpus and rollout.starts_servers
    if has_servers and count_gpus() and first_gpu < num_ranks:
        raise ConfigError(
            f"rollout.server.first_gpu: must be at least {num_ranks}, the number of ranks on this "
            f"node, got {first_gpu}; start fewer ranks (NPROC), or share all GPUs "
            "(rollout.colocated=true rollout.weight_sync.method=tensor)"
        )
