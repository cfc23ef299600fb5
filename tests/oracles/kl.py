"""KL divergence between a student and a teacher over the vocabulary, and its gradient, in float64.

By torch's autograd from whole rows. Shape legend: T = tokens, V = true vocabulary.
"""

import torch
from torch import Tensor

from tests.oracles.logprob import Gradient64, logits_gradient

LOG_FLOOR = -103.97207708399179
"""−150 ln 2: log-prob of a logit of −inf, relative to the row's largest one."""


def kl_divergence(
    student_TV: Tensor, teacher_TV: Tensor, direction: str, temperature: float = 1.0
) -> Tensor:
    """[T] Σ p (log p − log q), differentiable in float64 inputs.

    p is the student's distribution and q the teacher's in the ``reverse`` direction, the other way
    round in the ``forward`` one. Columns of p = 0 add nothing.
    """
    student_TV, teacher_TV = student_TV.double() / temperature, teacher_TV.double() / temperature
    if direction == "forward":
        student_TV, teacher_TV = teacher_TV, student_TV
    log_p_TV = student_TV.log_softmax(1)
    largest_T1 = teacher_TV.amax(1, keepdim=True).detach()
    log_sum_T1 = torch.logsumexp(teacher_TV - largest_T1, 1, keepdim=True)
    d_TV = torch.where(teacher_TV == -torch.inf, LOG_FLOOR, teacher_TV - largest_T1)
    is_possible_TV = log_p_TV > -torch.inf
    safe_TV = torch.where(is_possible_TV, log_p_TV, 0.0)
    return (safe_TV.exp() * (safe_TV - d_TV + log_sum_T1)).where(is_possible_TV, 0.0).sum(1)


def kl_term_size(
    student_TV: Tensor, teacher_TV: Tensor, direction: str, temperature: float = 1.0
) -> Tensor:
    """[T] Σ p (|log p| + |log q|): what is rounded on the way to the divergence."""
    rows = (student_TV.double(), teacher_TV.double())
    p_TV, q_TV = (
        row_TV / temperature for row_TV in (rows if direction == "reverse" else rows[::-1])
    )
    log_p_TV = p_TV.log_softmax(1).clamp(min=2 * LOG_FLOOR)
    log_q_TV = q_TV.log_softmax(1).clamp(min=2 * LOG_FLOOR)
    return (p_TV.softmax(1) * (log_p_TV.abs() + log_q_TV.abs())).sum(1)


def kl_logits_gradient(
    student_TV: Tensor,
    teacher_TV: Tensor,
    target_T: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    direction: str,
    temperature: float = 1.0,
) -> Gradient64:
    """Gradient of Σ g · log-prob + h · entropy + k · KL, with grads = (g, h, k), each [T]."""
    by_logprob_T, by_entropy_T, by_kl_T = grads
    leaf_TV = student_TV.double().requires_grad_()
    kl_T = kl_divergence(leaf_TV, teacher_TV, direction, temperature)
    (by_kl_TV,) = torch.autograd.grad((by_kl_T.double() * kl_T).sum(), leaf_TV)
    other = logits_gradient(student_TV, target_T, by_logprob_T, by_entropy_T, temperature)
    log_p_TV = (student_TV.double() / temperature).log_softmax(1)
    log_q_TV = (teacher_TV.double() / temperature).log_softmax(1).clamp(min=2 * LOG_FLOOR)
    size_TV = log_p_TV.exp()
    if direction == "reverse":
        size_TV = size_TV * (log_p_TV.clamp(min=-1e3) - log_q_TV).abs() + size_TV * (
            1 + kl_T.detach()[:, None]
        )
    else:
        size_TV = size_TV + log_q_TV.exp()
    size_TV = by_kl_T.double().abs()[:, None] * size_TV / temperature
    return Gradient64(other.gradient_TV + by_kl_TV, other.term_size_TV + size_TV)
