"""What training adds to a model: gradients, optimizer, schedule and counts.

Every method is a collective, as those of ``Model``.

Shape legend: F = counts and flags of an update's verdict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from bapo_megatron.config.megatron import MegatronConfig, OptimizerConfig
from bapo_megatron.policy.model import Model
from bapo_megatron.policy.optimizer import (
    OptimizerStep,
    build_optimizer,
    learning_rate,
    wrap_for_data_parallel,
)
from bapo_megatron.policy.routers import Routers
from bapo_megatron.types import MicroBatch


@dataclass(eq=False, repr=False)
class TrainState:
    """The training of a model; ``build`` begins one."""

    model: Model
    wrapped: list[DistributedDataParallel]
    """The model's chunks, wrapped for data parallelism; also its ``modules``."""
    optimizer: MegatronOptimizer
    config: OptimizerConfig
    total_updates: int
    """Updates of the whole run, over which the schedule decays."""
    num_updates: int = 0
    """Optimizer updates made so far."""

    @classmethod
    def build(
        cls, model: Model, config: OptimizerConfig, megatron: MegatronConfig, total_updates: int
    ) -> Self:
        """Wrap the model, which then runs through this state's wrappers, and build its optimizer.

        Raises:
            ValueError: A setting of the optimizer needs a GPU.
        """
        wrapped = wrap_for_data_parallel(model.modules, megatron)
        adam = build_optimizer(wrapped, config, megatron)
        state = cls(model, wrapped, adam, config, total_updates)
        model.modules, model.finish_weights = wrapped, state.finish_weights
        if model.hf.experts is not None:
            model.routers = Routers(model.chunks, model.hf.experts, model.groups)
        return state

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.config, self.num_updates, self.total_updates)

    def forward_backward[Result](
        self,
        micro_batches: Sequence[MicroBatch],
        loss_fn: Callable[[Tensor, MicroBatch], tuple[Tensor, Result]],
    ) -> list[Result]:
        """Compute the gradients of the sum of the losses of all micro-batches of all ranks.

        Gradients of an earlier call are dropped. They are summed, not averaged, over data-parallel
        ranks. ``loss_fn`` is called as ``fn`` of ``Model.forward_only``, with gradients, and may
        overwrite the logits. It returns a scalar over the update's global denominators, and a
        report without gradient; the last stage gets the reports, others [].
        """
        assert micro_batches, "forward_backward needs a micro-batch on every rank"
        for ddp in self.wrapped:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def on_output(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Any]:
            loss, report = loss_fn(output, micro_batch)
            # Megatron adds up the second value; its only use, dividing gradients, is switched off.
            return loss, torch.zeros((), dtype=torch.int, device=self.model.groups.device), report

        return self.model.run_schedule(micro_batches, on_output, forward_only=False)

    @torch.no_grad()
    def optimizer_step(self, verdict: Tensor | None = None, num_faults: int = 0) -> OptimizerStep:
        """Clip the gradients by their global norm and update the weights.

        With a non-finite norm or a fault nothing is changed, where Megatron's ``step`` would write
        a NaN into all weights. ``verdict`` is [F] on the device, equal on all ranks; any of its
        first ``num_faults`` counts above 0 forbids the step. The host waits for the device.
        """
        optimizer, lr = self.optimizer, self.lr
        optimizer.prepare_grads()  # it returns what loss scaling needs, which bfloat16 does not use
        grad_norm = float(optimizer.get_grad_norm())
        values = () if verdict is None else tuple(verdict.tolist())
        if not math.isfinite(grad_norm) or any(values[:num_faults]):
            return OptimizerStep(False, grad_norm, values)
        for inner in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(
                inner.get_parameters(),
                self.config.clip_grad,
                grad_norm,
                use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step_with_ready_grads()
        self.num_updates += 1
        return OptimizerStep(True, grad_norm, values)

    def finish_weights(self) -> None:
        """Wait until the last update has reached every weight (``overlap_param_gather``)."""
        for ddp in self.wrapped:
            if ddp.ddp_config.overlap_param_gather:
                ddp.disable_forward_pre_hook()  # gathers what is not there yet
                ddp.enable_forward_pre_hook()
