"""The run to plan: configuration, model, layout, assumptions, and the work of one step.

Every figure that a plan rests on is a field of ``Assumptions`` and is printed with it. Units: bytes
(1 GB = 10⁹), seconds, floating-point operations.

Lengths are not known before the rollout. They are taken to be uniform between 0 and twice the mean,
so that the mean of the square is 4/3 of the square of the mean.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, Self

from bapo_megatron.algorithm.load_objective import load_objective
from bapo_megatron.config.check import packing_multiples
from bapo_megatron.config.megatron import ParallelConfig
from bapo_megatron.config.schema import AlgorithmConfig, RunConfig
from bapo_megatron.config.scorers import REFERENCE_KEY, TEACHER_KEY
from bapo_megatron.policy.adapters import adapted
from bapo_megatron.policy.architecture import HfConfig
from bapo_megatron.policy.hf_config import check_division, check_frozen_model
from bapo_megatron.policy.mixers.base import FLOAT32_BYTES, Share
from bapo_megatron.policy.weight_table import layer_weights, sequence_flops
from bapo_megatron.runtime.gpus import MAX_GPUS, Gpu

Group = Literal["tensor", "context", "pipeline", "data", "expert"]

MAX_VIRTUAL = 8
"""Limit of chunks per stage in listed layouts."""
_SHARED_FIELDS = ("tensor", "sequence", "pipeline", "context", "expert", "expert_tensor")
"""Those of ``Layout`` that ``ParallelConfig`` has under the same names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks divide what. Ranks are numbered tensor first, then context, data, pipeline."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def parallel(self) -> ParallelConfig:
        """The section of the configuration that asks for this layout."""
        shared = {name: getattr(self, name) for name in _SHARED_FIELDS}
        return ParallelConfig(virtual_pipeline=self.virtual, **shared)

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage that divide the experts of a layer."""
        return self.expert * (self.tensor if self.expert_tensor is None else self.expert_tensor)

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: the optimizer's state is divided over them."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.tensor * self.replicas // self.expert_ranks

    @property
    def sequence_ranks(self) -> int:
        """Ranks that divide the tokens between GEMMs."""
        return self.tensor if self.sequence else 1

    def layers_per_chunk(self, hf: HfConfig) -> int:
        """Layers of each chunk."""
        return hf.num_layers // (self.pipeline * self.virtual)

    @property
    def groups(self) -> dict[Group, tuple[int, int]]:
        """Size of each group, and the span of its ranks, from its first to its last.

        ``data`` has those that sum gradients: data × context. ``expert`` is there if experts are
        divided.
        """
        groups: dict[Group, tuple[int, int]] = {
            "tensor": (self.tensor, self.tensor),
            "context": (self.context, self.tensor * self.context),
            "pipeline": (self.pipeline, self.gpus),
            "data": (self.replicas, self.tensor * self.replicas),
        }
        if self.expert > 1:
            groups["expert"] = self.expert, self.expert_ranks
        return groups


def configured_layout(parallel: ParallelConfig, gpus: int | None) -> Layout:
    """Return the layout of a configuration on ``gpus`` GPUs; None: as few as it needs.

    Raises:
        ValueError: The GPUs cannot be divided so.
    """
    replica = parallel.tensor * parallel.pipeline * parallel.context
    expert_ranks = parallel.expert * parallel.expert_tensor_size
    if gpus is None:
        gpus = parallel.pipeline * math.lcm(parallel.tensor * parallel.context, expert_ranks)
    if replica > MAX_GPUS:
        raise ValueError(
            f"parallel: tensor × pipeline × context must be at most {MAX_GPUS}, got {replica}; "
            "lower them"
        )
    if gpus < 1 or gpus % replica:
        raise ValueError(
            "--trainer-gpus: must be a multiple of parallel.tensor × pipeline × context = "
            f"{replica}, got {gpus}; give {-(-max(gpus, 1) // replica) * replica}, or change "
            "parallel"
        )
    if (gpus // parallel.pipeline) % expert_ranks:
        raise ValueError(
            "parallel: expert × expert_tensor must divide the GPUs of a pipeline stage, got "
            f"{expert_ranks} with {gpus // parallel.pipeline}; lower them, or give more "
            "--trainer-gpus"
        )
    shared = {name: getattr(parallel, name) for name in _SHARED_FIELDS}
    return Layout(virtual=parallel.virtual_pipeline, data=gpus // replica, **shared)


def possible_layouts(
    models: Sequence[HfConfig], gpus: int, *, node_gpus: int, max_data: int
) -> Iterator[Layout]:
    """Yield every layout of ``gpus`` GPUs that all models allow.

    Tensor parallel stays within a node, with sequence parallel, and leaves experts whole.
    ``max_data`` is the number of samples of an update: more data-parallel ranks would have nothing
    to do.
    """
    has_experts = any(hf.experts for hf in models)
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    for tensor, pipeline, context in product(divisors, repeat=3):
        data, rest = divmod(gpus, tensor * pipeline * context)
        if rest or data > max_data or tensor > node_gpus:
            continue
        sizes = [size for size in divisors if (gpus // pipeline) % size == 0]
        virtuals = range(1, MAX_VIRTUAL + 1 if pipeline > 1 else 2)
        for virtual, expert in product(virtuals, sizes if has_experts else [1]):
            whole = 1 if has_experts and tensor > 1 else None
            layout = Layout(tensor, tensor > 1, pipeline, virtual, context, data, expert, whole)
            try:
                for hf in models:
                    check_division(hf, layout.parallel)
            except ValueError:  # a model cannot be divided like this
                continue
            yield layout


LayerKind = Literal["transformer-engine", "local"]
"""The two kinds of layers (``policy.layer_spec``) keep different activations."""

Placement = Literal["colocated", "same node", "elsewhere"]
"""Servers on the trainer's GPUs (``rollout.colocated``), on others of rank 0's node
(``rollout.server.first_gpu``), or on other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Everything that a plan assumes; the options of the command change it."""

    gpu: Gpu
    gpu_memory_bytes: float
    host_memory_bytes: float | None
    """Host memory of a node; None: unknown, and nothing is refused for it."""
    reserve_bytes: float = 5e9
    """Kept free for the CUDA context, NCCL's buffers, library workspaces and fragmentation."""
    layers: LayerKind
    peak_flops: float
    """Operations per second of one GPU in the run's number format."""
    mfu_share: float
    """Model FLOP/s over peak, for GEMMs and attention alone: bubbles and messages come on top."""
    memory_share: float = 0.7
    """Share of the memory bandwidth that the optimizer and decoding reach."""
    node_gpus: int
    link_share: float = 0.7
    """Share of a link's bandwidth that messages reach."""
    host_link_bytes_per_s: float
    """Bandwidth between pinned host memory and one GPU; Adam on the host is taken to reach it."""
    disk_bytes_per_s: float = 2e9
    """Bandwidth of the shared file system, each way, for the whole run."""
    prompt_tokens: int
    """Mean."""
    response_tokens: int
    """Mean; lengths are taken to be uniform between 0 and twice this."""
    miss_share: float
    """Share of the predicted bounds that are wrong; each of them costs a loss pass."""
    placement: Placement
    rollout_gpus: int
    rollout_tokens_per_s: float | None
    """Rate of one rollout GPU; None: estimated from memory bandwidth and ``mfu_share``."""

    @property
    def reached_flops(self) -> float:
        """Operations per second of one GPU."""
        return self.peak_flops * self.mfu_share

    @property
    def reached_memory_bytes_per_s(self) -> float:
        """Bandwidth of one GPU's memory."""
        return self.gpu.memory_bytes_per_s * self.memory_share

    def link_bytes_per_s(self, *, within_node: bool) -> float:
        """Bandwidth that one GPU reaches, one direction."""
        link = self.gpu.node_link_bytes_per_s if within_node else self.gpu.network_bytes_per_s
        return link * self.link_share


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes of a step besides a loss pass per update, each over the samples of one update."""

    forward_only: int
    """For bounds that are not predicted, and for ``behaviour: recomputed``."""
    repeated: float
    """Loss passes that are repeated because the predicted bounds were wrong."""


@dataclass(frozen=True, slots=True)
class FrozenSpec:
    """A frozen model in the trainer, in the policy's layout."""

    key: str
    """Its section of the configuration."""
    hf: HfConfig
    waits_in_host: bool
    """Whether its weights are on the GPU only during its passes (``memory: host``)."""
    keeps_hidden: bool
    """Whether its head, and the head's inputs for a whole step, stay on the last stage."""


