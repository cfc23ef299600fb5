"""Score centering against float64 autograd over the whole vocabulary, head and tail spelt out."""

from typing import Any

import pytest
import torch

from bapo_megatron.config.schema import AlgorithmConfig
from tests.algorithm.centering_problem import KINDS, VOCAB_SIZE, Problem, error
from tests.tolerances import HEADROOM


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_k", [1, 8, VOCAB_SIZE])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_autograd_in_float64(kind: str, top_k: int, temperature: float) -> None:
    problem = Problem(top_k, drift=0.4, temperature=temperature)
    expected = problem.oracle(KINDS[kind][1])
    bound = HEADROOM * error(problem.oracle(KINDS[kind][1], torch.float32), expected)
    assert error(problem.gradients(kind), expected) < max(bound, 1e-6)
    plain = problem.gradients(kind, centred=False)
    assert error(plain, expected) > 1e-3  # centering is not a small part of the gradient


@pytest.mark.parametrize("top_k", [1, 8, VOCAB_SIZE])
def test_exact_importance_sampling_has_nothing_to_center(top_k: int) -> None:
    """With f = r the sum over the vocabulary vanishes for every k, and so below a cap."""
    problem = Problem(top_k, drift=0.1, temperature=1.0)
    KINDS["uncapped"] = ({"objective": "cispo", "cispo": {"high": 1e6}}, lambda r, _: r)
    try:
        difference = error(
            problem.gradients("uncapped"),
            [g.double() for g in problem.gradients("uncapped", centred=False)],
        )
    finally:
        del KINDS["uncapped"]
    assert difference < 4e-6


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_nothing_is_removed(kind: str) -> None:
    problem = Problem(8, drift=0.0, temperature=1.0)
    plain = [g.double() for g in problem.gradients(kind, centred=False)]
    assert error(problem.gradients(kind), plain) < 4e-6


def test_what_is_reported_of_each_token() -> None:
    problem = Problem(8, drift=0.4, temperature=1.0)
    problem.gradients("reinforce")
    head = problem.loss_stage.head_T
    assert head is not None
    log_p_TV = (problem.hidden_TH.double() @ problem.weight_VH.double().t())[:, :VOCAB_SIZE]
    p_TK = log_p_TV.log_softmax(1).exp().gather(1, problem.top.indices)
    torch.testing.assert_close(head.policy_mass_T, p_TK.sum(1), rtol=1e-5, atol=1e-5)
    q_TK = problem.top.values.exp()
    torch.testing.assert_close(head.sampler_mass_T, q_TK.sum(1), rtol=1e-5, atol=1e-5)
    rho_T = (1 - q_TK.sum(1)) / (1 - p_TK.sum(1))
    drift_T = (q_TK - rho_T[:, None] * p_TK).abs().sum(1)
    torch.testing.assert_close(head.coefficient_TK[:, 0], drift_T, rtol=1e-4, atol=1e-4)
    assert not head.is_limited_T.any()


@pytest.mark.parametrize(("mass", "scale", "rho"), [(1.0, 1.0, 1e-3), (0.5, 1e3, 1e3)])
def test_a_tail_that_only_one_side_has_is_limited(mass: float, scale: float, rho: float) -> None:
    problem = Problem(8, drift=0.4, temperature=1.0)
    q_TK = mass * problem.top.values.softmax(1)
    problem.top = problem.top.__class__((q_TK.log(), problem.top.indices))
    problem.hidden_TH = scale * problem.hidden_TH
    assert all(gradient.isfinite().all() for gradient in problem.gradients("reinforce"))
    head = problem.loss_stage.head_T
    assert head is not None
    is_inside_T = (head.policy_mass_T > 0.999) | (mass == 1)
    assert is_inside_T.any()
    assert head.is_limited_T[is_inside_T].all()
    log_p_TV = (problem.hidden_TH.double() @ problem.weight_VH.double().t())[:, :VOCAB_SIZE]
    p_TK = log_p_TV.log_softmax(1).exp().gather(1, problem.top.indices)
    drift_T = (q_TK - rho * p_TK).abs().sum(1)[is_inside_T]
    torch.testing.assert_close(head.coefficient_TK[is_inside_T, 0], drift_T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"objective": "none"}, r"objective must be .*bapo.*, got none"),
        ({"objective": "gspo"}, r"objective must be .*, got gspo"),
        ({"objective": "reinforce", "behaviour": "recomputed"}, r"behaviour must be rollout"),
    ],
)
def test_what_cannot_be_centred_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate({**algorithm, "centering": {"top_k": 8}})
