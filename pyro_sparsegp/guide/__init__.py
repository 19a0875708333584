"""The guide: what meets Pyro's messengers."""

from .auto import AutoSparseGP

__all__ = ["AutoSparseGP"]
