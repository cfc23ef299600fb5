"""The loss stage with a teacher: log-prob and KL divergence, ours against torch.

    python -m tests.benchmarks.bench_kl --out docs/benchmarks/kl_cpu_202611

The loss is Σ w (−A ℓ + β KL), as of a policy gradient with on-policy distillation. The first table
begins at both models' logits: forward, and the gradient of the student's logits. The second begins
at both hidden states, so it includes the products with both heads, the gradient of the student's
hidden states, and that of its head, in float32 as Megatron keeps it.
Shape legend: T = tokens, V = columns, H = hidden size.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from bapo_megatron.ops.chunked import Chunks, Direction, OutputHead, TeacherRows, chunked_loss
from bapo_megatron.ops.logprob import LossGradient
from tests.benchmarks.harness import (
    Contender,
    Section,
    arguments,
    count_operators,
    interleave,
    publish,
    write_bandwidth,
)

CHUNKS = (512, 1024, 2048)
KL_COEFFICIENT = 0.1


class Problem:
    """Tokens [T] with both models' hidden states and heads, and the logits of these in bfloat16."""

    def __init__(
        self, num_tokens: int, num_columns: int, hidden_size: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        self.device = device
        self.hidden_TH = normal(num_tokens, hidden_size).requires_grad_()
        self.teacher_hidden_TH = normal(num_tokens, hidden_size)
        scale = 3 / hidden_size**0.5
        self.weight_VH = torch.nn.Parameter(normal(num_columns, hidden_size) * scale)
        self.main_grad_VH = torch.zeros(self.weight_VH.shape, device=device)
        self.weight_VH.main_grad = self.main_grad_VH  # type: ignore[attr-defined]
        self.teacher_VH = normal(num_columns, hidden_size) * scale
        self.target_T = torch.randint(num_columns, (num_tokens,), generator=generator).to(device)
        self.weight_T = torch.full((num_tokens,), 1.0 / num_tokens, device=device)
        self.advantage_T = torch.randn(num_tokens, generator=generator).to(device)
        self.compiled_loss = torch.compile(self.loss, dynamic=False)

    def logits(self) -> tuple[Tensor, Tensor]:
        """Both [T, V]."""
        with torch.no_grad():
            return (
                self.hidden_TH @ self.weight_VH.t(),
                self.teacher_hidden_TH @ self.teacher_VH.t(),
            )

    def token_loss(
        self,
        logprob_T: Tensor,
        _entropy_T: Tensor,
        part: slice,
        kl_T: Tensor | None = None,
        _head_TK: Tensor | None = None,
    ) -> LossGradient:
        """The loss as a ``TokenLoss``."""
        assert kl_T is not None
        by_logprob_T = -self.weight_T[part] * self.advantage_T[part]
        by_kl_T = KL_COEFFICIENT * self.weight_T[part]
        loss = (by_logprob_T * logprob_T + by_kl_T * kl_T).sum(dtype=torch.float64)
        return LossGradient(loss, by_logprob_T, None, by_kl_T)

    def loss(self, student_TV: Tensor, teacher_TV: Tensor, direction: Direction) -> Tensor:
        """The same in torch, from both logits."""
        log_p_TV = torch.log_softmax(student_TV.float(), dim=1)
        log_q_TV = torch.log_softmax(teacher_TV.float(), dim=1)
        logprob_T = log_p_TV.gather(1, self.target_T[:, None]).squeeze(1)
        # kl_div(x, y) is KL(y ‖ x).
        pair = (log_q_TV, log_p_TV) if direction == "reverse" else (log_p_TV, log_q_TV)
        kl_T = functional.kl_div(*pair, reduction="none", log_target=True).sum(1)
        return (self.weight_T * (KL_COEFFICIENT * kl_T - self.advantage_T * logprob_T)).sum()


def from_logits(problem: Problem, direction: Direction) -> list[Contender]:
    """All at once, the student's logits being restored before every run."""
    student_TV, teacher_TV = problem.logits()
    work_TV = student_TV.clone()
    columns = (0, student_TV.shape[1], 1.0)

    def ours() -> object:
        target_T = problem.target_T
        partials_T8 = torch.ops.bapo.kl_partials(work_TV, teacher_TV, target_T, *columns, direction)
        results = torch.ops.bapo.kl_combine(partials_T8[None], 1.0, direction)
        logprob_T, entropy_T, max_T, log_sum_T, teacher_max_T, teacher_log_sum_T, kl_T = results
        gradient = problem.token_loss(logprob_T, entropy_T, slice(0, len(target_T)), kl_T)
        assert gradient.kl_T is not None
        torch.ops.bapo.kl_backward_(
            work_TV,
            teacher_TV,
            target_T,
            max_T,
            log_sum_T,
            entropy_T,
            teacher_max_T,
            teacher_log_sum_T,
            kl_T,
            gradient.logprob_T,
            None,
            gradient.kl_T,
            *columns,
            direction,
        )
        return gradient.loss

    def in_torch(loss: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            leaf = work_TV.detach().requires_grad_()
            return torch.autograd.grad(loss(leaf, teacher_TV, direction), leaf)

        return run

    def restore() -> object:
        return work_TV.copy_(student_TV)

    return [
        Contender("ours", ours, restore, moved_bytes(student_TV)),
        Contender("torch.compile", in_torch(problem.compiled_loss), restore),
        Contender("eager torch", in_torch(problem.loss), restore),
    ]


def moved_bytes(logits_TV: Tensor) -> int:
    """Both rows read for the partials, both read for the gradient, and the student's written."""
    return 5 * logits_TV.nbytes


def from_hidden_states(problem: Problem, direction: Direction) -> list[Contender]:
    """All logits at once in torch, then our chunks of several sizes."""
    rows_T = torch.arange(len(problem.target_T), device=problem.device)
    head = OutputHead(problem.weight_VH)
    teacher = TeacherRows(problem.teacher_hidden_TH, OutputHead(problem.teacher_VH), direction)

    def chunked(chunk_tokens: int) -> Callable[[], object]:
        def run() -> object:
            vocab_size = len(problem.weight_VH)
            chunks = Chunks(head, problem.target_T, rows_T, vocab_size, 1.0, chunk_tokens, teacher)
            loss, _ = chunked_loss(problem.hidden_TH, chunks, problem.token_loss)
            return torch.autograd.grad(loss, problem.hidden_TH)

        return run

    def in_torch(loss: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                teacher_TV = problem.teacher_hidden_TH @ problem.teacher_VH.t()
            student_TV = problem.hidden_TH @ problem.weight_VH.t()
            inputs = (problem.hidden_TH, problem.weight_VH)
            grad_hidden_TH, grad_VH = torch.autograd.grad(
                loss(student_TV, teacher_TV, direction), inputs
            )
            problem.main_grad_VH.add_(grad_VH)
            return grad_hidden_TH

        return run

    num_tokens = len(problem.target_T)
    sizes = [size for size in CHUNKS if size < num_tokens] or [-(-num_tokens // 4)]
    return [
        *(Contender(f"ours, chunks of {size}", chunked(size)) for size in sizes),
        Contender("torch.compile", in_torch(problem.compiled_loss)),
        Contender("eager torch", in_torch(problem.loss)),
    ]


def measure(options: argparse.Namespace, device: torch.device) -> list[Section]:
    problem = Problem(options.tokens, options.columns, options.hidden, device)
    shape = f"{options.tokens} × {options.columns}, bfloat16"
    bandwidth = write_bandwidth(device, options.rounds)
    sections = []
    directions: tuple[Direction, ...] = ("reverse", "forward")
    for direction in directions:
        by_logits = from_logits(problem, direction)
        operators = "; ".join(f"{c.name}: {count_operators(c).total()}" for c in by_logits[::2])
        sections.append(
            Section(
                f"From logits, {direction}, {shape}",
                interleave(by_logits, device, rounds=options.rounds),
                "ours",
                bandwidth,
                [
                    f"Measured {bandwidth[0]}: {bandwidth[1] / 1e9:.1f} GB/s. Ours moves 5·T·V·b = "
                    f"{by_logits[0].num_bytes / 1e9:.2f} GB: both logits read twice, the student's "
                    "written once.",
                    f"Operators dispatched, without views and allocations: {operators}.",
                ],
            )
        )
    by_hidden = from_hidden_states(problem, "reverse")
    sections.append(
        Section(
            f"From hidden states, reverse, {shape}, hidden size {options.hidden}",
            interleave(by_hidden, device, rounds=options.hidden_rounds),
            by_hidden[0].name,
            remarks=["Memory is beyond hidden states, both weights and the float32 gradient."],
        )
    )
    return sections


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=19008, help="152,064 over 8 ranks")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--hidden-rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    publish("Loss stage with a teacher", measure(options, device), options, device)


if __name__ == "__main__":
    main()
