"""Which GPUs train and which sample, and in which layout, where nobody has chosen yet."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.schema import RunConfig
from bapo_megatron.policy.hf_config import HfConfig
from bapo_megatron.runtime.gpus import find_gpu
from bapo_megatron.tools.planning.plan import LayoutEstimate, Plan, PlanOptions, make_plan

_COLOCATED_MEM_SHARE = 0.4
"""Share of a GPU's memory for a server, beside the trainer's weights and optimizer states."""
_EQUAL_TIME_RATIO = 1.1
"""Estimates that differ by at most this factor are taken as equal."""
_TOKENS_MULTIPLE = 128
"""Micro-batches are multiples of this, which every layout divides (``packing_multiples``)."""


def choose_layout(
    config: RunConfig, hf: HfConfig, options: PlanOptions, gpus: int
) -> tuple[RunConfig, Plan]:
    """Divide ``gpus`` GPUs between trainer and servers, and choose the trainer's layout.

    On one node, half of the GPUs train; where no layout fits, all of them train and sample in
    turns. Of several nodes, half train. Of the layouts that fit, the simplest one within
    ``_EQUAL_TIME_RATIO`` of the fastest is chosen. A micro-batch over all context-parallel ranks
    keeps the tokens that ``config`` gives to one rank.

    Returns:
        The configuration with ``parallel``, ``megatron.recompute``, the micro-batch and the servers
        filled in, and its plan, which fits.

    Raises:
        ValueError: Nothing fits, the nodes are not whole, or the GPU is unknown.
    """
    find_gpu(options.gpu)
    node_gpus = options.node_gpus
    if gpus > node_gpus and gpus % node_gpus:
        raise ValueError(
            f"--gpus: must be whole nodes of {node_gpus} GPUs if one is not enough, got {gpus}; "
            f"give {gpus // node_gpus * node_gpus}"
        )
    for trainer_gpus, server_gpus, rollout in _divisions(gpus, node_gpus):
        problem = ""
        divided = _with_rollout(config, rollout)
        elsewhere = gpus - trainer_gpus if gpus > node_gpus else None
        asked = replace(options, gpus=trainer_gpus, rollout_gpus=elsewhere)
        try:
            tensor = make_plan(divided, hf, asked).rollout.gpus_per_server
        except ValueError as error:  # no server of these GPUs has room for a sequence
            problem = f" ({error})"
            continue
        if tensor > server_gpus:
            problem = f" (a server needs {tensor} GPUs, got {server_gpus})"
            continue
        server = {"tensor": tensor, "count": server_gpus // tensor}
        divided = _with_rollout(divided, {"server": server})
        for estimate in _simplest_first(make_plan(divided, hf, asked).layouts):
            chosen = _with_layout(divided, estimate)
            if (plan := make_plan(chosen, hf, asked)).fits:
                return chosen, plan
    raise ValueError(
        f"--gpus: {gpus} {options.gpu} cannot train and sample {config.model.path} with responses "
        f"of {config.rollout.max_response_tokens} tokens{problem}; give more GPUs, fewer "
        "--response-tokens, or a smaller model"
    )


def _simplest_first(estimates: Sequence[LayoutEstimate]) -> list[LayoutEstimate]:
    """Return the layouts that fit.

    Those nearly as fast as the fastest come first, least divided first, then the others by time.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    limit_s = _EQUAL_TIME_RATIO * min((estimate.training_s for estimate in fitting), default=0.0)

    def order(estimate: LayoutEstimate) -> tuple[float, ...]:
        layout = estimate.layout
        if estimate.training_s > limit_s:
            return (1, estimate.training_s)
        return (0, layout.pipeline * layout.virtual, layout.context, layout.tensor)

    return sorted(fitting, key=order)


def _divisions(gpus: int, node_gpus: int) -> Iterator[tuple[int, int, dict[str, object]]]:
    """Yield the trainer's GPUs, the server GPUs of a node, and the division's ``rollout`` keys."""
    if gpus > node_gpus:
        yield gpus // node_gpus // 2 * node_gpus, node_gpus, {"async_steps": 1}
        return
    half = gpus // 2
    if half:
        yield half, gpus - half, {"async_steps": 1, "server": {"first_gpu": half}}
    server = {"mem_fraction": _COLOCATED_MEM_SHARE}
    sync = {"method": "tensor"}
    yield gpus, gpus, {"colocated": True, "weight_sync": sync, "server": server}


def _with_rollout(config: RunConfig, changes: dict[str, object]) -> RunConfig:
    rollout = config.rollout
    nested = {
        name: getattr(rollout, name).model_copy(update=value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return config.model_copy(update={"rollout": rollout.model_copy(update=nested)})


def _with_layout(config: RunConfig, estimate: LayoutEstimate) -> RunConfig:
    parallel: ParallelConfig = estimate.layout.parallel
    tokens = -(-config.train.max_tokens_per_micro_batch // parallel.context)
    tokens = -(-tokens // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE
    return config.model_copy(
        update={
            "parallel": parallel,
            "megatron": config.megatron.model_copy(update={"recompute": estimate.recompute}),
            "train": config.train.model_copy(update={"max_tokens_per_micro_batch": tokens}),
        }
    )
