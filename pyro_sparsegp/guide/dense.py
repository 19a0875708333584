"""F of a program whose densities depend on values in any way: x are all values, and the whole Hessian is taken.

No basis, no link and no linear predictor: a GP site is f = μ + Lx with LLᵀ = k(X, X). Given θ, q(x) is Laplace's
approximation N(x̂, P⁻¹), P = I − ∇²ℓ(x̂), and draws of it, weighted by p(x, y | θ) / q(x), correct F and moments.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..numerics.arrow import Dense
from ..numerics.functions import jacobian
from ..numerics.linalg import times
from ..program.asking import Unsupported
from .field import Layout, Standardised
from .known import KnownGuide
from .latents import Hyperparameters
from .nested import Nested, Optimum

LARGEST = 600  # values
_STEPS = 50  # of x, at most
_LEAST = 0.2  # an eigenvalue of P, of which a step is no longer than the model holds
_NEAR = 1e-6  # nats that a step of x may still gain


class AtValues(Standardised):
    """GP sites are their values at all inputs."""

    @staticmethod
    def sizes_of(module: Any, rows: int) -> list[int]:
        return [rows] * module.batch_shape.numel()

    def _of_process(self, name: str, process: Any) -> Tensor:
        self.features[name], mean = [process.scale_tril], process.mean
        return mean + times(process.scale_tril, self.x.get(name, torch.zeros_like(mean)).reshape(mean.shape))


class ByHessian(Nested):
    """F by the whole Hessian."""

    def __init__(self, guide: KnownGuide, sizes: dict[str, int], hyper: Hyperparameters, run: Any) -> None:
        layout = Layout({name: [size] for name, size in sizes.items()}, {})
        if layout.num > LARGEST:
            raise Unsupported(f"{layout.num} values are too many for a dense matrix")
        super().__init__(guide, layout, {}, hyper, run, AtValues)

    def density(self, theta: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """log p(y, θ, x), with x's prior relative to its own at 0, and members' values."""
        sites, handler = self.run(theta, x)
        total = handler.log_prior + self.tilt @ theta - 0.5 * x.square().sum()
        return total + self.of_data(sites), handler.values

    def at(self, theta: Tensor) -> Optimum:
        theta = theta.detach().requires_grad_()
        x, p = self._mode(theta.detach())
        x = x.requires_grad_()
        total, _ = self.density(theta, x)
        slope, precision = _derivatives(total, x)
        moved = 0.5 * (p.covariance * precision).sum()  # of ½ log|P|
        total = total - p.half_log_det - (moved - moved.detach())
        # dF/dθ = ∂F/∂θ + ∂F/∂x · P⁻¹ ∂∇ℓ/∂θ
        (by_x,) = torch.autograd.grad(total, x, retain_graph=True)
        along = p.solve(by_x).detach()
        (by_theta,) = torch.autograd.grad(total + along @ slope, theta, materialize_grads=True)
        return Optimum(theta.detach(), total.detach(), by_theta, x.detach(), p, {})

    def _mode(self, theta: Tensor) -> tuple[Tensor, Dense]:
        """x̂ and P there."""
        x, root, last = self.last[0], Dense(torch.eye(self.layout.num).to(theta)), -math.inf
        step = torch.zeros_like(x)
        for _ in range(_STEPS):
            x = x.detach().requires_grad_()
            total, _ = self.density(theta, x)
            value = float(total.detach())
            if not value >= last - _NEAR:  # beyond the top, or infinite: half of the step
                step = 0.5 * step
                x = x - step
                continue
            slope, precision = _derivatives(total, x)
            root = _positive(precision.detach())
            up = slope.detach()
            step = root.solve(up)
            if up @ step < _NEAR:
                break
            x, last = x + step, value
        self.last = x.detach(), root
        return x.detach(), root

    def of_means(self, best: Optimum) -> tuple[Tensor, Dense]:
        # E[∇ℓ] and E[∇²ℓ] by a draw and its mirror image, whose sum is right where ℓ is quadratic
        away = torch.linalg.solve_triangular(best.root.mT, torch.randn_like(best.x)[:, None], upper=True)[:, 0]
        total = [
            _derivatives(self.density(best.theta, x.requires_grad_())[0], x) for x in (best.x + away, best.x - away)
        ]
        slope, precision = (sum(parts).detach() / 2 for parts in zip(*total))
        root = _positive(precision)
        return best.x + root.solve(slope), root


def _derivatives(total: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient by x, and minus the Hessian."""
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    second = jacobian(slope, x)
    return slope, -0.5 * (second + second.mT)


def _positive(precision: Tensor) -> Dense:
    """P, negative curvatures taken by their size."""
    values, axes = torch.linalg.eigh(precision)
    return Dense.of((axes * values.abs().clamp(min=_LEAST)) @ axes.mT)