def frozen_specs(
    config: RunConfig, policy: HfConfig, models: Mapping[str, HfConfig]
) -> tuple[FrozenSpec, ...]:
    """Describe the frozen models in the trainer; ``models`` holds those with a path, by key.

    Raises:
        ConfigError: As ``check_frozen_model``.
    """
    specs, algorithm = [], config.algorithm
    for key, section in algorithm.frozen_models.items():
        if key == REFERENCE_KEY and config.reference_is_base:
            continue
        hf = policy if section.path is None else models[key]
        keeps_hidden = key == TEACHER_KEY and algorithm.distillation.is_over_vocabulary
        check_frozen_model(config, key, hf, policy)
        specs.append(FrozenSpec(key, hf, section.memory == "host", keeps_hidden))
    return tuple(specs)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run in one layout on the assumed hardware."""

    config: RunConfig
    """With the ``megatron.recompute`` to plan for."""
    hf: HfConfig
    layout: Layout
    assumptions: Assumptions
    passes: Passes
    frozen: tuple[FrozenSpec, ...] = ()

    def of_model(self, hf: HfConfig) -> Self:
        """Return the same run with another model, such as a frozen one for its passes."""
        return replace(self, hf=hf, frozen=())

    @property
    def keeps_hidden(self) -> bool:
        """Whether a teacher in the trainer keeps the inputs of its head for the loss."""
        return any(model.keeps_hidden for model in self.frozen)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of weights and activations."""
        return FLOAT32_BYTES if self.config.model.dtype == "float32" else 2

    @property
    def whole_hidden_bytes(self) -> int:
        """One hidden state of a token as GEMMs take it: e·h."""
        return self.element_bytes * self.hf.hidden_size

    @property
    def hidden_bytes(self) -> float:
        """One hidden state of a token, where sequence parallel divides: e·h/s."""
        return self.whole_hidden_bytes / self.layout.sequence_ranks

    @property
    def share(self) -> Share:
        """What one rank has of a layer."""
        return Share(
            hf=self.hf,
            element_bytes=self.element_bytes,
            tensor=self.layout.tensor,
            context=self.layout.context,
            sequence_ranks=self.layout.sequence_ranks,
            is_local=self.assumptions.layers == "local",
            has_adapters=bool(self.config.model.lora.rank),
        )

    @property
    def groups_experts(self) -> bool:
        """Whether our own layers compute a rank's experts together (``policy.experts``).

        Their own adapters have them computed one by one, those of other linears do not.
        """
        hf, lora = self.hf, self.config.model.lora
        if self.assumptions.layers != "local" or hf.experts is None:
            return False
        weights = (w for layer in range(hf.num_layers) for w in layer_weights(hf, layer).expert)
        return not lora.rank or not any(adapted(weight, hf, lora) for weight in weights)

    @property
    def recomputes_all(self) -> bool:
        """Whether the backward pass repeats the forward pass of every layer."""
        return self.config.megatron.recompute == "full"

    def link_bytes_per_s(self, group: Group) -> float:
        """Bandwidth between the ranks of a group."""
        _, span = self.layout.groups[group]
        return self.assumptions.link_bytes_per_s(within_node=span <= self.assumptions.node_gpus)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step, as a layout divides it."""

    samples_per_step: int
    tokens_per_step: int
    """Prompts and responses, each sample once."""
    response_tokens_per_step: int
    updates_per_step: int
    """Optimizer updates: updates_per_batch × epochs."""
    tokens_per_update: int
    micro_batches: int
    """Per data-parallel rank and update."""
    micro_batch_tokens: int
    """Mean, on one rank."""
    max_micro_batch_tokens: int
    """Limit of one rank, for which its memory is planned."""
    forward_flops_per_update: float
    """One forward pass over an update's samples, summed over all ranks."""
    attention_flops_per_update: float
    """The part of it in causal attention."""
    head_flops_per_update: float
    """The part of it in the output layer."""


