"""Log-prob and entropy from logits: ours against eager PyTorch, torch.compile and Megatron-core.

    python -m tests.benchmarks.bench_logprob --device cpu --out docs/benchmarks/logprob_cpu_202611

On a GPU also against flash-attn's, Transformer Engine's and Liger's cross entropy, where installed.
Shape legend: T = tokens, V = columns.
"""

import argparse
import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bapo_megatron.ops import extension
from bapo_megatron.ops.logprob import vocab_parallel_logprobs
from tests.benchmarks.harness import (
    Contender,
    Section,
    arguments,
    interleave,
    publish,
    read_bandwidth,
    write_bandwidth,
)

LogprobFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def by_log_softmax(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    log_prob_TV = torch.log_softmax(logits_TV.float(), dim=1)
    entropy_T = -(log_prob_TV.exp() * log_prob_TV).sum(dim=1)
    return log_prob_TV.gather(1, target_T[:, None]).squeeze(1), entropy_T


def by_logsumexp(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """The form of verl: H = log Σ e^x − Σ p x."""
    logits_TV = logits_TV.float()
    log_sum_T = torch.logsumexp(logits_TV, dim=1)
    prob_TV = (logits_TV - log_sum_T[:, None]).exp()
    entropy_T = log_sum_T - (prob_TV * logits_TV).sum(dim=1)
    return logits_TV.gather(1, target_T[:, None]).squeeze(1) - log_sum_T, entropy_T


def separate_entropy(logits_TV: Tensor) -> Tensor:
    """Entropy as trainers add it to a cross entropy that has none."""
    logits_TV = logits_TV.float()
    prob_TV = torch.softmax(logits_TV, dim=1)
    return torch.logsumexp(logits_TV, dim=1) - (prob_TV * logits_TV).sum(dim=1)


def ours(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """The kernels, as the trainer calls them."""
    return vocab_parallel_logprobs(
        logits_TV, target_T, vocab_size=logits_TV.shape[1], overwrite_logits=True
    )


def ours_with(isa: str) -> LogprobFunction:
    """The kernels with another instruction set."""

    def run(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        extension.use_isa(isa)
        try:
            return ours(logits_TV, target_T)
        finally:
            extension.use_isa("auto")

    return run


def megatron_cross_entropies() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Megatron-core's two, on [T, 1, V]; both need process groups, here of one rank."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    return {
        "Megatron-core fused": lambda logits_TV, target_T: fused_vocab_parallel_cross_entropy(
            logits_TV[:, None], target_T[:, None], group
        ),
        "Megatron-core unfused": lambda logits_TV, target_T: vocab_parallel_cross_entropy(
            logits_TV[:, None], target_T[:, None]
        ),
    }


def gpu_cross_entropies() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Log-prob only, of the libraries that are installed."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    with contextlib.suppress(ImportError):
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

        functions["flash-attn"] = lambda x, y: cross_entropy_loss(x, y)[0]
        functions["flash-attn in place"] = lambda x, y: cross_entropy_loss(
            x, y, inplace_backward=True
        )[0]
    with contextlib.suppress(ImportError):
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        functions["Transformer Engine"] = lambda x, y: parallel_cross_entropy(
            x[None], y[None], 0.0, False, None
        )
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers.functional import liger_cross_entropy

        functions["Liger"] = lambda x, y: liger_cross_entropy(x, y, reduction="none")
    return functions


def join_one_rank(device: torch.device) -> None:
    """Give Megatron-core the process groups that it asks for."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    if device.type == "cpu":
        from bapo_megatron.policy import cpu_compat

        cpu_compat.install()


def contenders(
    logits_TV: Tensor, target_T: Tensor, functions: dict[str, LogprobFunction], *, backward: bool
) -> list[Contender]:
    """Each function on the same buffer, into which the logits are copied before every run."""
    grad_T = torch.randn(target_T.shape, device=logits_TV.device)
    # By default 2.5 GB on a GPU: the copy leaves no more than its end in a cache.
    work_TV = torch.empty_like(logits_TV)

    def contender(name: str, function: LogprobFunction) -> Contender:
        def forward() -> object:
            with torch.no_grad():
                return function(work_TV, target_T)

        def forward_backward() -> object:
            # As in a model, the logits are no leaf: nothing is added to a .grad.
            leaf = work_TV.detach().requires_grad_()
            logprob_T, _ = function(leaf.view_as(leaf), target_T)
            return torch.autograd.grad(logprob_T, leaf, grad_T)

        is_ours = name.startswith("ours")
        num_bytes = logits_TV.nbytes * (3 if backward else 1) if is_ours else 0
        return Contender(
            name,
            forward_backward if backward else forward,
            lambda: work_TV.copy_(logits_TV),
            num_bytes,
        )

    return [contender(name, function) for name, function in functions.items()]


def gradient_alone(logits_TV: Tensor, target_T: Tensor) -> Callable[[Tensor], None]:
    """Only the kernel that overwrites logits; the gradient of a gradient costs the same."""
    columns = (0, logits_TV.shape[1], 1.0)
    partials_T4 = torch.ops.bapo.logprob_partials(logits_TV, None, target_T, *columns)
    _, entropy_T, max_T, log_sum_T = torch.ops.bapo.logprob_combine(partials_T4[None], 1.0)
    grad_T = torch.full_like(max_T, 1e-3)
    return lambda work_TV: torch.ops.bapo.logits_backward_(
        work_TV, None, target_T, max_T, log_sum_T, entropy_T, grad_T, None, *columns
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, help="default: 65,536 on a GPU, 4,096 on a CPU")
    parser.add_argument("--columns", type=int, default=19008, help="152,064 over 8 ranks")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if options.tokens is None:  # fewer are over before a GPU's launches are
        options.tokens = 65536 if device.type == "cuda" else 4096
    join_one_rank(device)
    read = ("read bandwidth", read_bandwidth(device, options.rounds))
    write = write_bandwidth(device, options.rounds)
    sections = []
    for dtype in (torch.bfloat16, torch.float32):
        for backward in (False, True):
            sections.append(_section(options, device, dtype, read, write, backward=backward))
    publish("Log-prob and entropy", sections, options, device)


def _section(
    options: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    read: tuple[str, float],
    write: tuple[str, float],
    *,
    backward: bool,
) -> Section:
    generator = torch.Generator(device).manual_seed(0)
    shape = (options.tokens, options.columns)
    logits_TV = torch.empty(shape, dtype=dtype, device=device).normal_(std=3, generator=generator)
    target_T = torch.randint(shape[1], (shape[0],), generator=generator, device=device)
    functions: dict[str, LogprobFunction] = {"ours": ours}
    if device.type == "cpu":
        current = extension.build_info()["isa"]
        others = [isa for isa in extension.build_info()["available_isas"] if isa != current]
        functions |= {f"ours, {isa}": ours_with(isa) for isa in reversed(others)}
    functions["torch.compile, log_softmax"] = torch.compile(by_log_softmax, dynamic=False)
    functions["torch.compile, logsumexp"] = torch.compile(by_logsumexp, dynamic=False)
    functions["eager torch"] = by_log_softmax
    alone = megatron_cross_entropies()
    if device.type == "cuda":
        alone |= gpu_cross_entropies()
    for name, function in alone.items():
        functions[f"{name} (no entropy)"] = _negated(function)
        functions[f"{name} + entropy"] = _with_entropy(function)
    competing = contenders(logits_TV, target_T, functions, backward=backward)
    if backward:
        gradient, work_TV = gradient_alone(logits_TV, target_T), torch.empty_like(logits_TV)
        competing.append(
            Contender(
                "ours, gradient kernel alone",
                lambda: gradient(work_TV),
                lambda: work_TV.copy_(logits_TV),
                2 * logits_TV.nbytes,
            )
        )
    timings = interleave(competing, device, rounds=options.rounds)
    what = "Forward and backward of log-prob" if backward else "Forward"
    return Section(
        f"{what}, {str(dtype).removeprefix('torch.')}, {shape[0]} × {shape[1]}",
        timings,
        "ours",
        write if backward else read,
        [
            f"Measured {read[0]}: {read[1] / 1e9:.1f} GB/s, {write[0]}: {write[1] / 1e9:.1f} GB/s. "
            "Ours moves "
            + ("three times the logits (read, read, write)." if backward else "the logits once.")
        ],
    )


def _negated(function: Callable[[Tensor, Tensor], Tensor]) -> LogprobFunction:
    def run(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        loss_T = function(logits_TV, target_T).flatten()
        return loss_T, loss_T

    return run


def _with_entropy(function: Callable[[Tensor, Tensor], Tensor]) -> LogprobFunction:
    def run(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            entropy_T = separate_entropy(logits_TV)
        return function(logits_TV, target_T).flatten(), entropy_T

    return run


if __name__ == "__main__":
    main()
