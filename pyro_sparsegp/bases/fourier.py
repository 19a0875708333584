"""Variational Fourier features: inducing variables that are Fourier coefficients of f on an interval."""

import math
from typing import Any

import torch
from torch import Tensor

from ..kernels import Kernel, Matern12, Matern32, Matern52, Scaled, Select
from ..kernels.base import as_tensor, require_one
from ..numerics.arguments import require_count
from .variables import InducingVariables

_ORDERS = {Matern12: 1, Matern32: 2, Matern52: 3}  # derivatives that make f Markov


class FourierCoefficients(InducingVariables):
    """u_m = ⟨f, φ_m⟩/‖φ_m‖ in the kernel's RKHS on [low, high], φ = 1, cos ω_jt, sin ω_jt, ω_j = 2πj/(high − low).

    Hensman, Durrande and Solin, 2018, "Variational Fourier Features for Gaussian Processes", section 3, for one input
    and a Matérn kernel of order 1/2, 3/2 or 5/2, alone, scaled, or on one column. There K_fu = φ_m(x)/‖φ_m‖.
    With f(t) Markov in its first p derivatives h, (d/dt + λ)ᵖf white noise of density q, and P = cov(h),

        ⟨g, g'⟩ = q⁻¹∫(d/dt + λ)ᵖg (d/dt + λ)ᵖg' dt + h_g(low)ᵀP⁻¹h_g'(low).

    Beyond the interval cov(f(x), u) follows from h at its nearer end. Nothing here is learned. Take an interval that
    reaches a few length scales beyond the data: at its ends all φ_m are periodic, and f is not.

    :param low: the interval's lower end.
    :param high: its upper end.
    :param num_frequencies: J; M = 2J + 1. Take (high − low)/ℓ or more.
    :raises ValueError: if low is not below high, or J is less than 1.
    """

    def __init__(self, low: float, high: float, num_frequencies: int) -> None:
        super().__init__()
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"FourierCoefficients' low must be below high, both finite, got {low} and {high}")
        require_count(num_frequencies, "FourierCoefficients' num_frequencies")
        self.low, self.high, self.num_frequencies = float(low), float(high), num_frequencies
        self.register_buffer("interval", torch.tensor([self.low, self.high]))  # says dtype and device

    @property
    def size(self) -> int:
        return 2 * self.num_frequencies + 1

    def describe(self) -> str:
        return f"FourierCoefficients({self.low}, {self.high}, {self.num_frequencies})"

    def _frequencies(self, like: Tensor) -> Tensor:
        j = torch.arange(1, self.num_frequencies + 1, dtype=like.dtype, device=like.device)
        return j * (2 * math.pi / (self.high - self.low))

    def _gram(self, rate: Tensor, order: int) -> tuple[Tensor, Tensor]:
        # The integrals, (..., M), which are 0 for m ≠ m', and h_m(low), (M, p), at unit variance.
        omega = self._frequencies(rate)
        density = {1: 2 * rate, 2: 4 * rate**3, 3: 16 / 3 * rate**5}[order]
        waves = (rate.square() + omega.square()) ** order * ((self.high - self.low) / 2)
        constant = rate ** (2 * order) * (self.high - self.low)
        one, zero = torch.ones_like(omega), torch.zeros_like(omega)
        # of the constant, the cosines and the sines: f, f', f''
        value, slope = torch.cat([one[:1], one, zero]), torch.cat([zero[:1], zero, omega])
        curve = torch.cat([zero[:1], -omega.square(), zero])
        at_end = torch.stack([value, slope, curve][:order], -1)
        return torch.cat([constant, waves, waves], -1) / density, at_end

    def _norms(self, rate: Tensor, order: int) -> tuple[Tensor, Tensor]:
        # The matrix of ⟨φ_m, φ_m'⟩, (..., M, M), and ‖φ_m‖, (..., M), at unit variance.
        integrals, at_end = self._gram(rate, order)
        # P: cov(f⁽ʲ⁾, f⁽ᵏ⁾) is 0 for odd j + k, else (−1)^½(j−k) times the spectral moment of order j + k.
        square = rate.square()[..., 0]
        moments = torch.ones_like(square), square if order == 2 else square / 3, square.square()
        rows = [
            (1 - (j - k) % 4) * moments[(j + k) // 2] if (j + k) % 2 == 0 else torch.zeros_like(square)
            for j in range(order)
            for k in range(order)
        ]
        # ⟨φ_m, φ_m′⟩ = integral + h_m(low)ᵀP⁻¹h_m′(low)
        precision = torch.linalg.inv(torch.stack(rows, -1).unflatten(-1, (order, order)))
        gram = torch.diag_embed(integrals) + at_end @ precision @ at_end.mT
        return gram, gram.diagonal(dim1=-2, dim2=-1).sqrt()

    def covariance(self, kernel: Kernel) -> Tensor:
        # The scale of u is free: with unit variances the jitter of a Cholesky factor is relative to each of them.
        matern, _, _ = _parts(kernel)
        gram, norms = self._norms(_rate(matern, self.interval), _ORDERS[type(matern)])
        return gram / (norms[..., :, None] * norms[..., None, :])

    def cross(self, kernel: Kernel, x: Tensor) -> Tensor:
        matern, variance, columns = _parts(kernel)
        if columns is None:
            require_one(x, "FourierCoefficients are of one input", "kernel[column]")
        (column,) = columns or (0,)
        t = x[..., column]
        rate, order = _rate(matern, t), _ORDERS[type(matern)]
        _, norms = self._norms(rate, order)
        waves = (t[..., None] - self.low) * self._frequencies(t)
        inside = torch.cat([torch.ones_like(t)[..., None], waves.cos(), waves.sin()], -1)
        within = (t >= self.low) & (t <= self.high)
        found = torch.where(within[..., None], inside, self._beyond(t, rate[..., None], order))
        return found / norms[..., None, :] * as_tensor(variance, x).sqrt()[..., None, None]

    def _beyond(self, t: Tensor, rate: Tensor, order: int) -> Tensor:
        # cov(f(t), u) beyond the interval, (..., N, M), from h at its nearer end, with rates (..., 1, 1).
        _, at_end = self._gram(rate[..., 0], order)
        above = t > self.high
        s = torch.where(above, t - self.high, self.low - t).clamp(min=0)[..., None]
        backwards = torch.where(above, 1.0, -1.0).to(t)[..., None]  # h of time reversed has −f'
        # E[f(t + s) | h(t)] = exp(−λs) Σ_k sᵏ/k! (d/dt + λ)ᵏf(t)
        terms = [
            s**k / math.factorial(k) * math.comb(k, j) * rate ** (k - j) * backwards**j * at_end[:, j]
            for k in range(order)
            for j in range(k + 1)
        ]
        return (-rate * s).exp() * sum(terms[1:], terms[0])


def _parts(kernel: Any) -> tuple[Any, Any, Any]:
    # A Matérn kernel, its variance and the columns it reads, one or None.
    variance: Any = 1.0
    inner = kernel
    while isinstance(inner, (Scaled, Select)):
        variance = variance * getattr(inner, "variance", 1.0)
        inner = inner.kernel
    if type(inner) not in _ORDERS or len(kernel.columns or [0]) != 1:
        raise ValueError(
            "FourierCoefficients are for a Matern12, Matern32 or Matern52 of one input, alone, scaled, on one column; "
            f"got {kernel!r}; in a sum, give each term its own by an additive family."
        )
    return inner, variance, kernel.columns


def _rate(matern: Any, like: Tensor) -> Tensor:
    # λ = √(2ν)/ℓ, (..., 1).
    lengthscale = torch.atleast_1d(as_tensor(matern.lengthscale, like))
    if lengthscale.shape[-1] != 1:
        raise ValueError(f"FourierCoefficients need one length scale, got {lengthscale.shape[-1]}")
    return math.sqrt(matern.twice_nu) / lengthscale