def plan_workload(case: Scenario) -> Workload:
    """Count the work of a step."""
    config, layout, assumptions = case.config, case.layout, case.assumptions
    samples = config.rollout.groups_per_step * config.rollout.samples_per_group
    samples_per_update = samples // config.algorithm.updates_per_batch
    prompt, response = assumptions.prompt_tokens, assumptions.response_tokens
    length = prompt + response
    # Other layouts than the configured one keep the micro-batch over all context-parallel ranks, so
    # that the longest sequence fits them as well.
    total = config.train.max_tokens_per_micro_batch * config.parallel.context
    multiple = packing_multiples(layout.parallel, config.megatron)[1] // layout.context
    capacity = math.ceil(total / layout.context / multiple) * multiple
    per_micro_batch = max(1, capacity * layout.context // length)
    micro_batches = math.ceil(samples_per_update / (per_micro_batch * layout.data))
    if layout.virtual > 1:  # the interleaved schedule runs them in rounds of one per stage
        micro_batches = math.ceil(micro_batches / layout.pipeline) * layout.pipeline
    mean_tokens = samples_per_update * length / (micro_batches * layout.data * layout.context)
    hf, flops = case.hf, sequence_flops(case.hf)
    # The mean of (prompt + response)², the response uniform between 0 and twice its mean.
    mean_square = prompt**2 + 2 * prompt * response + 4 / 3 * response**2
    attention = samples_per_update * flops.per_pair * mean_square
    return Workload(
        samples_per_step=samples,
        tokens_per_step=samples * length,
        response_tokens_per_step=samples * response,
        updates_per_step=config.algorithm.updates_per_batch * config.algorithm.epochs,
        tokens_per_update=samples_per_update * length,
        micro_batches=micro_batches,
        micro_batch_tokens=math.ceil(mean_tokens),
        max_micro_batch_tokens=capacity,
        forward_flops_per_update=samples_per_update * flops.per_token * length + attention,
        attention_flops_per_update=attention,
        head_flops_per_update=2.0 * samples_per_update * length * hf.vocab_size * hf.hidden_size,
    )


def plan_passes(algorithm: AlgorithmConfig, miss_share: float) -> Passes:
    """Count the passes of ``trainer.step``; ``miss_share`` of predicted decisions are wrong."""
    loaded = load_objective(algorithm)
    objective, updates = loaded.objective, algorithm.updates_per_batch * algorithm.epochs
    behaviour = algorithm.updates_per_batch if algorithm.behaviour == "recomputed" else 0
    # The first update takes its log-probs from the pass for the behaviour.
    searches = updates - (behaviour > 0) if loaded.collects else 0
    if objective.decisive is not None and objective.speculate != "never":
        return Passes(behaviour, searches * miss_share)
    return Passes(behaviour + searches, 0.0)
