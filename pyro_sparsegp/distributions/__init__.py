"""Likelihoods that Gaussian processes are used with and that Pyro lacks."""

from .probit import Probit
from .robust_max import RobustMax

__all__ = ["Probit", "RobustMax"]
