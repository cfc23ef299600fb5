"""Transformers in float64, with bounds from the errors of transformers in float32."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.policy.tiny_models import model_class, reference_gradients, reference_logits
from tests.tolerances import HEADROOM, assert_within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.policy.tiny_models import Problem


@dataclass(frozen=True)
class Gradients:
    """Gradients by name in float64, and how far those in float32 may be off."""

    exact: dict[str, Tensor]
    bounds: dict[str, float]
    """Of the norm of each tensor's error; 0 for a gradient of 0."""

    @staticmethod
    def of(exact: dict[str, Tensor], float32: dict[str, Tensor]) -> Gradients:
        """``float32``: the same gradients, by transformers in float32."""
        shares: dict[str, list[float]] = {}
        for name, gradient in exact.items():
            if gradient.any():
                error = (float32[name] - gradient).norm() / gradient.norm()
                shares.setdefault(_kind(name), []).append(float(error))
        # One tensor's error may be small by chance. What is large in one layer or expert is so for
        # a reason in all: the gradient of a bias of keys is a small rest of large terms.
        typical = median(share for of_kind in shares.values() for share in of_kind)
        bounds = {
            name: HEADROOM * max(typical, *shares[_kind(name)]) * float(gradient.norm())
            if gradient.any()
            else 0.0
            for name, gradient in exact.items()
        }
        return Gradients(exact, bounds)

    @property
    def norm(self) -> float:
        """Of all gradients."""
        return math.sqrt(sum(float(g.square().sum()) for g in self.exact.values()))

    def check(self, actual: dict[str, Tensor]) -> None:
        """Compare every tensor."""
        assert actual.keys() == self.exact.keys()
        for name, gradient in self.exact.items():
            assert_within((actual[name] - gradient).norm(), self.bounds[name], name)

    def check_norm(self, actual: float) -> None:
        """Compare the norm of all; it is off by no more than the norm of all errors."""
        bound = math.sqrt(sum(bound**2 for bound in self.bounds.values()))
        assert_within(abs(actual - self.norm), bound, "norm")


class Oracle:
    """A model in float64 and in float32."""

    def __init__(self, kind: Any, directory: Path) -> None:
        """``kind``: a class of transformers."""
        self.float32 = kind.from_pretrained(directory, dtype=torch.float32)
        self._exact = kind.from_pretrained(directory, dtype=torch.float64)
        self._exact.set_experts_implementation("eager")  # the other ones have no float64
        self._mode = _Float64()
        self._logits: dict[tuple[int, ...], tuple[Tensor, float]] = {}
        for module in self._exact.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                # Angles are float32 by definition: those of the 300th token would differ by 1e-5.
                module.register_forward_pre_hook(lambda *_: self._mode.turn(on=False))
                module.register_forward_hook(lambda *_: self._mode.turn(on=True))

    @staticmethod
    def of(family: str, directory: Path) -> Oracle:
        """The model of a family of ``tiny_models``."""
        return Oracle(model_class(family), directory)

    def logits(self, problem: Problem) -> tuple[Tensor, float]:
        """[N, V] in float64, and how far those in float32 may be off."""
        batch = problem.micro_batch
        tokens = (*batch.token_ids_N.tolist(), *batch.cu_seqlens.tolist())
        if tokens not in self._logits:
            self._logits[tokens] = self._bounded(lambda model: reference_logits(model, problem))
        return self._logits[tokens]

    def logits_of(self, ids_BS: Tensor) -> tuple[Tensor, float]:
        """[B, S, V] in float64, and how far those in float32 may be off."""
        return self._bounded(lambda model: model(input_ids=ids_BS).logits)

    def gradients(self, problems: list[Problem]) -> Gradients:
        """Of the sum of all problems' losses."""
        return Gradients.of(*self.both_gradients(problems))

    def both_gradients(
        self, problems: list[Problem]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """In float64 and in float32."""
        return self.both(lambda model: reference_gradients(model, problems))

    def _bounded(self, compute: Callable[[Any], Tensor]) -> tuple[Tensor, float]:
        with torch.no_grad():
            exact, float32 = self.both(compute)
        return exact, HEADROOM * float((float32 - exact).abs().max())

    def both[T](self, compute: Callable[[Any], T]) -> tuple[T, T]:
        """What ``compute`` returns for the model in float64 and for the one in float32."""
        with self._mode:
            exact = compute(self._exact)
        return exact, compute(self.float32)


class _Float64(TorchFunctionMode):
    """Transformers computes norms, softmaxes and delta rules in float32, whatever its weights are.

    Here it computes them in float64.
    """

    _is_on = True

    def turn(self, *, on: bool) -> None:
        self._is_on = on

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_on:
            function = torch.Tensor.double if function is torch.Tensor.float else function
            args = [_widened(value) for value in args]
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _kind(name: str) -> str:
    """A tensor's name without the numbers of its layer and expert."""
    return re.sub(r"\d+", "#", name)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
