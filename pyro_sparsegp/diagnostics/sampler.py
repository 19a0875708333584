"""Pyro's MCMC kernels, keeping for each draw what they know of it."""

from __future__ import annotations

import math
import time
from typing import Any

import pyro.infer
from torch import Tensor

__all__ = ["HMC", "NUTS"]


class _Keeping(pyro.infer.HMC):
    """What both kernels keep; it travels with Pyro's own diagnostics, from other processes too."""

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """As Pyro's; the clock starts here."""
        self._kept: dict[str, list[Any]] = {}
        self._began = time.time()
        super().setup(warmup_steps, *args, **kwargs)

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """As Pyro's, one transition."""
        mean, diverged = self._mean_accept_prob, len(self._divergences)
        self._start_transition()
        new = super().sample(params)
        num = self._t - (self._warmup_steps or 0)
        if num > 0:  # Pyro keeps the running mean of acceptance probabilities
            mean = 0.0 if num == 1 else mean
            known = {
                "acceptance_rate": min(max(mean + (self._mean_accept_prob - mean) * num, 0.0), 1.0),
                "diverging": len(self._divergences) > diverged,
                "step_size": float(self.step_size),
                **self._end_transition(),
            }
            for name, value in known.items():
                self._kept.setdefault(name, []).append(value)
        return new

    def _start_transition(self) -> None:
        raise NotImplementedError

    def _end_transition(self) -> dict[str, Any]:
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Any]:
        """As Pyro's, with ``sample stats``, a list for each, and when sampling began and ended."""
        times = {"began": self._began, "ended": time.time(), "warm-up steps": self._warmup_steps}
        return {**super().diagnostics(), "sample stats": self._kept, **times}


class NUTS(_Keeping, pyro.infer.NUTS):
    """The No-U-Turn sampler, ``pyro.infer.NUTS``, keeping for each draw what it knows of it.

    A drop-in replacement, with the same arguments: ``MCMC(NUTS(model), num_samples=500).run(x, y)``. The draws are
    those of Pyro's. Under :func:`to_datatree` ``sample_stats`` then has ``energy`` (the Hamiltonian of the draw, in
    nats: minus the log joint density in unconstrained coordinates plus the kinetic energy of its momentum),
    ``acceptance_rate`` (the mean acceptance probability of the transition's states), ``n_steps`` (leapfrog steps),
    ``tree_depth`` (doublings, counting one that was cut short), ``reached_max_treedepth`` and ``step_size``, beside
    ``diverging``; groups have the attributes ``sampling_time`` (seconds of wall time, warm-up included) and
    ``tuning_steps``. Several chains, in processes of their own, keep theirs.

    Hoffman and Gelman (2014); Betancourt (2017).

    :param args: of ``pyro.infer.NUTS``.
    :param kwargs: of ``pyro.infer.NUTS``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _start_transition(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}  # of the trajectory, each with its energy
        self._energy: Any = math.nan  # where it starts

    def _build_basetree(self, z: Any, r: Any, z_grads: Any, log_slice: Any, direction: Any, energy_current: Any) -> Any:
        tree = super()._build_basetree(z, r, z_grads, log_slice, direction, energy_current)
        self._energy = energy_current
        energy = tree.z_proposal_pe + self._kinetic_energy(tree.r_left_unscaled)
        self._states[id(tree.z_proposal)] = tree.z_proposal, energy
        return tree

    def _end_transition(self) -> dict[str, Any]:
        _, energy = self._states.get(id(self._z_last), (None, self._energy))
        steps = len(self._states)
        depth = steps.bit_length()
        self._states = {}
        return {
            "energy": float(energy),
            "n_steps": steps,
            "tree_depth": depth,
            "reached_max_treedepth": depth >= self._max_tree_depth,
        }


class HMC(_Keeping):
    """Hamiltonian Monte Carlo, ``pyro.infer.HMC``, keeping for each draw what it knows of it.

    As :class:`NUTS`; ``sample_stats`` has ``energy``, ``acceptance_rate``, ``n_steps``, ``step_size`` and
    ``diverging``.

    Neal (2011).

    :param args: of ``pyro.infer.HMC``.
    :param kwargs: of ``pyro.infer.HMC``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _start_transition(self) -> None:
        self._before = self._z_last, self._potential_energy_last
        self._kinetic: list[Any] = []  # at the start, and at the proposal

    def _kinetic_energy(self, r_unscaled: Any) -> Any:
        energy = super()._kinetic_energy(r_unscaled)
        self.__dict__.setdefault("_kinetic", []).append(energy)
        return energy

    def _end_transition(self) -> dict[str, Any]:
        z, potential = self._before
        energy: Any = math.nan
        if self._kinetic:
            accepted = z is not self._z_last
            energy = self._kinetic[1] + self._potential_energy_last if accepted else self._kinetic[0] + potential
        return {"energy": float(energy), "n_steps": self.num_steps}
